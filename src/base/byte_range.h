#pragma once

#include <cstdint>

#include "qmlp/tensor.h"

namespace qmlp {

// Addresses [begin, end), to see whether arguments share memory.
struct ByteRange {
  std::uintptr_t begin = 0, end = 0;
  bool meets(const ByteRange& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
};

template <class Byte>
ByteRange range_of(const BasicMatrixView<Byte>& view) noexcept {
  if (view.data == nullptr || view.rows == 0 || view.cols == 0) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  const std::uint64_t elements =
      static_cast<std::uint64_t>(view.rows - 1) * static_cast<std::uint64_t>(view.row_stride) +
      static_cast<std::uint64_t>(view.cols);
  return {begin, begin + elements * size_of(view.dtype)};
}

}  // namespace qmlp
