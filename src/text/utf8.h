#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace qmlp::text {

enum class Utf8State : std::uint8_t {
  valid,       // one whole character
  invalid,     // bytes that no character starts with or continues as
  incomplete,  // the text ends inside a character
};

// What stands at the start of a non-empty text. For `invalid` the length is that of the longest
// start of a character (at least 1): what Unicode and Python replace by one U+FFFD.
struct Utf8Unit {
  Utf8State state;
  std::uint8_t length;
  char32_t code;  // of a valid character
};
Utf8Unit first_utf8_unit(std::string_view text) noexcept;

// Offset of the first byte of the first unit that is no character; empty for valid UTF-8.
std::optional<std::size_t> find_invalid_utf8(std::string_view text) noexcept;

void append_utf8(char32_t code, std::string& out);

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace qmlp::text
