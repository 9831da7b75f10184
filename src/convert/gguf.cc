#include "convert/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "convert/ggml_types.h"
#include "io/files.h"
#include "text/quote.h"

namespace qmlp {
namespace {

enum class ValueType : std::uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint32_t kMaxDims = 4;
constexpr std::uint64_t kMaxName = 65535;

// Of a name for a message.
std::string_view shortened(std::string_view name) { return name.substr(0, 60); }

// Reads little-endian values front to back; every error names the byte where it happened.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  std::uint64_t offset() const { return offset_; }
  std::uint64_t left() const { return bytes_.size() - offset_; }
  Error error(std::string_view rest) const { return error_at(offset_, rest); }
  Error error_at(std::uint64_t offset, std::string_view rest) const {
    return Error{Errc::corrupt_file, concat(what_, ": byte ", offset, ": ", rest)};
  }

  template <class T>
  Result<T> read(std::string_view name) {
    if (left() < sizeof(T)) {
      return error(concat("the file ends inside ", shortened(name), ": truncated?"));
    }
    T value;
    std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }

  Result<std::string_view> text(std::string_view name) {
    QMLP_ASSIGN(const std::uint64_t length, read<std::uint64_t>(name));
    if (length > left()) {
      return error_at(offset_ - 8,
                      concat(shortened(name), ": length ", length, " passes the end of the file, ",
                             left(), " bytes are left"));
    }
    const std::string_view value(reinterpret_cast<const char*>(bytes_.data()) + offset_,
                                 static_cast<std::size_t>(length));
    offset_ += length;
    return value;
  }

  // The next `size` bytes, which are known to be there.
  std::span<const std::byte> take(std::uint64_t size) {
    const auto out =
        bytes_.subspan(static_cast<std::size_t>(offset_), static_cast<std::size_t>(size));
    offset_ += size;
    return out;
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view what_;
  std::uint64_t offset_ = 0;
};

template <class T>
Result<GgufValue> read_scalar(Reader& reader, std::string_view key) {
  QMLP_ASSIGN(const T value, reader.read<T>(key));
  GgufValue out;
  if constexpr (std::is_floating_point_v<T>) {
    out.value = value;
  } else if constexpr (std::is_unsigned_v<T>) {
    out.value = static_cast<std::uint64_t>(value);
  } else {
    out.value = static_cast<std::int64_t>(value);
  }
  return out;
}

template <class T>
Result<GgufValue> read_numbers(Reader& reader, std::string_view key, std::uint64_t count) {
  if (count > reader.left() / sizeof(T)) {
    return reader.error(
        concat(text::quote(key), ": an array of ", count, " elements passes the end of the file"));
  }
  return GgufValue{GgufNumbers{reader.take(count * sizeof(T)), sizeof(T),
                               std::is_floating_point_v<T>, std::is_signed_v<T>}};
}

Result<GgufValue> read_texts(Reader& reader, std::string_view key, std::uint64_t count) {
  if (count > reader.left() / 8) {
    return reader.error(
        concat(text::quote(key), ": an array of ", count, " strings passes the end of the file"));
  }
  std::vector<std::string_view> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count; ++i) {
    QMLP_ASSIGN(const std::string_view value, reader.text(key));
    values.push_back(value);
  }
  return GgufValue{std::move(values)};
}

Result<GgufValue> read_array(Reader& reader, std::string_view key) {
  QMLP_ASSIGN(const auto type, reader.read<std::uint32_t>(key));
  QMLP_ASSIGN(const auto count, reader.read<std::uint64_t>(key));
  switch (static_cast<ValueType>(type)) {
    case ValueType::u8:
    case ValueType::boolean:
      return read_numbers<std::uint8_t>(reader, key, count);
    case ValueType::i8:
      return read_numbers<std::int8_t>(reader, key, count);
    case ValueType::u16:
      return read_numbers<std::uint16_t>(reader, key, count);
    case ValueType::i16:
      return read_numbers<std::int16_t>(reader, key, count);
    case ValueType::u32:
      return read_numbers<std::uint32_t>(reader, key, count);
    case ValueType::i32:
      return read_numbers<std::int32_t>(reader, key, count);
    case ValueType::u64:
      return read_numbers<std::uint64_t>(reader, key, count);
    case ValueType::i64:
      return read_numbers<std::int64_t>(reader, key, count);
    case ValueType::f32:
      return read_numbers<float>(reader, key, count);
    case ValueType::f64:
      return read_numbers<double>(reader, key, count);
    case ValueType::string:
      return read_texts(reader, key, count);
    case ValueType::array:
      break;
  }
  return reader.error(concat(text::quote(key), ": arrays of type ", type, " are not supported"));
}

Result<GgufValue> read_value(Reader& reader, std::string_view key) {
  QMLP_ASSIGN(const auto type, reader.read<std::uint32_t>(key));
  switch (static_cast<ValueType>(type)) {
    case ValueType::u8:
      return read_scalar<std::uint8_t>(reader, key);
    case ValueType::i8:
      return read_scalar<std::int8_t>(reader, key);
    case ValueType::u16:
      return read_scalar<std::uint16_t>(reader, key);
    case ValueType::i16:
      return read_scalar<std::int16_t>(reader, key);
    case ValueType::u32:
      return read_scalar<std::uint32_t>(reader, key);
    case ValueType::i32:
      return read_scalar<std::int32_t>(reader, key);
    case ValueType::u64:
      return read_scalar<std::uint64_t>(reader, key);
    case ValueType::i64:
      return read_scalar<std::int64_t>(reader, key);
    case ValueType::f32:
      return read_scalar<float>(reader, key);
    case ValueType::f64:
      return read_scalar<double>(reader, key);
    case ValueType::boolean: {
      QMLP_ASSIGN(const auto value, reader.read<std::uint8_t>(key));
      if (value > 1) return reader.error(concat(text::quote(key), ": boolean is ", int{value}));
      return GgufValue{value == 1};
    }
    case ValueType::string: {
      QMLP_ASSIGN(const std::string_view value, reader.text(key));
      return GgufValue{value};
    }
    case ValueType::array:
      return read_array(reader, key);
  }
  return reader.error(concat(text::quote(key), ": value type ", type, " is unknown"));
}

// Names come from the file and go into one-line messages.
Status check_name(const Reader& reader, std::uint64_t offset, std::string_view kind,
                  std::string_view name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return static_cast<unsigned char>(c) >= 0x20 && c != 0x7F;
  });
  if (!name.empty() && name.size() <= kMaxName && plain) return {};
  return reader.error_at(offset, concat("a ", kind, " is empty, over ", kMaxName,
                                        " bytes long, or holds control characters"));
}

Result<GgufTensor> read_tensor_info(Reader& reader) {
  GgufTensor tensor;
  tensor.info_begin = reader.offset();
  QMLP_ASSIGN(tensor.name, reader.text("a tensor's name"));
  QMLP_TRY(check_name(reader, tensor.info_begin, "tensor name", tensor.name));
  const auto wrong = [&reader, &tensor](std::string_view rest) {
    return reader.error_at(tensor.info_begin,
                           concat("tensor ", text::quote(tensor.name), ": ", rest));
  };
  QMLP_ASSIGN(const auto dims, reader.read<std::uint32_t>(tensor.name));
  if (dims < 1 || dims > kMaxDims) {
    return wrong(concat("has ", dims, " dims, needs 1 to ", kMaxDims));
  }
  std::uint64_t elements = 1;
  for (std::uint32_t i = 0; i < dims; ++i) {
    QMLP_ASSIGN(const auto dim, reader.read<std::uint64_t>(tensor.name));
    const auto product = checked_mul(elements, dim);
    if (dim < 1 || dim > std::uint64_t{1} << 40 || !product) {
      return wrong(concat("dim ", dim, " is 0 or too large"));
    }
    elements = *product;
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(dim));
  }
  QMLP_ASSIGN(tensor.type, reader.read<std::uint32_t>(tensor.name));
  QMLP_ASSIGN(tensor.begin, reader.read<std::uint64_t>(tensor.name));
  const GgmlType* type = find_ggml_type(tensor.type);
  if (type == nullptr) {
    return wrong(concat("type ", tensor.type, " is unknown"));
  }
  const auto row = static_cast<std::uint64_t>(tensor.row_length());
  if (row % type->block_elements != 0) {
    return wrong(concat("row length ", row, " is no multiple of ", type->block_elements,
                        ", the block of ", type->name));
  }
  const auto bytes = checked_mul<std::uint64_t>(elements / type->block_elements, type->block_bytes);
  if (!bytes) return wrong("its size overflows 64 bits");
  tensor.bytes = *bytes;
  return tensor;
}

Status place_tensors(const Reader& reader, std::uint64_t alignment, std::uint64_t file_bytes,
                     std::vector<GgufTensor>& tensors) {
  const std::uint64_t rest = reader.offset() % alignment;
  const std::uint64_t data_begin = reader.offset() + (rest == 0 ? 0 : alignment - rest);
  std::vector<const GgufTensor*> order;
  for (GgufTensor& tensor : tensors) {
    if (tensor.begin % alignment != 0) {
      return reader.error_at(tensor.info_begin,
                             concat("tensor ", text::quote(tensor.name), ": offset ", tensor.begin,
                                    " is no multiple of the alignment ", alignment));
    }
    const auto begin = checked_add(data_begin, tensor.begin);
    const auto end = checked_add(begin.value_or(0), tensor.bytes);
    if (!begin || !end || *end > file_bytes) {
      return reader.error_at(
          tensor.info_begin,
          concat("tensor ", text::quote(tensor.name), ": needs ", tensor.bytes, " bytes at offset ",
                 tensor.begin, " of the data, which begins at byte ", data_begin,
                 ", the file holds ", file_bytes, ": truncated?"));
    }
    tensor.begin = *begin;
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->begin < b->begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i]->begin < order[i - 1]->begin + order[i - 1]->bytes) {
      return reader.error_at(order[i]->begin, concat("tensor ", text::quote(order[i]->name),
                                                     ": its data overlaps that of tensor ",
                                                     text::quote(order[i - 1]->name)));
    }
  }
  return {};
}

Status check_magic(Reader& reader, std::span<const std::byte> bytes, std::string_view path) {
  if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0) {
    const std::string_view looks = describe_contents(bytes);
    return Error{Errc::corrupt_file,
                 looks.empty() ? concat(path, ": not a GGUF file: it does not start with \"GGUF\"")
                               : concat(path, ": not a GGUF file: looks like ", looks)};
  }
  QMLP_TRY(reader.read<std::uint32_t>("the magic"));
  QMLP_ASSIGN(const auto version, reader.read<std::uint32_t>("the version"));
  if (version == 2 || version == 3) return {};
  if (version != 0 && (version & 0xFFFFu) == 0) {
    return Error{Errc::unsupported, concat(path, ": is a big-endian GGUF file: not supported")};
  }
  return Error{Errc::unsupported,
               concat(path, ": GGUF version ", version, " is not supported, only 2 and 3")};
}

}  // namespace

std::int64_t GgufNumbers::integer(std::size_t i) const noexcept {
  std::uint64_t bits = 0;
  std::memcpy(&bits, bytes.data() + i * element_bytes, element_bytes);
  const unsigned unused = 64 - 8 * element_bytes;
  if (is_signed) return static_cast<std::int64_t>(bits << unused) >> unused;
  return static_cast<std::int64_t>(bits);
}

double GgufNumbers::number(std::size_t i) const noexcept {
  if (!is_float) return static_cast<double>(integer(i));
  const std::byte* const at = bytes.data() + i * element_bytes;
  if (element_bytes == sizeof(double)) {
    double value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::optional<std::int64_t> GgufValue::integer() const noexcept {
  if (const auto* small = std::get_if<std::int64_t>(&value)) return *small;
  if (const auto* large = std::get_if<std::uint64_t>(&value)) {
    if (*large <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return static_cast<std::int64_t>(*large);
    }
  }
  return std::nullopt;
}

std::optional<double> GgufValue::number() const noexcept {
  if (const auto* single = std::get_if<float>(&value)) return *single;
  if (const auto* wide = std::get_if<double>(&value)) return *wide;
  if (const auto whole = integer()) return static_cast<double>(*whole);
  return std::nullopt;
}

std::optional<bool> GgufValue::boolean() const noexcept {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag;
  return std::nullopt;
}

Result<GgufFile> GgufFile::open(const std::string& path, bool use_mmap) {
  GgufFile out;
  QMLP_ASSIGN(out.file_, MappedFile::open(path, use_mmap));
  const std::span<const std::byte> bytes = out.file_.bytes();
  Reader reader(bytes, path);
  QMLP_TRY(check_magic(reader, bytes, path));
  QMLP_ASSIGN(const auto num_tensors, reader.read<std::uint64_t>("the tensor count"));
  QMLP_ASSIGN(const auto num_keys, reader.read<std::uint64_t>("the metadata count"));
  // The shortest record of each kind bounds what the file can hold.
  constexpr std::uint64_t kMinTensor = 8 + 1 + 4 + 8 + 4 + 8;
  constexpr std::uint64_t kMinKey = 8 + 1 + 4 + 1;
  if (num_tensors > reader.left() / kMinTensor || num_keys > reader.left() / kMinKey) {
    return reader.error(concat(num_tensors, " tensors and ", num_keys,
                               " metadata keys cannot fit into the file: truncated?"));
  }
  for (std::uint64_t i = 0; i < num_keys; ++i) {
    const std::uint64_t key_begin = reader.offset();
    QMLP_ASSIGN(const std::string_view key, reader.text("a metadata key"));
    QMLP_TRY(check_name(reader, key_begin, "metadata key", key));
    QMLP_ASSIGN(GgufValue value, read_value(reader, key));
    out.metadata_.emplace_back(key, std::move(value));
  }
  std::sort(out.metadata_.begin(), out.metadata_.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < out.metadata_.size(); ++i) {
    if (out.metadata_[i].first == out.metadata_[i - 1].first) {
      // Keys borrow from the file: the later text of the two is the repetition.
      const char* const at =
          std::max(out.metadata_[i].first.data(), out.metadata_[i - 1].first.data());
      return reader.error_at(
          static_cast<std::uint64_t>(at - reinterpret_cast<const char*>(bytes.data())),
          concat("duplicate key ", text::quote(out.metadata_[i].first)));
    }
  }
  std::uint64_t alignment = kDefaultAlignment;
  if (const GgufValue* value = out.find("general.alignment")) {
    const auto number = value->integer().value_or(0);
    if (number < 8 || number > (1 << 20) ||
        !std::has_single_bit(static_cast<std::uint64_t>(number))) {
      return reader.error(concat("general.alignment is ", number, ", needs a power of two >= 8"));
    }
    alignment = static_cast<std::uint64_t>(number);
  }
  for (std::uint64_t i = 0; i < num_tensors; ++i) {
    QMLP_ASSIGN(GgufTensor tensor, read_tensor_info(reader));
    out.tensors_.push_back(std::move(tensor));
  }
  QMLP_TRY(place_tensors(reader, alignment, bytes.size(), out.tensors_));
  std::sort(out.tensors_.begin(), out.tensors_.end(),
            [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
  for (std::size_t i = 1; i < out.tensors_.size(); ++i) {
    if (out.tensors_[i].name == out.tensors_[i - 1].name) {
      return reader.error_at(std::max(out.tensors_[i].info_begin, out.tensors_[i - 1].info_begin),
                             concat("duplicate tensor ", text::quote(out.tensors_[i].name)));
    }
  }
  return out;
}

const GgufValue* GgufFile::find(std::string_view key) const noexcept {
  const auto at =
      std::lower_bound(metadata_.begin(), metadata_.end(), key,
                       [](const auto& entry, std::string_view name) { return entry.first < name; });
  return at != metadata_.end() && at->first == key ? &at->second : nullptr;
}

}  // namespace qmlp
