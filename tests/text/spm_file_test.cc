#include "text/spm_file.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/fixture.h"

namespace qmlp::text {
namespace {

// Writes protocol-buffer fields.
std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7F) | 0x80);
  return out + static_cast<char>(value);
}
std::string bytes_field(std::uint32_t number, std::string_view bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}
std::string integer_field(std::uint32_t number, std::uint64_t value) {
  return varint(number << 3) + varint(value);
}
std::string float_field(std::uint32_t number, float value) {
  std::string out = varint(number << 3 | 5);
  const auto bits = std::bit_cast<std::uint32_t>(value);
  for (int i = 0; i < 4; ++i) out += static_cast<char>(bits >> (8 * i) & 0xFF);
  return out;
}

enum Kind { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

std::string piece(std::string_view text, float score, Kind kind) {
  return bytes_field(1, bytes_field(1, text) + float_field(2, score) + integer_field(3, kind));
}
std::string trainer(std::uint64_t type) {
  return bytes_field(2, integer_field(3, type) + integer_field(35, 1));
}
std::string normalizer(bool prefix) {
  return bytes_field(3,
                     bytes_field(1, "identity") + integer_field(3, prefix) + integer_field(4, 0));
}

std::string pieces() {
  return piece("<unk>", 0, kUnknown) + piece("<s>", 0, kControl) + piece("</s>", 0, kControl) +
         piece("<0xC3>", 0, kByte) + piece("<0xA9>", 0, kByte) + piece("<b>", 0, kUserDefined) +
         piece("aab", -1, kNormal) + piece("aa", -2, kNormal) + piece("ab", -2, kNormal) +
         piece("\u2581a", -4, kNormal) + piece("a", -5, kNormal) + piece("b", -6, kNormal) +
         piece("\u2581", -7, kNormal);
}

std::string model() { return pieces() + trainer(2) + normalizer(true); }

using Ids = std::vector<std::int32_t>;

TEST(SpmFile, MergesByScoreFromTheLeft) {
  const TemporaryFolder folder;
  folder.write("tokenizer.model", model());
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 13);
  // "aa" and "ab" have one score: the left one is made first.
  EXPECT_EQ(*tokenizer->encode("baab"), (Ids{12, 11, 6}));
  EXPECT_EQ(*tokenizer->encode("ab"), (Ids{12, 8}));
  // A control piece in a text is text, here of unknown characters.
  EXPECT_EQ(*tokenizer->encode("b<s>"), (Ids{12, 11, 0}));
  EXPECT_EQ(*tokenizer->encode("a<b>a \u00e9"), (Ids{9, 5, 10, 12, 3, 4}));
  EXPECT_EQ(*tokenizer->encode_prompt("a"), (Ids{1, 9}));
  EXPECT_EQ(*tokenizer->decode(Ids{9, 12, 3, 4}), "a \u00e9");
  EXPECT_TRUE(tokenizer->is_special(1));
  EXPECT_FALSE(tokenizer->is_special(5));
}

TEST(SpmFile, RefusesByName) {
  const TokenizerConfig config;
  const std::pair<std::string, const char*> cases[] = {
      {"", "no pieces"},
      {pieces() + normalizer(true), "'unigram'"},
      {pieces() + trainer(4), "'char'"},
      {pieces() + trainer(9), "'unknown'"},
      {pieces() + bytes_field(2, integer_field(3, 2) + integer_field(24, 1)), "marks spaces"},
      {model() + piece("x", 0, kUnused), "is unused"},
      {model() + piece("xy", 0, kNormal), "'x') that is no piece"},
      {model() + piece("a", 0, kNormal), "'a': it has the ids 10 and 13"},
      {model() + piece("", 0, kNormal), "piece 13 holds no UTF-8 text"},
      {model() + piece("\xFF", 0, kNormal), "piece 13 holds no UTF-8 text"},
      {model() + piece("x", std::numeric_limits<float>::quiet_NaN(), kNormal), "no finite score"},
      {model() + bytes_field(1, integer_field(3, 7)), "unknown type 7"},
      {model() + piece("<0xZZ>", 0, kByte), "the byte piece '<0xZZ>'"},
      {model() + bytes_field(3, bytes_field(2, "abcdef")), "charsmap"},
      {model() + "\x0A\xFF", "a broken field"},
      {model() + "\x0B", "a broken field"},
  };
  for (const auto& [bytes, message] : cases) {
    const auto file = parse_spm_file(bytes, "t.model", config);
    ASSERT_FALSE(file) << message;
    EXPECT_NE(file.error().message.find(message), std::string::npos) << file.error().message;
    EXPECT_TRUE(file.error().message.starts_with("t.model: ")) << file.error().message;
    EXPECT_EQ(file.error().message.find('\n'), std::string::npos);
  }
}

TEST(SpmFile, AnyBytesAreSafe) {
  std::mt19937 rng(13);
  const TokenizerConfig config;
  const std::string good = model();
  int read = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good;
    for (int i = 0; i < 1 + round % 4; ++i) bytes[rng() % bytes.size()] = static_cast<char>(rng());
    if (round % 3 == 0) bytes.resize(rng() % bytes.size());
    const auto file = parse_spm_file(bytes, "t.model", config);
    if (!file) continue;
    ++read;
    Bpe::Scratch scratch;
    Ids ids;
    file->bpe->encode_word("\u2581aab\u00e9ba\u4e00", scratch, ids);
    for (const std::int32_t id : ids) EXPECT_TRUE(file->vocabulary.contains(id));
  }
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace qmlp::text
