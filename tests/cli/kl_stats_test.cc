#include "kl_stats.h"

#include <gtest/gtest.h>

#include <cmath>

namespace qmlp::cli {
namespace {

TEST(KlStats, LogSumExpOfLargeAndInfiniteLogits) {
  EXPECT_DOUBLE_EQ(log_sum_exp(std::vector<float>{1000.0f, 1000.0f}), 1000.0 + std::log(2.0));
  const float low = -std::numeric_limits<float>::infinity();
  EXPECT_DOUBLE_EQ(log_sum_exp(std::vector<float>{low, 3.0f}), 3.0);
}

TEST(KlStats, TwoTokensByHand) {
  auto pool = ThreadPool::create(1);
  ASSERT_TRUE(pool);
  const std::vector<float> reference = {std::log(0.75f), std::log(0.25f)};
  const std::vector<float> test = {std::log(0.5f), std::log(0.5f)};
  const std::vector<std::int32_t> next = {1};
  const auto stats = compare_logits(reference, test, 2, next, **pool);
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_NEAR(stats[0].kl, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-7);
  EXPECT_EQ(stats[0].reference_best, 0);
  EXPECT_EQ(stats[0].test_best, 0);  // equal: the lower id
  EXPECT_NEAR(stats[0].reference_nll, -std::log(0.25), 1e-7);
  EXPECT_NEAR(stats[0].test_nll, -std::log(0.5), 1e-7);
}

TEST(KlStats, EqualRowsGiveExactlyZero) {
  auto pool = ThreadPool::create(2);
  ASSERT_TRUE(pool);
  std::vector<float> row;
  for (int i = 0; i < 1000; ++i) row.push_back(std::sin(static_cast<float>(i)) * 20.0f);
  const std::vector<std::int32_t> next = {-1};
  const auto stats = compare_logits(row, row, 1000, next, **pool);
  EXPECT_EQ(stats[0].kl, 0.0);
  EXPECT_TRUE(std::isnan(stats[0].test_nll));
}

TEST(KlStats, Summary) {
  std::vector<PositionStats> positions(4);
  const double kl[] = {0.0, 0.4, 0.1, 0.1};
  for (std::size_t i = 0; i < 4; ++i) {
    positions[i].kl = kl[i];
    positions[i].test_best = i == 2 ? 1 : 0;
    positions[i].reference_nll = i == 3 ? std::nan("") : 1.0;  // the last has no next token
    positions[i].test_nll = i == 3 ? std::nan("") : 2.0;
  }
  const KlSummary summary = summarize(positions);
  EXPECT_DOUBLE_EQ(summary.mean_kl, 0.15);
  EXPECT_EQ(summary.max_kl, 0.4);
  EXPECT_EQ(summary.max_position, 1);
  EXPECT_EQ(summary.argmax_agreement, 0.75);
  EXPECT_DOUBLE_EQ(summary.reference_perplexity, std::exp(1.0));
  EXPECT_DOUBLE_EQ(summary.test_perplexity, std::exp(2.0));
}

TEST(KlStats, TopTokens) {
  const std::vector<float> logits = {1.0f, 5.0f, 5.0f, -1.0f};
  EXPECT_EQ(top_tokens(logits, 3), (std::vector<std::int32_t>{1, 2, 0}));
  EXPECT_EQ(top_tokens(logits, 9).size(), 4u);
}

}  // namespace
}  // namespace qmlp::cli
