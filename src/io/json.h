#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "qmlp/status.h"

namespace qmlp {

class Json;
struct JsonMember;
using JsonArray = std::vector<Json>;

// Members in the order of the text, names unique.
class JsonObject {
 public:
  const std::vector<JsonMember>& members() const noexcept { return members_; }
  std::size_t size() const noexcept;
  const Json* find(std::string_view name) const noexcept;  // null when absent
  // Replaces the member of that name or appends one.
  void set(std::string name, Json value);
  // Appends a member whose name is known to be new.
  void append(std::string name, Json value);
  void erase(std::string_view name);

 private:
  friend class JsonBuilder;
  // Sorts the index that find uses; the name of a repeated member, if any.
  std::optional<std::string_view> build_index();

  std::vector<JsonMember> members_;
  std::vector<std::uint32_t> by_name_;  // sorted by name; empty for small objects
};

// A JSON value that a file or the writer holds. Accessors return null or empty for another kind.
class Json {
 public:
  Json() noexcept = default;     // null
  Json(bool value);              // NOLINT: implicit by design, as are the others
  Json(int value);               // NOLINT
  Json(std::int64_t value);      // NOLINT
  Json(std::uint64_t value);     // NOLINT
  Json(double value);            // NOLINT
  Json(std::string value);       // NOLINT
  Json(std::string_view value);  // NOLINT
  Json(const char* value);       // NOLINT
  Json(JsonArray value);         // NOLINT
  Json(JsonObject value);        // NOLINT

  // Parses one complete value. Refuses, naming `what` and the byte offset: syntax errors, invalid
  // UTF-8, repeated member names, more than kMaxDepth levels, numbers that no double holds,
  // anything but blanks after the value.
  static constexpr int kMaxDepth = 100;
  static Result<Json> parse(std::string_view text, std::string_view what);

  bool is_null() const noexcept { return value_.index() == 0; }
  const char* kind_name() const noexcept;  // "an object", "a string", ... for messages

  std::optional<bool> boolean() const noexcept;
  std::optional<std::int64_t> integer() const noexcept;  // written without fraction or exponent
  std::optional<std::uint64_t> unsigned_integer() const noexcept;
  std::optional<double> number() const noexcept;  // any number
  const std::string* string() const noexcept { return std::get_if<std::string>(&value_); }
  const JsonArray* array() const noexcept { return std::get_if<JsonArray>(&value_); }
  const JsonObject* object() const noexcept { return std::get_if<JsonObject>(&value_); }
  JsonArray* array() noexcept { return std::get_if<JsonArray>(&value_); }
  JsonObject* object() noexcept { return std::get_if<JsonObject>(&value_); }
  // The member of an object; null when absent or when this is no object.
  const Json* find(std::string_view name) const noexcept;

  // As JSON text: indented by `indent` spaces a level, or on one line when negative. Doubles are
  // written so that they read back exactly; infinities and NaN as null.
  std::string dump(int indent = -1) const;

 private:
  std::variant<std::monostate, bool, std::int64_t, std::uint64_t, double, std::string, JsonArray,
               JsonObject>
      value_;
};

struct JsonMember {
  std::string name;
  Json value;
};

// Here, since they destroy members on an error path and need the member's type complete.
inline Json::Json(bool value) : value_(value) {}
inline Json::Json(int value) : value_(static_cast<std::int64_t>(value)) {}
inline Json::Json(std::int64_t value) : value_(value) {}
inline Json::Json(std::uint64_t value) : value_(value) {}
inline Json::Json(double value) : value_(value) {}
inline Json::Json(std::string value) : value_(std::move(value)) {}
inline Json::Json(std::string_view value) : value_(std::string(value)) {}
inline Json::Json(const char* value) : value_(std::string(value)) {}
inline Json::Json(JsonArray value) : value_(std::move(value)) {}
inline Json::Json(JsonObject value) : value_(std::move(value)) {}

}  // namespace qmlp
