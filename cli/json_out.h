#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace qmlp::cli {

// A JSON value for output, members in the order they were set. Numbers that JSON lacks become null,
// bytes that are not UTF-8 become U+FFFD.
class Json {
 public:
  Json();                                                          // null
  Json(bool value);                                                // NOLINT: implicit by design
  Json(double value);                                              // NOLINT
  Json(std::string_view text);                                     // NOLINT
  Json(const char* text) : Json(std::string_view(text)) {}         // NOLINT
  Json(const std::string& text) : Json(std::string_view(text)) {}  // NOLINT
  template <std::signed_integral Integer>
  Json(Integer value) : Json(Signed{value}) {}  // NOLINT
  template <std::unsigned_integral Integer>
  requires(!std::same_as<Integer, bool>) Json(Integer value) : Json(Unsigned{value}) {}  // NOLINT
  ~Json();
  Json(Json&& other) noexcept;
  Json& operator=(Json&& other) noexcept;

  static Json object();
  static Json array();
  template <class Range>
  static Json array_of(const Range& values) {
    Json list = array();
    for (const auto& value : values) list.push(Json(value));
    return list;
  }

  Json& set(std::string_view key, Json value);  // of an object
  Json& push(Json value);                       // of an array
  Json take() { return std::move(*this); }      // ends a chain: Json::array().push(1).take()
  // One line, or indented by `indent` spaces with arrays of numbers kept on one line.
  std::string dump(int indent = -1) const;

 private:
  struct Signed {
    std::int64_t value;
  };
  struct Unsigned {
    std::uint64_t value;
  };
  struct Impl;
  explicit Json(Signed value);
  explicit Json(Unsigned value);
  std::unique_ptr<Impl> impl_;
};

}  // namespace qmlp::cli
