#include "model/pinned_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace qmlp {
namespace {

// Against the C library in long double, whose own error is far below these bounds.
TEST(PinnedMath, ExpIsWithinTwoUlp) {
  std::mt19937_64 engine(11);
  std::uniform_real_distribution<double> range(-700.0, 700.0);
  for (int i = 0; i < 200000; ++i) {
    const double x = range(engine);
    const long double want = std::exp(static_cast<long double>(x));
    const auto error = static_cast<double>((pinned_exp(x) - want) / want);
    ASSERT_LE(std::abs(error), 0x1p-51) << x;
  }
  EXPECT_EQ(pinned_exp(0.0), 1.0);
  EXPECT_EQ(pinned_exp(-0.0), 1.0);
  EXPECT_EQ(pinned_exp(-746.0), 0.0);
  EXPECT_EQ(pinned_exp(-std::numeric_limits<double>::infinity()), 0.0);
  EXPECT_EQ(pinned_exp(710.0), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(pinned_exp(std::nan(""))));
}

TEST(PinnedMath, LogIsWithinTwoUlp) {
  std::mt19937_64 engine(12);
  std::uniform_real_distribution<double> exponent(-300.0, 300.0);
  for (int i = 0; i < 200000; ++i) {
    const double x = std::pow(10.0, exponent(engine));
    const long double want = std::log(static_cast<long double>(x));
    ASSERT_LE(static_cast<double>(std::abs(pinned_log(x) - want)),
              0x1p-51 * std::abs(static_cast<double>(want)))
        << x;
  }
  EXPECT_EQ(pinned_log(1.0), 0.0);
}

TEST(PinnedMath, SineAndCosineAreWithinTwoUlpOfOne) {
  std::mt19937_64 engine(13);
  std::uniform_real_distribution<double> range(-1.1e6, 1.1e6);
  for (int i = 0; i < 200000; ++i) {
    const double x = range(engine);
    const SinCos got = pinned_sin_cos(x);
    ASSERT_LE(std::abs(static_cast<double>(got.sine - std::sin(static_cast<long double>(x)))),
              0x1p-51)
        << x;
    ASSERT_LE(std::abs(static_cast<double>(got.cosine - std::cos(static_cast<long double>(x)))),
              0x1p-51)
        << x;
  }
  EXPECT_EQ(pinned_sin_cos(0.0).sine, 0.0);
  EXPECT_EQ(pinned_sin_cos(0.0).cosine, 1.0);
}

}  // namespace
}  // namespace qmlp
