#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "qmlp/tensor.h"

namespace qmlp {

// Hands out aligned pieces of one block; with a null base it only counts. So the code that sizes a
// block and the code that carves it are the same.
class Carver {
 public:
  explicit Carver(std::byte* base) noexcept : base_(base) {}

  // rows * cols * element_bytes, or an overflow that total() reports.
  std::byte* take(std::int64_t rows, std::int64_t cols, std::size_t element_bytes) noexcept {
    std::size_t cells = 0;
    std::size_t bytes = 0;
    overflow_ |= __builtin_mul_overflow(static_cast<std::size_t>(rows),
                                        static_cast<std::size_t>(cols), &cells);
    overflow_ |= __builtin_mul_overflow(cells, element_bytes, &bytes);
    overflow_ |= bytes > (std::size_t{1} << 62) - used_;
    if (overflow_) return nullptr;
    std::byte* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (bytes + Workspace::kAlignment - 1) / Workspace::kAlignment * Workspace::kAlignment;
    return piece;
  }
  template <class T>
  T* take(std::int64_t count) noexcept {
    return reinterpret_cast<T*>(take(count, 1, sizeof(T)));
  }
  std::optional<std::size_t> total() const noexcept {
    if (overflow_) return std::nullopt;
    return used_;
  }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
  bool overflow_ = false;
};

}  // namespace qmlp
