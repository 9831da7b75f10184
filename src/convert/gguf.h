#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/mapped_file.h"
#include "qmlp/status.h"

namespace qmlp {

// An array of numbers as the file stores it; borrows from the file.
struct GgufNumbers {
  std::span<const std::byte> bytes;
  std::uint32_t element_bytes = 1;
  bool is_float = false;
  bool is_signed = false;

  std::size_t size() const noexcept { return bytes.size() / element_bytes; }
  std::int64_t integer(std::size_t i) const noexcept;  // of an array of integers
  double number(std::size_t i) const noexcept;
};

// One metadata value. Text borrows from the file and may be any bytes.
struct GgufValue {
  std::variant<std::uint64_t, std::int64_t, float, double, bool, std::string_view,
               std::vector<std::string_view>, GgufNumbers>
      value;

  std::optional<std::int64_t> integer() const noexcept;  // any integer type that fits
  std::optional<double> number() const noexcept;
  std::optional<bool> boolean() const noexcept;
  const std::string_view* text() const noexcept { return std::get_if<std::string_view>(&value); }
  const std::vector<std::string_view>* texts() const noexcept {
    return std::get_if<std::vector<std::string_view>>(&value);
  }
  const GgufNumbers* numbers() const noexcept { return std::get_if<GgufNumbers>(&value); }
  const GgufNumbers* integers() const noexcept {
    return numbers() == nullptr || numbers()->is_float ? nullptr : numbers();
  }
};

struct GgufTensor {
  std::string_view name;
  std::vector<std::int64_t> shape;  // row-major, slowest first: the reverse of the file's order
  std::uint32_t type = 0;
  std::uint64_t begin = 0;  // byte of the file
  std::uint64_t bytes = 0;
  std::uint64_t info_begin = 0;  // byte of the file where its description stands
  std::uint32_t part = 0;        // of a split model, the file

  std::int64_t row_length() const noexcept { return shape.back(); }
};

// A GGUF file of version 2 or 3, little endian, checked completely at open: every count, length and
// offset lies inside the file, tensors do not overlap, names do not repeat.
class GgufFile {
 public:
  static Result<GgufFile> open(const std::string& path, bool use_mmap = true);

  const std::string& path() const noexcept { return file_.path(); }
  const GgufValue* find(std::string_view key) const noexcept;
  const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }
  std::span<const std::byte> data(const GgufTensor& tensor) const noexcept {
    return file_.bytes().subspan(tensor.begin, tensor.bytes);
  }
  void release(const GgufTensor& tensor) const noexcept {
    file_.release(tensor.begin, tensor.bytes);
  }

 private:
  MappedFile file_;
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;  // sorted by key
  std::vector<GgufTensor> tensors_;                               // sorted by name
};

}  // namespace qmlp
