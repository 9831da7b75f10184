#include "text/charsmap.h"

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
// Hugging Face looks longer graphemes up character by character.
constexpr std::size_t kLongestGrapheme = 5;
// Marks that Unicode 15 to 17 added, which PCRE2 10.42 does not know, belong to what they follow.
constexpr std::string_view kGrapheme =
    R"(\X(?:(?<![\p{Cc}\p{Cf}\p{Zl}\p{Zp}]))"
    R"((?:[\x{897}\x{CF3}\x{ECE}\x{1ACF}-\x{1ADD}\x{1AE0}-\x{1AEB}][\p{M}\x{200C}\x{200D}]*)+)?)";

// The fields of a unit of the double array.
constexpr bool has_leaf(std::uint32_t unit) { return ((unit >> 8) & 1) != 0; }
constexpr std::uint32_t value(std::uint32_t unit) { return unit & 0x7FFFFFFF; }
constexpr std::uint32_t label(std::uint32_t unit) { return unit & 0x800000FF; }
constexpr std::uint32_t offset(std::uint32_t unit) {
  return (unit >> 10) << ((unit & (std::uint32_t{1} << 9)) >> 6);
}

Error corrupt(const std::string& what) { return Error{Errc::corrupt_file, "charsmap: " + what}; }

int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  if (c == '+') return 62;
  return c == '/' ? 63 : -1;
}

std::uint32_t read_word(std::string_view bytes, std::size_t at) {
  std::uint32_t word = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    word |= std::uint32_t{static_cast<unsigned char>(bytes[at + i])} << (8 * i);
  }
  return word;
}

}  // namespace

Result<CharsMap> CharsMap::read_base64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t word = 0;
  std::size_t padding = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int digit = base64_digit(text[i]);
    if (digit < 0 && (text[i] != '=' || i + 2 < text.size())) {
      return corrupt(concat("no base64 at character ", i));
    }
    if (digit < 0) ++padding;
    if (digit >= 0 && padding > 0) return corrupt(concat("no base64 at character ", i));
    word = word << 6 | static_cast<std::uint32_t>(digit < 0 ? 0 : digit);
    if (i % 4 != 3) continue;
    bytes += static_cast<char>(word >> 16 & 0xFF);
    if (padding < 2) bytes += static_cast<char>(word >> 8 & 0xFF);
    if (padding < 1) bytes += static_cast<char>(word & 0xFF);
  }
  if (text.size() % 4 != 0) return corrupt("its base64 is cut off");
  return read(bytes);
}

Result<CharsMap> CharsMap::read(std::string_view bytes) {
  CharsMap out;
  if (bytes.empty()) return out;  // no rules
  if (bytes.size() < 4 || bytes.size() > kMaxBytes) {
    return corrupt(concat("it holds ", bytes.size(), " bytes"));
  }
  const std::size_t trie_bytes = read_word(bytes, 0);
  if (trie_bytes == 0 || trie_bytes % 4 != 0 || trie_bytes > bytes.size() - 4) {
    return corrupt(concat("its trie has ", trie_bytes, " bytes of ", bytes.size() - 4));
  }
  out.trie_.resize(trie_bytes / 4);
  for (std::size_t i = 0; i < out.trie_.size(); ++i) out.trie_[i] = read_word(bytes, 4 + 4 * i);
  out.replacements_ = bytes.substr(4 + trie_bytes);
  if (out.replacements_.empty() || out.replacements_.back() != '\0') out.replacements_ += '\0';
  if (const auto at = find_invalid_utf8(out.replacements_)) {
    return corrupt(concat("invalid UTF-8 at byte ", *at, " of its replacements"));
  }
  QMLP_ASSIGN(out.grapheme_, Regex::compile(std::string(kGrapheme)));
  return out;
}

std::optional<CharsMap::Entry> CharsMap::find(std::string_view text, bool longest) const noexcept {
  std::optional<Entry> found;
  std::size_t node = offset(trie_[0]);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte == 0) break;
    node ^= byte;
    if (node >= trie_.size() || label(trie_[node]) != byte) break;
    const std::uint32_t unit = trie_[node];
    node ^= offset(unit);
    if (!has_leaf(unit)) continue;
    if (node >= trie_.size()) break;
    const std::size_t begin = value(trie_[node]);
    // A replacement starts where a character does.
    if (begin >= replacements_.size() || (replacements_[begin] & 0xC0) == 0x80) break;
    found = Entry{
        std::string_view(replacements_).substr(begin, replacements_.find('\0', begin) - begin),
        i + 1};
    if (!longest) break;
  }
  return found;
}

void CharsMap::normalize_longest(std::string& text) const {
  if (trie_.empty()) return;
  std::string out;
  out.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t character = first_utf8_unit(rest).length;
    const auto found = find(rest, true);
    // An entry that ends within a character is none.
    const bool whole =
        found && (found->length == rest.size() || (rest[found->length] & 0xC0) != 0x80);
    out += whole ? found->replacement : rest.substr(0, character);
    rest.remove_prefix(whole ? found->length : character);
  }
  text = std::move(out);
}

Status CharsMap::normalize(std::string& text, RegexScratch& scratch) const {
  if (trie_.empty()) return {};
  const std::string_view in = text;
  std::string out;
  out.reserve(text.size());
  const auto put = [&](std::string_view part) {
    const auto found = find(part, false);
    out += found ? found->replacement : part;
  };
  for (std::size_t at = 0; at < in.size();) {
    // ASCII before ASCII is a grapheme, but for a line end of two characters.
    const bool plain =
        (in[at] & 0x80) == 0 && in[at] != '\r' && (at + 1 == in.size() || (in[at + 1] & 0x80) == 0);
    std::size_t end = at + 1;
    if (!plain) {
      QMLP_ASSIGN(const Match match, grapheme_->find(in, at, scratch));
      if (!match.found || match.begin != at) {
        return Error{Errc::internal, concat("charsmap: no grapheme at byte ", at)};
      }
      end = match.end;
    }
    const std::string_view grapheme = in.substr(at, end - at);
    at = end;
    if (grapheme.size() <= kLongestGrapheme) {
      if (const auto found = find(grapheme, false)) {
        out += found->replacement;
        continue;
      }
    }
    for (std::string_view rest = grapheme; !rest.empty();) {
      const std::size_t length = first_utf8_unit(rest).length;
      put(rest.substr(0, length));
      rest.remove_prefix(length);
    }
  }
  text = std::move(out);
  return {};
}

}  // namespace qmlp::text
