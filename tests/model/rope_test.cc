#include "model/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace qmlp {
namespace {

ModelConfig config_with(RopeKind kind, double factor) {
  ModelConfig config;
  config.head_dim = config.rotary_dim = 64;
  config.rope_theta = 500000.0;
  config.rope_kind = kind;
  config.rope_factor = factor;
  config.rope.original_context = 8192;
  return config;
}

double plain(const ModelConfig& config, std::size_t i) {
  return std::pow(config.rope_theta,
                  -2.0 * static_cast<double>(i) / static_cast<double>(config.rotary_dim));
}

TEST(Rotary, DefaultAndLinear) {
  const ModelConfig config = config_with(RopeKind::linear, 4.0);
  const RotaryFrequencies linear = rotary_frequencies(config);
  ASSERT_EQ(linear.frequencies.size(), 32u);
  EXPECT_EQ(linear.divisor, 4.0);
  EXPECT_EQ(linear.scale, 1.0);
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(linear.frequencies[i], plain(config, i), 1e-14 * plain(config, i));
  }
  for (const RopeKind kind : {RopeKind::standard, RopeKind::dynamic}) {
    const RotaryFrequencies same = rotary_frequencies(config_with(kind, 4.0));
    EXPECT_EQ(same.frequencies, linear.frequencies);
    EXPECT_EQ(same.divisor, 1.0);
  }
}

// Llama 3.1's: waves up to 2048 tokens as they were, from 8192 on eight times as long.
TEST(Rotary, Llama3KeepsShortWavesAndStretchesLongOnes) {
  const ModelConfig config = config_with(RopeKind::llama3, 8.0);
  const RotaryFrequencies rotary = rotary_frequencies(config);
  int kept = 0, blended = 0, stretched = 0;
  for (std::size_t i = 0; i < 32; ++i) {
    const double before = plain(config, i);
    const double wave = 2.0 * 3.14159265358979323846 / before;
    const double ratio = rotary.frequencies[i] / before;
    if (wave < 2048.0) {
      EXPECT_NEAR(ratio, 1.0, 1e-14);
      ++kept;
    } else if (wave > 8192.0) {
      EXPECT_NEAR(ratio, 0.125, 1e-14);
      ++stretched;
    } else {
      const double smooth = (8192.0 / wave - 1.0) / 3.0;
      EXPECT_NEAR(ratio, (1.0 - smooth) / 8.0 + smooth, 1e-13);
      ++blended;
    }
  }
  EXPECT_GT(kept, 5);
  EXPECT_GT(blended, 1);
  EXPECT_GT(stretched, 5);
}

TEST(Rotary, YarnRampsFromKeptToStretched) {
  const ModelConfig config = config_with(RopeKind::yarn, 4.0);
  const RotaryFrequencies rotary = rotary_frequencies(config);
  const auto pair = [&](double rotations) {
    return 64.0 * std::log(8192.0 / (rotations * 2.0 * 3.14159265358979323846)) /
           (2.0 * std::log(500000.0));
  };
  const double low = std::floor(pair(32.0));
  const double high = std::ceil(pair(1.0));
  ASSERT_GT(low, 0.0);
  ASSERT_LT(high, 31.0);
  for (std::size_t i = 0; i < 32; ++i) {
    const double ramp = std::min(std::max((static_cast<double>(i) - low) / (high - low), 0.0), 1.0);
    EXPECT_NEAR(rotary.frequencies[i] / plain(config, i), 1.0 - ramp + ramp / 4.0, 1e-13);
  }
  EXPECT_NEAR(rotary.scale, 0.1 * std::log(4.0) + 1.0, 1e-15);
  ModelConfig balanced = config;
  balanced.rope.mscale_all_dim = 1.0;
  EXPECT_EQ(rotary_frequencies(balanced).scale, 1.0);
  // Bounds that fall together, and a factor that shortens nothing.
  balanced.rope.beta_fast = balanced.rope.beta_slow = 1e9;
  for (const double f : rotary_frequencies(balanced).frequencies) EXPECT_TRUE(std::isfinite(f));
  EXPECT_EQ(rotary_frequencies(config_with(RopeKind::yarn, 1.0)).scale, 1.0);
}

TEST(Rotary, LongropeHasAFactorForEachPair) {
  ModelConfig config = config_with(RopeKind::longrope, 16.0);
  for (int i = 0; i < 32; ++i) config.rope.long_factors.push_back(1.0 + 0.5 * i);
  const RotaryFrequencies rotary = rotary_frequencies(config);
  for (std::size_t i = 0; i < 32; ++i) {
    EXPECT_NEAR(rotary.frequencies[i] * config.rope.long_factors[i], plain(config, i),
                1e-14 * plain(config, i));
  }
  EXPECT_NEAR(rotary.scale, std::sqrt(1.0 + std::log(16.0) / std::log(8192.0)), 1e-15);
  config.rope_factor = 0.5;
  EXPECT_EQ(rotary_frequencies(config).scale, 1.0);
}

// Bits that must not change from one compiler, library or machine to the next: those of the exact
// values, which tests/data/make_rope_hash.py forms with 60 digits and rounds once.
TEST(Rotary, TablesHaveKnownBits) {
  std::uint64_t hash = 1469598103934665603u;
  ModelConfig configs[] = {config_with(RopeKind::standard, 1.0), config_with(RopeKind::linear, 2.5),
                           config_with(RopeKind::llama3, 8.0), config_with(RopeKind::yarn, 4.0),
                           config_with(RopeKind::longrope, 16.0)};
  configs[4].rope.long_factors.assign(32, 1.75);
  for (const ModelConfig& config : configs) {
    const RotaryFrequencies rotary = rotary_frequencies(config);
    std::vector<float> cosines(32), sines(32);
    for (const std::int64_t position : {0, 1, 17, 4095, 131071}) {
      rotary_row(rotary, position, cosines.data(), sines.data());
      for (const std::vector<float>* row : {&cosines, &sines}) {
        for (const float value : *row) {
          std::uint32_t bits = 0;
          std::memcpy(&bits, &value, sizeof(bits));
          hash = (hash ^ bits) * 1099511628211u;
        }
      }
    }
  }
  EXPECT_EQ(hash, 17458270696087565618u);
}

}  // namespace
}  // namespace qmlp
