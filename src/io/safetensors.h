#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/mapped_file.h"
#include "qmlp/status.h"
#include "qmlp/types.h"

namespace qmlp {

// One tensor of a safetensors header. Its bytes are [begin, end) of the file.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the file spells it
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Reads and checks the header of a whole file's bytes: every entry's type, shape and byte range,
// and that the ranges tile the data without gap or overlap. `what` names the file in messages. Data
// may start at any byte.
inline constexpr std::uint64_t kMaxSafetensorsHeader = 100'000'000;
Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file, std::string_view what);

// Bits of one element of a safetensors type; 0 when the type is unknown.
int safetensors_bits(std::string_view dtype) noexcept;
// "F32", "F16", "BF16" as DType, and back.
std::optional<DType> float_dtype(std::string_view safetensors_name) noexcept;
const char* safetensors_name(DType dtype) noexcept;

std::string shape_to_string(const std::vector<std::int64_t>& shape);  // "[2, 3]"

// An opened file. Views borrow from it.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path, bool use_mmap = true);

  const MappedFile& file() const noexcept { return file_; }
  const SafetensorsHeader& header() const noexcept { return header_; }
  std::span<const std::byte> data(const SafetensorsEntry& entry) const noexcept {
    return file_.bytes().subspan(entry.begin, entry.end - entry.begin);
  }

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

}  // namespace qmlp
