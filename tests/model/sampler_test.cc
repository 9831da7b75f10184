#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "qmlp/model.h"

namespace qmlp {
namespace {

std::vector<float> random_logits(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<float> logits(count);
  for (float& logit : logits) {  // a sum of uniforms: the library's own normal differs by platform
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(engine() >> 11) * 0x1p-53;
    logit = static_cast<float>(2.0 * sum);
  }
  return logits;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  const double top = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p(logits.size());
  double sum = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i)
    sum += p[i] = std::exp((logits[i] - top) / temperature);
  for (double& value : p) value /= sum;
  return p;
}

std::map<std::int32_t, int> draw(const SamplingOptions& options, const std::vector<float>& logits,
                                 int draws) {
  Sampler sampler(options);
  std::map<std::int32_t, int> counts;
  for (int i = 0; i < draws; ++i) ++counts[sampler.sample(logits, {})];
  return counts;
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowerIdOfATie) {
  Sampler sampler(SamplingOptions{});
  EXPECT_EQ(sampler.sample(std::vector<float>{0.0f, 3.0f, 1.0f, 3.0f}, {}), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{-5.0f}, {}), 0);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sampler.sample(std::vector<float>{-infinity, -infinity, -1e30f}, {}), 2);
  EXPECT_EQ(sampler.sample(std::vector<float>{NAN, 1.0f}, {}), 1);
  EXPECT_EQ(sampler.sample(std::vector<float>{}, {}), -1);
}

// Counts of n draws with probability p have deviation sqrt(n p (1 - p)); six of them is a bound
// that a correct sampler breaks once in a billion cells, and the seed is fixed.
TEST(Sampler, FollowsTheDistributionAtEachTemperature) {
  const std::vector<float> logits = random_logits(50, 3);
  for (const double temperature : {0.5, 1.0, 2.5}) {
    SamplingOptions options;
    options.temperature = temperature;
    options.seed = 17;
    constexpr int kDraws = 40000;
    const auto counts = draw(options, logits, kDraws);
    const std::vector<double> p = softmax(logits, temperature);
    for (std::size_t i = 0; i < p.size(); ++i) {
      const auto found = counts.find(static_cast<std::int32_t>(i));
      const double count = found == counts.end() ? 0.0 : found->second;
      ASSERT_LE(std::abs(count - kDraws * p[i]), 6.0 * std::sqrt(kDraws * p[i] * (1 - p[i])) + 1.0)
          << "id " << i << " at temperature " << temperature;
    }
  }
}

TEST(Sampler, TopKKeepsTheKLikeliest) {
  const std::vector<float> logits = random_logits(200, 4);
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  SamplingOptions options;
  options.temperature = 5.0;
  options.top_k = 7;
  std::set<std::int32_t> seen;
  for (const auto& [id, count] : draw(options, logits, 5000)) seen.insert(id);
  EXPECT_EQ(seen, std::set<std::int32_t>(order.begin(), order.begin() + 7));
  options.top_k = 1;
  EXPECT_EQ(draw(options, logits, 50).begin()->first, order[0]);
  options.top_k = 100000;  // more than there are: no filter
  EXPECT_GT(draw(options, logits, 5000).size(), 50u);
}

TEST(Sampler, TopPKeepsTheShortestPrefixThatReachesIt) {
  // Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625, ids shuffled.
  const float step = std::log(2.0f);
  const std::vector<float> logits = {-2 * step, 0.0f, -3 * step, -step, -3 * step};
  SamplingOptions options;
  options.temperature = 3.0;
  const auto ids = [&](double top_p) {
    options.top_p = top_p;
    std::set<std::int32_t> seen;
    for (const auto& [id, count] : draw(options, logits, 3000)) seen.insert(id);
    return seen;
  };
  EXPECT_EQ(ids(0.4), (std::set<std::int32_t>{1}));
  EXPECT_EQ(ids(0.6), (std::set<std::int32_t>{1, 3}));
  EXPECT_EQ(ids(0.8), (std::set<std::int32_t>{0, 1, 3}));
  EXPECT_EQ(ids(0.9), (std::set<std::int32_t>{0, 1, 2, 3}));  // of the tied two, the lower id
  EXPECT_EQ(ids(1.0).size(), 5u);
}

TEST(Sampler, MinPDropsWhatIsTooFarBelowTheBest) {
  const float step = std::log(2.0f);
  const std::vector<float> logits = {0.0f, -step, -2 * step, -3 * step};
  SamplingOptions options;
  options.temperature = 4.0;
  options.min_p = 0.3;  // 1, 0.5 stay; 0.25, 0.125 go
  EXPECT_EQ(draw(options, logits, 2000).size(), 2u);
  options.min_p = 1.0;
  EXPECT_EQ(draw(options, logits, 200).size(), 1u);
  options.min_p = 0.0;
  EXPECT_EQ(draw(options, logits, 2000).size(), 4u);
}

TEST(Sampler, FiltersLeaveTheRatiosOfWhatTheyKeep) {
  const std::vector<float> logits = {1.0f, 0.5f, -8.0f, 0.0f, -9.0f};
  SamplingOptions options;
  options.temperature = 1.0;
  options.top_k = 3;
  options.top_p = 0.9999;
  options.min_p = 0.01;
  constexpr int kDraws = 40000;
  auto counts = draw(options, logits, kDraws);
  EXPECT_EQ(counts.size(), 3u);
  const std::vector<double> p = softmax({1.0f, 0.5f, 0.0f}, 1.0);
  EXPECT_NEAR(counts[0], kDraws * p[0], 600);
  EXPECT_NEAR(counts[1], kDraws * p[1], 600);
  EXPECT_NEAR(counts[3], kDraws * p[2], 600);
}

TEST(Sampler, RepeatPenaltyActsOnTheWindowOnceAToken) {
  SamplingOptions options;
  options.repeat_penalty = 2.0;
  options.repeat_window = 3;
  const std::vector<float> logits = {4.0f, 3.0f, 1.0f, -1.0f};
  const auto greedy = [&](const std::vector<std::int32_t>& history) {
    return Sampler(options).sample(logits, history);
  };
  EXPECT_EQ(greedy({}), 0);
  EXPECT_EQ(greedy({0}), 1);            // 2 < 3
  EXPECT_EQ(greedy({0, 1}), 0);         // 2 > 1.5
  EXPECT_EQ(greedy({0, 0, 0, 1}), 0);   // once: still 2, not 0.5
  EXPECT_EQ(greedy({0, 3, 3, 3}), 0);   // 0 has left the window
  EXPECT_EQ(greedy({0, -1, 9999}), 1);  // ids outside the vocabulary count for nothing
  options.repeat_window = 0;
  EXPECT_EQ(greedy({0}), 0);
  // A negative logit moves down, not up.
  options.repeat_window = 8;
  EXPECT_EQ(Sampler(options).sample(std::vector<float>{-1.0f, -1.5f}, std::vector<std::int32_t>{0}),
            1);
}

TEST(Sampler, OneSeedGivesOneSequence) {
  const std::vector<float> logits = random_logits(1000, 5);
  SamplingOptions options;
  options.temperature = 1.0;
  options.seed = 42;
  const auto sequence = [&](const SamplingOptions& with) {
    Sampler sampler(with);
    std::vector<std::int32_t> ids;
    for (int i = 0; i < 64; ++i) ids.push_back(sampler.sample(logits, ids));
    return ids;
  };
  const auto first = sequence(options);
  EXPECT_EQ(first, sequence(options));
  options.seed = 43;
  EXPECT_NE(first, sequence(options));
}

// Fixed by splitmix64 and IEEE arithmetic alone: equal logits, so the draw is floor(u * 8) of its
// published first outputs for the seed 1234567 (6457827717110365317, 3203168211198807973,
// 9817491932198370423, 4593380528125082431, 16408922859458223821).
TEST(Sampler, DrawsArePinnedAcrossMachines) {
  SamplingOptions options;
  options.temperature = 1.0;
  options.seed = 1234567;
  Sampler sampler(options);
  const std::vector<float> logits(8, 0.25f);
  for (const std::uint64_t word : {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                                   4593380528125082431u, 16408922859458223821u}) {
    EXPECT_EQ(sampler.sample(logits, {}), static_cast<std::int32_t>(word >> 61));
  }
}

TEST(Sampler, MaskedTokensAreNeverDrawn) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> logits(100, -infinity);
  logits[7] = -50.0f;
  logits[70] = -50.5f;
  SamplingOptions options;
  options.temperature = 10.0;
  for (const double top_p : {1.0, 0.999}) {
    options.top_p = top_p;
    for (const auto& [id, count] : draw(options, logits, 500)) EXPECT_TRUE(id == 7 || id == 70);
  }
}

TEST(SamplingOptions, EveryBadFieldIsNamed) {
  const auto message = [](auto&& change) {
    SamplingOptions options;
    change(options);
    const Status status = validate(options);
    EXPECT_FALSE(status);
    return status ? std::string() : status.error().message;
  };
  EXPECT_TRUE(validate(SamplingOptions{}));
  EXPECT_EQ(message([](auto& o) { o.temperature = -1.0; }),
            "temperature: is -1.000000, must be finite and at least 0");
  EXPECT_NE(message([](auto& o) { o.temperature = NAN; }).find("temperature: is"),
            std::string::npos);
  EXPECT_EQ(message([](auto& o) { o.top_p = 0.0; }),
            "top_p: is 0.000000, must be above 0 and at most 1");
  EXPECT_EQ(message([](auto& o) { o.top_p = 1.5; }),
            "top_p: is 1.500000, must be above 0 and at most 1");
  EXPECT_EQ(message([](auto& o) { o.top_k = -3; }),
            "top_k: is -3, must be at least 0 (0 turns it off)");
  EXPECT_EQ(message([](auto& o) { o.min_p = 2.0; }), "min_p: is 2.000000, must be from 0 to 1");
  EXPECT_EQ(message([](auto& o) { o.repeat_penalty = 0.0; }),
            "repeat_penalty: is 0.000000, must be finite and above 0 (1 turns it off)");
  EXPECT_EQ(message([](auto& o) { o.repeat_window = -1; }),
            "repeat_window: is -1, must be at least 0 (0 turns it off)");
}

}  // namespace
}  // namespace qmlp
