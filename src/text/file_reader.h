#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/concat.h"
#include "io/json.h"
#include "qmlp/status.h"

namespace qmlp::text {

// Members of a tokenizer file's objects; every message begins with the file's name and says which
// member it is about. `where` is the path of the object, such as "model", empty
// for the whole file.
class FileReader {
 public:
  explicit FileReader(std::string_view name) : name_(name) {}

  Error corrupt(const std::string& what) const {
    return Error{Errc::corrupt_file, concat(name_, ": ", what)};
  }
  Error unsupported(const std::string& what) const {
    return Error{Errc::unsupported, concat(name_, ": ", what)};
  }
  // An error of a part that does not know the file.
  Error within(std::string_view where, const Error& error) const {
    return Error{error.code, concat(name_, ": ", where, ": ", error.message)};
  }

  // A member that may be absent or null.
  Result<bool> flag(const Json& object, std::string_view where, std::string_view key,
                    bool otherwise) const {
    const Json* value = member(object, key);
    if (value == nullptr) return otherwise;
    if (const auto found = value->boolean()) return *found;
    return wrong(where, key, *value, "a boolean");
  }
  Result<std::string> string(const Json& object, std::string_view where, std::string_view key,
                             std::string_view otherwise) const {
    const Json* value = member(object, key);
    if (value == nullptr) return std::string(otherwise);
    if (const std::string* found = value->string()) return *found;
    return wrong(where, key, *value, "a string");
  }
  Result<std::optional<std::int64_t>> integer(const Json& object, std::string_view where,
                                              std::string_view key) const {
    const Json* value = member(object, key);
    if (value == nullptr) return std::optional<std::int64_t>();
    if (const auto found = value->integer()) return found;
    return wrong(where, key, *value, "an integer");
  }
  // A member that must be there.
  Result<const JsonArray*> array(const Json& object, std::string_view where,
                                 std::string_view key) const {
    const Json* value = object.find(key);
    if (value == nullptr) return corrupt(concat(where, ".", key, " is missing"));
    if (const JsonArray* found = value->array()) return found;
    return wrong(where, key, *value, "an array");
  }

 private:
  static const Json* member(const Json& object, std::string_view key) {
    const Json* value = object.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }
  Error wrong(std::string_view where, std::string_view key, const Json& value,
              std::string_view required) const {
    return corrupt(concat(where, where.empty() ? "" : ".", key, " is ", value.kind_name(), ", ",
                          required, " is required"));
  }

  std::string name_;
};

}  // namespace qmlp::text
