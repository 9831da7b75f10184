#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace qmlp::text {

// GPT-2's byte-level alphabet: a printable character for each of the 256 bytes. Printable Latin-1
// stands for itself, the 68 others are U+0100 and up in byte order.
char32_t byte_to_letter(unsigned char byte) noexcept;

// The bytes that a token's text spells; empty when a character is not in the alphabet.
std::optional<std::string> letters_to_bytes(std::string_view letters);

}  // namespace qmlp::text
