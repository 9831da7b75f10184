#include "text/utf8.h"

#include <cstring>

#include "qmlp/tokenizer.h"

namespace qmlp {
namespace text {
namespace {

// Skips eight bytes at a time over ASCII.
std::size_t ascii_prefix(std::string_view text, std::size_t at) noexcept {
  constexpr std::uint64_t kHighBits = 0x8080808080808080ULL;
  while (at + 8 <= text.size()) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & kHighBits) != 0) break;
    at += 8;
  }
  while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) ++at;
  return at;
}

}  // namespace

Utf8Unit first_utf8_unit(std::string_view text) noexcept {
  const auto byte = [text](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Utf8State::valid, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8State::invalid, 1, 0};
  const std::uint8_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what is above U+10FFFF.
  const unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code = lead & (0x7F >> length);
  for (std::uint8_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Utf8State::incomplete, i, 0};
    const unsigned char next = byte(i);
    if (next < (i == 1 ? low : 0x80) || next > (i == 1 ? high : 0xBF)) {
      return {Utf8State::invalid, i, 0};
    }
    code = (code << 6) | (next & 0x3F);
  }
  return {Utf8State::valid, length, code};
}

std::optional<std::size_t> find_invalid_utf8(std::string_view text) noexcept {
  for (std::size_t at = ascii_prefix(text, 0); at < text.size(); at = ascii_prefix(text, at)) {
    const Utf8Unit unit = first_utf8_unit(text.substr(at));
    if (unit.state != Utf8State::valid) return at;
    at += unit.length;
  }
  return std::nullopt;
}

void append_utf8(char32_t code, std::string& out) {
  const auto put = [&out](char32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

}  // namespace text

std::string Utf8Stream::push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  out.reserve(held_.size());
  std::size_t at = 0;
  while (at < held_.size()) {
    const text::Utf8Unit unit = text::first_utf8_unit(std::string_view(held_).substr(at));
    if (unit.state == text::Utf8State::incomplete) break;
    if (unit.state == text::Utf8State::valid) {
      out.append(held_, at, unit.length);
    } else {
      out += text::kReplacement;
    }
    at += unit.length;
  }
  held_.erase(0, at);
  return out;
}

std::string Utf8Stream::finish() {
  // Only the start of one character can be held back.
  const bool held = !held_.empty();
  held_.clear();
  return held ? std::string(text::kReplacement) : std::string();
}

}  // namespace qmlp
