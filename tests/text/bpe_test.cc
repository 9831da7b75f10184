#include "text/bpe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace qmlp::text {
namespace {

// Random merges over a small alphabet, so that words of any length keep merging.
Bpe::Parts random_parts(std::mt19937& rng, int merges) {
  Bpe::Parts parts;
  std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Bpe::kNone);
  std::vector<std::string> tokens;
  std::map<std::string, std::int32_t> ids;
  for (const char c : {'a', 'b', 'c'}) {
    parts.byte_ids[static_cast<unsigned char>(c)] = static_cast<std::int32_t>(tokens.size());
    ids[std::string(1, c)] = static_cast<std::int32_t>(tokens.size());
    tokens.emplace_back(1, c);
  }
  while (merges-- > 0) {
    const std::string& left = tokens[rng() % tokens.size()];
    const std::string& right = tokens[rng() % tokens.size()];
    const std::string joined = left + right;
    if (joined.size() > 9) continue;
    const std::int32_t left_id = ids[left];
    const std::int32_t right_id = ids[right];
    if (!ids.contains(joined)) {
      ids[joined] = static_cast<std::int32_t>(tokens.size());
      tokens.push_back(joined);
    }
    parts.merges.push_back({left_id, right_id, ids[joined]});
  }
  return parts;
}

// The definition: the best-ranked pair of the whole word, the leftmost of equals, again and again.
std::vector<std::int32_t> reference(const Bpe::Parts& parts, std::string_view word) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::pair<std::size_t, std::int32_t>> ranks;
  for (std::size_t rank = 0; rank < parts.merges.size(); ++rank) {
    const Bpe::Merge& merge = parts.merges[rank];
    ranks[{merge.left, merge.right}] = {rank, merge.result};
  }
  std::vector<std::int32_t> ids;
  for (const char c : word) {
    const std::int32_t id = parts.byte_ids[static_cast<unsigned char>(c)];
    if (id != Bpe::kNone) ids.push_back(id);
  }
  for (;;) {
    std::size_t best_rank = parts.merges.size();
    std::size_t best = 0;
    std::int32_t result = 0;
    for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto found = ranks.find({ids[i], ids[i + 1]});
      if (found == ranks.end() || found->second.first >= best_rank) continue;
      best = i;
      best_rank = found->second.first;
      result = found->second.second;
    }
    if (best_rank == parts.merges.size()) return ids;
    ids[best] = result;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, MergesAsDefinedAtEveryLength) {
  std::mt19937 rng(11);
  for (int round = 0; round < 30; ++round) {
    const Bpe::Parts parts = random_parts(rng, 5 + round * 6);
    const Bpe bpe(parts);
    Bpe::Scratch scratch;
    for (std::size_t length = 0; length < 200; length += 1 + length / 16) {
      std::string word;
      for (std::size_t i = 0; i < length; ++i) word += "abc?"[rng() % (round % 2 == 0 ? 3 : 4)];
      std::vector<std::int32_t> ids = {-7};
      bpe.encode_word(word, scratch, ids);
      ASSERT_EQ(ids.front(), -7);  // appends
      ids.erase(ids.begin());
      ASSERT_EQ(ids, reference(parts, word)) << "round " << round << ", word " << word;
    }
  }
}

TEST(Bpe, ALongWordTakesNoQuadraticTime) {
  std::mt19937 rng(12);
  const Bpe bpe(random_parts(rng, 200));
  Bpe::Scratch scratch;
  std::string word;
  for (int i = 0; i < 1'000'000; ++i) word += "abc"[rng() % 3];
  std::vector<std::int32_t> ids;
  // Quadratic time would be an hour, and end in the test runner's timeout.
  bpe.encode_word(word, scratch, ids);
  EXPECT_GT(ids.size(), 100'000u);
  EXPECT_LT(ids.size(), 800'000u);
}

TEST(Bpe, BytesThatTheVocabularyLacks) {
  Bpe::Parts parts;
  std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Bpe::kNone);
  parts.byte_ids[0x61] = 1;  // a
  parts.byte_ids[0x62] = 2;  // b
  parts.merges = {{1, 2, 3}};
  const auto encode = [&parts](std::string_view word) {
    Bpe::Scratch scratch;
    std::vector<std::int32_t> ids;
    Bpe(parts).encode_word(word, scratch, ids);
    return ids;
  };
  // Dropped, so that what stood around them can merge.
  EXPECT_EQ(encode("a??b??"), (std::vector<std::int32_t>{3}));
  EXPECT_EQ(encode("?"), std::vector<std::int32_t>{});
  parts.unknown_id = 9;
  EXPECT_EQ(encode("a??b?"), (std::vector<std::int32_t>{1, 9, 9, 2, 9}));
  parts.fuse_unknown = true;
  EXPECT_EQ(encode("a??b?"), (std::vector<std::int32_t>{1, 9, 2, 9}));
}

TEST(Bpe, CharactersFallBackToBytes) {
  Bpe::Parts parts;
  std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Bpe::kNone);
  parts.of_characters = true;
  parts.characters = {{U'a', 1}, {U'\u00e9', 2}, {U'\U0001F600', 3}};
  parts.byte_ids[0xC3] = 4;
  parts.byte_ids[0xA8] = 5;
  parts.merges = {{1, 2, 6}, {4, 5, 7}};
  const auto encode = [&parts](std::string_view word) {
    Bpe::Scratch scratch;
    std::vector<std::int32_t> ids;
    Bpe(parts).encode_word(word, scratch, ids);
    return ids;
  };
  using Ids = std::vector<std::int32_t>;
  EXPECT_EQ(encode("a\u00e9\U0001F600"), (Ids{6, 3}));
  EXPECT_EQ(encode("a\u00e8"), (Ids{1, 7}));
  EXPECT_EQ(encode("a\u00e7\u4e00a"), (Ids{1, 1}));
  parts.unknown_id = 9;
  EXPECT_EQ(encode("a\u00e7\u4e00a"), (Ids{1, 9, 9, 1}));
  // Bytes overtake the unknown character before them.
  EXPECT_EQ(encode("\u4e00\u00e8a"), (Ids{7, 9, 1}));
  parts.fuse_unknown = true;
  EXPECT_EQ(encode("a\u00e7\u4e00"), (Ids{1, 9}));
}

TEST(Bpe, CuttingAtWordStartsChangesNothing) {
  std::mt19937 rng(15);
  const std::string mark = "\u2581";
  for (int round = 0; round < 40; ++round) {
    Bpe::Parts parts;
    std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Bpe::kNone);
    parts.of_characters = true;
    parts.unknown_id = 0;
    parts.fuse_unknown = round % 2 == 0;
    std::vector<std::string> tokens = {"<unk>", mark, "a", "b"};
    parts.characters = {{U'\u2581', 1}, {U'a', 2}, {U'b', 3}};
    for (int i = 0; i < 60; ++i) {
      const std::size_t left = 1 + rng() % (tokens.size() - 1);
      const std::size_t right = 1 + rng() % (tokens.size() - 1);
      const std::string joined = tokens[left] + tokens[right];
      const bool crosses = tokens[right].starts_with(mark) && !tokens[left].ends_with(mark);
      if (crosses || joined.size() > 20) continue;
      parts.merges.push_back({static_cast<std::int32_t>(left), static_cast<std::int32_t>(right),
                              static_cast<std::int32_t>(tokens.size())});
      tokens.push_back(joined);
    }
    std::string word;
    for (std::size_t i = rng() % 400; i > 0; --i) {
      const char* const units[] = {"\u2581", "\u2581", "a", "b", "x"};
      word += units[rng() % 5];
    }
    std::vector<std::int32_t> whole;
    std::vector<std::int32_t> cut;
    Bpe::Scratch scratch;
    Bpe(parts).encode_word(word, scratch, whole);
    parts.words_apart = true;
    Bpe(parts).encode_word(word, scratch, cut);
    ASSERT_EQ(whole, cut) << word;
  }
}

}  // namespace
}  // namespace qmlp::text
