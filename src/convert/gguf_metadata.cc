#include "convert/gguf_metadata.h"

#include <cmath>

#include "base/concat.h"

namespace qmlp {

std::string GgufMetadata::key(std::string_view name) const {
  return concat(architecture_, ".", name);
}

Error GgufMetadata::error(Errc code, std::string_view rest) const {
  return Error{code, concat(model_.path(), ": ", rest)};
}

Status GgufMetadata::size(std::string_view name, std::int64_t& out) const {
  if (!has(name)) return error(Errc::corrupt_file, concat(key(name), " is missing"));
  return optional_size(name, out);
}

Status GgufMetadata::optional_size(std::string_view name, std::int64_t& out) const {
  const GgufValue* value = model_.find(key(name));
  if (value == nullptr) return {};
  std::optional<std::int64_t> number = value->integer();
  if (const GgufNumbers* numbers = value->integers(); numbers != nullptr && numbers->size() != 0) {
    number = numbers->integer(0);
    for (std::size_t i = 1; i < numbers->size(); ++i) {
      if (numbers->integer(i) == *number) continue;
      return error(
          Errc::unsupported,
          concat(key(name), " is ", *number, " for the first layer and ", numbers->integer(i),
                 " for layer ", i, ": layers of different sizes are not supported"));
    }
  }
  if (!number || *number < 1 || *number > std::int64_t{1} << 31) {
    return error(Errc::corrupt_file, concat(key(name), " is not an integer from 1 to 2^31"));
  }
  out = *number;
  return {};
}

Result<std::optional<float>> GgufMetadata::positive(std::string_view name) const {
  const GgufValue* value = model_.find(key(name));
  if (value == nullptr) return std::optional<float>();
  const auto real = value->number();
  if (!real || !(*real > 0.0) || !std::isfinite(*real)) {
    return error(Errc::corrupt_file, concat(key(name), " is not a number above 0"));
  }
  return std::optional<float>(static_cast<float>(*real));
}

Result<std::optional<std::string_view>> GgufMetadata::text(std::string_view name) const {
  const GgufValue* value = model_.find(key(name));
  if (value == nullptr) return std::optional<std::string_view>();
  if (value->text() == nullptr) {
    return error(Errc::corrupt_file, concat(key(name), " is not a string"));
  }
  return std::optional<std::string_view>(*value->text());
}

}  // namespace qmlp
