#include "text/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<char16_t, 256> letter{};
  std::array<std::int16_t, 0x144> byte{};  // -1 where no byte has the letter
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  for (std::int16_t& byte : alphabet.byte) byte = -1;
  char16_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const char16_t letter = stands_for_itself(byte) ? static_cast<char16_t>(byte) : next++;
    alphabet.letter[static_cast<std::size_t>(byte)] = letter;
    alphabet.byte[letter] = static_cast<std::int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();
static_assert(kAlphabet.letter[0xAD] == 0x143 && kAlphabet.letter[' '] == 0x120);

}  // namespace

char32_t byte_to_letter(unsigned char byte) noexcept { return kAlphabet.letter[byte]; }

std::optional<std::string> letters_to_bytes(std::string_view letters) {
  std::string bytes;
  bytes.reserve(letters.size());
  while (!letters.empty()) {
    const Utf8Unit unit = first_utf8_unit(letters);
    if (unit.state != Utf8State::valid || unit.code >= kAlphabet.byte.size()) return std::nullopt;
    const std::int16_t byte = kAlphabet.byte[unit.code];
    if (byte < 0) return std::nullopt;
    bytes += static_cast<char>(byte);
    letters.remove_prefix(unit.length);
  }
  return bytes;
}

}  // namespace qmlp::text
