#include "text/charsmap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "text/utf8.h"

namespace qmlp::text {
namespace {

std::string word(std::uint32_t value) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
  return out;
}

std::string map_bytes(const std::string& trie, std::string_view replacements) {
  return word(static_cast<std::uint32_t>(trie.size())) + trie + std::string(replacements);
}

// A trie with the one entry 'a', whose replacement is `replacement`. Units: the root leads to 'a'
// at 1 ^ 'a', and that to its value at the same place ^ 2.
std::string one_entry(std::uint32_t value) {
  std::string trie;
  const std::uint32_t root = 1u << 10;
  const std::uint32_t at = 1 ^ 'a';
  for (std::uint32_t i = 0; i < 128; ++i) {
    std::uint32_t unit = 0xFFFFFFFF;
    if (i == 0) unit = root;
    if (i == at) unit = (2u << 10) | (1u << 8) | 'a';
    if (i == (at ^ 2)) unit = 0x80000000 | value;
    trie += word(unit);
  }
  return trie;
}

std::string normalized(const CharsMap& map, std::string text, bool longest = false) {
  auto scratch = RegexScratch::make(text.size());
  EXPECT_TRUE(scratch);
  if (longest) {
    map.normalize_longest(text);
  } else {
    const Status status = map.normalize(text, *scratch);
    EXPECT_TRUE(status) << status.error().message;
  }
  return text;
}

TEST(CharsMap, ReplacesWhatItHolds) {
  using std::string_view_literals::operator""sv;
  const auto map = CharsMap::read(map_bytes(one_entry(4), "xyz\0\u00e9!\0"sv));
  ASSERT_TRUE(map) << map.error().message;
  for (const bool longest : {false, true}) {
    EXPECT_EQ(normalized(*map, "banana", longest), "b\u00e9!n\u00e9!n\u00e9!");
    EXPECT_EQ(normalized(*map, "", longest), "");
    EXPECT_EQ(normalized(*map, std::string("\0z", 2), longest), std::string("\0z", 2));
  }
  // A short grapheme is replaced whole by the entry it begins with; the library takes the entry.
  EXPECT_EQ(normalized(*map, "a\u0301"), "\u00e9!");
  EXPECT_EQ(normalized(*map, "a\u0301", true), "\u00e9!\u0301");
  EXPECT_EQ(normalized(*map, "a\u0301\u0301\u0301"), "\u00e9!\u0301\u0301\u0301");
}

TEST(CharsMap, WithoutBytesItChangesNothing) {
  const auto map = CharsMap::read("");
  ASSERT_TRUE(map);
  EXPECT_EQ(normalized(*map, "a\u00a0"), "a\u00a0");
}

TEST(CharsMap, RefusesBrokenBytes) {
  using std::string_view_literals::operator""sv;
  for (const std::string& bytes :
       {std::string("abc"), word(0) + "x", word(8) + "abcd", word(3) + "abcd",
        word(0xFFFFFFFC) + "abcd", map_bytes(one_entry(0), "\xFF\0"sv)}) {
    const auto map = CharsMap::read(bytes);
    ASSERT_FALSE(map);
    EXPECT_EQ(map.error().code, Errc::corrupt_file);
    EXPECT_TRUE(map.error().message.starts_with("charsmap: ")) << map.error().message;
  }
  for (const std::string_view text : {"A", "AAA", "AA=A", "A===", "AA*A", "=AAA", "AAAA="}) {
    EXPECT_FALSE(CharsMap::read_base64(text)) << text;
  }
}

// Whatever the trie holds, it stays within its bounds and the result is UTF-8.
TEST(CharsMap, AnyTrieIsSafe) {
  using std::string_view_literals::operator""sv;
  std::mt19937 rng(9);
  for (int round = 0; round < 3000; ++round) {
    std::string trie;
    for (int i = 0; i < 64; ++i) {
      // Units that often match a letter, lead somewhere near and have a leaf.
      const std::uint32_t letter = "abc\xC3\xA9"[rng() % 5] & 0xFF;
      const std::uint32_t wild = rng() % 4 == 0 ? rng() : (rng() % 64) << 10;
      trie += word(wild | letter | (rng() % 2) << 8);
    }
    const auto map = CharsMap::read(map_bytes(trie, "x\0\u00e9\u00e9\0\u4e00"sv));
    ASSERT_TRUE(map) << map.error().message;
    for (const bool longest : {false, true}) {
      const std::string out = normalized(*map, "abc\u00e9a\u0301cb\u00e9\u4e00", longest);
      EXPECT_EQ(find_invalid_utf8(out), std::nullopt);
    }
  }
}

}  // namespace
}  // namespace qmlp::text
