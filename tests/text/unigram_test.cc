#include "text/unigram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qmlp::text {
namespace {

using Entries = std::vector<std::pair<std::string_view, double>>;

Unigram::Parts parts_of(const Entries& vocabulary) {
  Unigram::Parts parts;
  std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Unigram::kNone);
  parts.unknown_id = 0;
  for (std::size_t i = 0; i < vocabulary.size(); ++i) {
    parts.tokens.push_back(
        {vocabulary[i].first, vocabulary[i].second, static_cast<std::int32_t>(i), i > 0});
  }
  return parts;
}

std::vector<std::int32_t> encode(const Unigram::Parts& parts, std::string_view word) {
  auto unigram = Unigram::build(parts);
  EXPECT_TRUE(unigram) << unigram.error().message;
  Unigram::Scratch scratch;
  std::vector<std::int32_t> ids;
  unigram->encode_word(word, scratch, ids);
  return ids;
}

// The best sum of scores over all ways to cut a word of single-byte characters.
double best_score(const Unigram::Parts& parts, std::string_view word, double unknown) {
  if (word.empty()) return 0.0;
  double best = -std::numeric_limits<double>::infinity();
  bool single = false;
  for (const Unigram::Token& token : parts.tokens) {
    if (!token.usable || token.text.empty() || !word.starts_with(token.text)) continue;
    single = single || token.text.size() == 1;
    best = std::max(best, token.score + best_score(parts, word.substr(token.text.size()), unknown));
  }
  if (!single) best = std::max(best, unknown + best_score(parts, word.substr(1), unknown));
  return best;
}

TEST(Unigram, FindsTheBestOfAllCuts) {
  std::mt19937 rng(5);
  for (int round = 0; round < 60; ++round) {
    std::deque<std::string> texts;  // that the vocabulary's views are of
    Entries vocabulary = {{"<unk>", 0.0}};
    double lowest = 0.0;
    for (int i = 0; i < 14; ++i) {
      std::string text;
      const std::size_t length = 1 + rng() % 4;
      for (std::size_t j = 0; j < length; ++j) text += "abc"[rng() % 3];
      const bool known = std::any_of(vocabulary.begin(), vocabulary.end(),
                                     [&](const auto& entry) { return entry.first == text; });
      if (known) continue;
      // Sums of such scores are exact, so that equal sums are equal.
      vocabulary.emplace_back(texts.emplace_back(text), -static_cast<double>(rng() % 64) / 8);
      lowest = std::min(lowest, vocabulary.back().second);
    }
    const Unigram::Parts parts = parts_of(vocabulary);
    for (int i = 0; i < 20; ++i) {
      std::string word;
      const std::size_t length = rng() % 9;
      for (std::size_t j = 0; j < length; ++j) word += "abc"[rng() % 3];
      const std::vector<std::int32_t> ids = encode(parts, word);
      double score = 0.0;
      std::size_t covered = 0;
      for (const std::int32_t id : ids) {
        score += vocabulary[static_cast<std::size_t>(id)].second;
        covered += id == 0 ? 0 : vocabulary[static_cast<std::size_t>(id)].first.size();
      }
      // A run of unknown characters is one token, each of its characters costs.
      score += static_cast<double>(word.size() - covered) * (lowest - 10.0);
      EXPECT_EQ(score, best_score(parts, word, lowest - 10.0)) << word;
    }
  }
}

TEST(Unigram, UnknownCharactersFallBackToBytes) {
  Unigram::Parts parts = parts_of({{"<unk>", 0.0}, {"a", -1.0}, {"<0xC3>", 0}, {"<0xA9>", 0}});
  EXPECT_EQ(encode(parts, "a\u00e9\u00e9a"), (std::vector<std::int32_t>{1, 0, 1}));
  parts.byte_ids[0xC3] = 2;
  EXPECT_EQ(encode(parts, "a\u00e9"), (std::vector<std::int32_t>{1, 0}));
  parts.byte_ids[0xA9] = 3;
  EXPECT_EQ(encode(parts, "a\u00e9\u00e9a"), (std::vector<std::int32_t>{1, 2, 3, 2, 3, 1}));
  // A run falls back as one.
  EXPECT_EQ(encode(parts, "\u00e9\u00e8"), (std::vector<std::int32_t>{0}));
}

TEST(Unigram, RefusesScoresThatAreNoNumbers) {
  for (const double score :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_FALSE(Unigram::build(parts_of({{"<unk>", 0.0}, {"a", score}})));
  }
}

}  // namespace
}  // namespace qmlp::text
