#include "io/safetensors.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "io/json.h"

namespace qmlp {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::size_t kMaxDims = 32;

struct NamedBits {
  std::string_view name;
  int bits;
};
constexpr NamedBits kTypes[] = {
    {"BOOL", 8},    {"U8", 8},      {"I8", 8},      {"U16", 16},    {"I16", 16},
    {"U32", 32},    {"I32", 32},    {"U64", 64},    {"I64", 64},    {"F16", 16},
    {"BF16", 16},   {"F32", 32},    {"F64", 64},    {"C64", 64},    {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
};

Error corrupt(std::string_view what, std::string_view rest) {
  return Error{Errc::corrupt_file, concat(what, ": ", rest)};
}
Error corrupt_tensor(std::string_view what, std::string_view tensor, std::string_view rest) {
  return Error{Errc::corrupt_file, concat(what, ": tensor '", tensor, "': ", rest)};
}

// The JSON text of the header.
Result<std::string_view> header_text(std::span<const std::byte> file, std::string_view what) {
  const auto not_safetensors = [&](std::string_view reason) {
    const std::string_view looks = describe_contents(file);
    if (looks.empty()) return corrupt(what, concat("not a safetensors file: ", reason));
    return corrupt(what, concat("not a safetensors file: looks like ", looks));
  };
  if (file.size() < kLengthBytes) {
    return not_safetensors(concat("holds ", file.size(), " bytes, the header length needs 8"));
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(file[i]) << (8 * i);
  }
  if (length > kMaxSafetensorsHeader) {
    return not_safetensors(concat("header length ", length, " is over ", kMaxSafetensorsHeader));
  }
  if (length > file.size() - kLengthBytes) {
    return not_safetensors(concat("header length ", length,
                                  " passes the end of the file, which holds ", file.size(),
                                  " bytes: truncated?"));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              static_cast<std::size_t>(length));
  if (text.empty() || text.front() != '{') {
    return not_safetensors("the header does not start with '{'");
  }
  return text;
}

Status read_metadata(const Json& value, std::string_view what, SafetensorsHeader& header) {
  if (value.is_null()) return {};  // MLX writes null when there is none
  const JsonObject* object = value.object();
  if (object == nullptr) {
    return corrupt(what, concat("__metadata__ is ", value.kind_name(), ", needs an object"));
  }
  for (const JsonMember& member : object->members()) {
    const std::string* text = member.value.string();
    if (text == nullptr) {
      return corrupt(what, concat("__metadata__ '", member.name, "' is ", member.value.kind_name(),
                                  ", needs a string"));
    }
    header.metadata.emplace_back(member.name, *text);
  }
  return {};
}

Status read_shape(const Json* value, std::string_view what, SafetensorsEntry& entry) {
  const JsonArray* dims = value != nullptr ? value->array() : nullptr;
  if (dims == nullptr) return corrupt_tensor(what, entry.name, "shape is missing or not an array");
  if (dims->size() > kMaxDims) {
    return corrupt_tensor(
        what, entry.name,
        concat("shape has ", dims->size(), " dims, at most ", kMaxDims, " are supported"));
  }
  for (const Json& dim : *dims) {
    const auto size = dim.integer();
    if (!size || *size < 0) {
      return corrupt_tensor(what, entry.name,
                            concat("shape: dim ", dim.dump(), " is not an integer >= 0"));
    }
    entry.shape.push_back(*size);
  }
  return {};
}

// The byte count of the entry's type and shape.
Result<std::uint64_t> needed_bytes(std::string_view what, const SafetensorsEntry& entry) {
  std::uint64_t bits = static_cast<std::uint64_t>(safetensors_bits(entry.dtype));
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return {0};
  for (const std::int64_t dim : entry.shape) {
    const auto product = checked_mul<std::uint64_t>(bits, static_cast<std::uint64_t>(dim));
    if (!product) {
      return corrupt_tensor(what, entry.name,
                            concat("shape ", shape_to_string(entry.shape), " overflows 64 bits"));
    }
    bits = *product;
  }
  if (bits % 8 != 0) {
    return corrupt_tensor(what, entry.name,
                          concat("shape ", shape_to_string(entry.shape), " of ", entry.dtype,
                                 " is no whole number of bytes"));
  }
  return bits / 8;
}

Result<SafetensorsEntry> read_entry(const JsonMember& member, std::string_view what,
                                    std::uint64_t data_begin, std::uint64_t data_bytes) {
  SafetensorsEntry entry;
  entry.name = member.name;
  if (entry.name.empty()) return corrupt(what, "a tensor has an empty name");
  if (member.value.object() == nullptr) {
    return corrupt_tensor(what, entry.name,
                          concat("is ", member.value.kind_name(), ", needs an object"));
  }
  const Json* dtype = member.value.find("dtype");
  if (dtype == nullptr || dtype->string() == nullptr) {
    return corrupt_tensor(what, entry.name, "dtype is missing or not a string");
  }
  entry.dtype = *dtype->string();
  if (safetensors_bits(entry.dtype) == 0) {
    return corrupt_tensor(what, entry.name, concat("dtype ", dtype->dump(), " is unknown"));
  }
  QMLP_TRY(read_shape(member.value.find("shape"), what, entry));

  const Json* offsets = member.value.find("data_offsets");
  const JsonArray* pair = offsets != nullptr ? offsets->array() : nullptr;
  if (pair == nullptr || pair->size() != 2 || !(*pair)[0].unsigned_integer() ||
      !(*pair)[1].unsigned_integer()) {
    return corrupt_tensor(what, entry.name,
                          concat("data_offsets: ", offsets != nullptr ? offsets->dump() : "missing",
                                 ", needs two integers >= 0"));
  }
  const std::uint64_t begin = *(*pair)[0].unsigned_integer();
  const std::uint64_t end = *(*pair)[1].unsigned_integer();
  if (begin > end || end > data_bytes) {
    return corrupt_tensor(
        what, entry.name,
        concat("data_offsets [", begin, ", ", end, "] are not a range of the ", data_bytes,
               " data bytes", end > data_bytes ? ": truncated?" : ""));
  }
  QMLP_ASSIGN(const std::uint64_t need, needed_bytes(what, entry));
  if (need != end - begin) {
    return corrupt_tensor(what, entry.name,
                          concat("data_offsets hold ", end - begin, " bytes, ", entry.dtype, " ",
                                 shape_to_string(entry.shape), " needs ", need));
  }
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

}  // namespace

int safetensors_bits(std::string_view dtype) noexcept {
  for (const NamedBits& type : kTypes) {
    if (type.name == dtype) return type.bits;
  }
  return 0;
}

std::optional<DType> float_dtype(std::string_view name) noexcept {
  if (name == "F32") return DType::f32;
  if (name == "F16") return DType::f16;
  if (name == "BF16") return DType::bf16;
  return std::nullopt;
}

const char* safetensors_name(DType dtype) noexcept {
  return dtype == DType::f32 ? "F32" : dtype == DType::f16 ? "F16" : "BF16";
}

std::string shape_to_string(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) out += ", ";
    out += std::to_string(shape[i]);
  }
  return out + "]";
}

Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file,
                                            std::string_view what) {
  QMLP_ASSIGN(const std::string_view text, header_text(file, what));
  QMLP_ASSIGN(const Json root, Json::parse(text, concat(what, ": header")));
  const std::uint64_t data_begin = kLengthBytes + text.size();
  const std::uint64_t data_bytes = file.size() - data_begin;

  SafetensorsHeader header;
  for (const JsonMember& member : root.object()->members()) {
    if (member.name == "__metadata__") {
      QMLP_TRY(read_metadata(member.value, what, header));
      continue;
    }
    QMLP_ASSIGN(SafetensorsEntry entry, read_entry(member, what, data_begin, data_bytes));
    header.entries.push_back(std::move(entry));
  }
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  std::uint64_t covered = data_begin;
  std::string_view previous;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin < covered) {
      return corrupt_tensor(what, entry.name,
                            concat("its data overlaps that of tensor '", previous, "'"));
    }
    if (entry.begin > covered) {
      return corrupt_tensor(
          what, entry.name,
          concat(entry.begin - covered, " bytes before its data belong to no tensor"));
    }
    covered = entry.end;
    previous = entry.name;
  }
  if (covered != file.size()) {
    return corrupt(what, concat("the last ", file.size() - covered, " bytes belong to no tensor"));
  }
  return header;
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path, bool use_mmap) {
  SafetensorsFile out;
  QMLP_ASSIGN(out.file_, MappedFile::open(path, use_mmap));
  QMLP_ASSIGN(out.header_, parse_safetensors(out.file_.bytes(), path));
  return out;
}

}  // namespace qmlp
