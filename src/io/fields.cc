#include "io/fields.h"

#include <cmath>

#include "base/concat.h"

namespace qmlp {
namespace {

// A value as a message shows it: the beginning of a long one is enough to find it.
std::string shown(const Json& value) {
  constexpr std::size_t kMost = 80;
  std::string text = value.dump();
  if (text.size() <= kMost) return text;
  std::size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // whole UTF-8
  return concat(std::string_view(text).substr(0, end), "...");
}

}  // namespace

const Json* Fields::find(std::string_view name) const {
  const Json* value = json_.find(name);
  return value == nullptr || value->is_null() ? nullptr : value;
}

Error Fields::wrong(std::string_view name, const Json& value, std::string_view need) const {
  return Error{Errc::corrupt_file,
               concat(what_, ": ", name, " is ", shown(value), ", needs ", need)};
}

Error Fields::unsupported(std::string_view name, const Json& value, std::string_view only) const {
  return Error{Errc::unsupported,
               concat(what_, ": ", name, " ", shown(value), " is not supported, only ", only)};
}

Error Fields::missing(std::string_view name, std::string_view need) const {
  const char* found = json_.find(name) == nullptr ? " is missing" : " is null";
  return Error{Errc::corrupt_file, concat(what_, ": ", name, found, ", needs ", need)};
}

Status Fields::size(std::string_view name, std::int64_t& out, std::int64_t limit) const {
  if (find(name) == nullptr) return missing(name, concat("an integer from 1 to ", limit));
  return optional_size(name, out, limit);
}

Status Fields::optional_size(std::string_view name, std::int64_t& out, std::int64_t limit) const {
  const Json* value = find(name);
  if (value == nullptr) return {};
  const auto number = value->integer();
  if (!number || *number < 1 || *number > limit) {
    return wrong(name, *value, concat("an integer from 1 to ", limit));
  }
  out = *number;
  return {};
}

Status Fields::positive(std::string_view name, double& out) const {
  if (find(name) == nullptr) return missing(name, "a number above 0");
  return optional_positive(name, out);
}

Status Fields::optional_positive(std::string_view name, double& out) const {
  const Json* value = find(name);
  if (value == nullptr) return {};
  const auto number = value->number();
  if (!number || !(*number > 0.0) || !std::isfinite(*number)) {
    return wrong(name, *value, "a number above 0");
  }
  out = *number;
  return {};
}

Status Fields::flag(std::string_view name, bool& out) const {
  const Json* value = find(name);
  if (value == nullptr) return {};
  const auto number = value->boolean();
  if (!number) return wrong(name, *value, "true or false");
  out = *number;
  return {};
}

Status Fields::text(std::string_view name, std::string& out) const {
  const Json* value = find(name);
  if (value == nullptr) return missing(name, "a string");
  if (value->string() == nullptr) return wrong(name, *value, "a string");
  out = *value->string();
  return {};
}

}  // namespace qmlp
