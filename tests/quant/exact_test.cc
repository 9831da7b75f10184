#include "quant/exact.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace qmlp {
namespace {

// An integer of 384 bits with a sign, counting units of 2^-149: holds code * scale + bias of any
// finite f32 scale and bias exactly.
class Exact {
 public:
  static Exact product(float scale, int code) {
    Exact out;
    out.set(scale);
    std::uint64_t carry = 0;
    for (auto& limb : out.limbs_) {
      carry += static_cast<std::uint64_t>(limb) * static_cast<std::uint64_t>(code);
      limb = static_cast<std::uint32_t>(carry);
      carry >>= 32;
    }
    return out;
  }
  void add(float value) {
    Exact other;
    other.set(value);
    if (negative_ == other.negative_) {
      std::uint64_t carry = 0;
      for (std::size_t i = 0; i < kLimbs; ++i) {
        carry += static_cast<std::uint64_t>(limbs_[i]) + other.limbs_[i];
        limbs_[i] = static_cast<std::uint32_t>(carry);
        carry >>= 32;
      }
      return;
    }
    if (less(other)) std::swap(*this, other);
    std::int64_t borrow = 0;
    for (std::size_t i = 0; i < kLimbs; ++i) {
      borrow += static_cast<std::int64_t>(limbs_[i]) - other.limbs_[i];
      limbs_[i] = static_cast<std::uint32_t>(borrow);
      borrow >>= 32;
    }
  }
  // Nearest, ties to even, in a format of `digits` significant bits, smallest unit 2^min_exponent
  // and largest finite value `largest`.
  float round(int digits, int min_exponent, float largest) const {
    const int top = highest();
    if (top < 0) return 0.0f;
    // The unit of the last kept place, as a bit position.
    const int last = std::max(top - digits + 1, min_exponent + 149);
    double magnitude = 0.0;
    for (int i = top; i >= last; --i) magnitude += bit(i) ? std::ldexp(1.0, i - 149) : 0.0;
    const bool half = last > 0 && bit(last - 1);
    bool below = false;
    for (int i = 0; i < last - 1; ++i) below = below || bit(i);
    if (half && (below || bit(last))) magnitude += std::ldexp(1.0, last - 149);
    if (magnitude > static_cast<double>(largest))
      magnitude = std::numeric_limits<double>::infinity();
    return static_cast<float>(negative_ ? -magnitude : magnitude);
  }
  bool is_zero() const { return highest() < 0; }

 private:
  static constexpr std::size_t kLimbs = 12;

  void set(float value) {
    negative_ = std::signbit(value);
    const auto bits = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
    const int exponent = static_cast<int>(bits >> 23);
    const std::uint64_t digits = (bits & 0x7FFFFFu) | (exponent != 0 ? 0x800000u : 0u);
    const int shift = exponent != 0 ? exponent - 1 : 0;
    for (int i = 0; i < 24; ++i) {
      if ((digits >> i) & 1u) {
        limbs_[static_cast<std::size_t>((shift + i) / 32)] |= 1u << ((shift + i) % 32);
      }
    }
  }
  bool bit(int i) const { return (limbs_[static_cast<std::size_t>(i / 32)] >> (i % 32)) & 1u; }
  int highest() const {
    for (int i = static_cast<int>(kLimbs) * 32 - 1; i >= 0; --i) {
      if (bit(i)) return i;
    }
    return -1;
  }
  bool less(const Exact& other) const {
    for (std::size_t i = kLimbs; i-- > 0;) {
      if (limbs_[i] != other.limbs_[i]) return limbs_[i] < other.limbs_[i];
    }
    return false;
  }

  std::array<std::uint32_t, kLimbs> limbs_{};
  bool negative_ = false;
};

float reference(float scale, int code, float bias, DType type) {
  Exact value = Exact::product(scale, code);
  value.add(bias);
  switch (type) {
    case DType::f32:
      return value.round(24, -149, std::numeric_limits<float>::max());
    case DType::f16:
      return value.round(11, -24, 65504.0f);
    default:
      return value.round(8, -133, std::bit_cast<float>(0x7F7F0000u));
  }
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

::testing::AssertionResult matches(float scale, int code, float bias) {
  for (const DType type : kTypes) {
    const float have = exact_weight(scale, code, bias, type);
    const float want = reference(scale, code, bias, type);
    if (have != want) {
      return ::testing::AssertionFailure()
             << scale << " * " << code << " + " << bias << " in " << to_string(type) << ": " << have
             << ", exactly rounded " << want;
    }
  }
  return ::testing::AssertionSuccess();
}

TEST(ExactWeight, KnownDoubleRoundings) {
  // Rounded to f32 first and to f16 second, this one comes out wrong.
  const float scale = 565.0f * 0x1p-24f;
  EXPECT_TRUE(matches(scale, 29, 2.0f));
  const float twice =
      round_to(static_cast<float>(static_cast<double>(scale) * 29 + 2.0), DType::f16);
  EXPECT_NE(exact_weight(scale, 29, 2.0f, DType::f16), twice);
  EXPECT_EQ(exact_weight(8000.0f, 15, -60000.0f, DType::f16), 60000.0f);
  EXPECT_EQ(exact_weight(8000.0f, 7, -60000.0f, DType::f16), -4000.0f);
}

TEST(ExactWeight, RandomF16Groups) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 60'000; ++i) {
    const auto bits = random();
    const float scale = f16_to_f32(static_cast<std::uint16_t>(bits));
    const float bias = f16_to_f32(static_cast<std::uint16_t>(bits >> 16));
    if (!std::isfinite(scale) || !std::isfinite(bias)) continue;
    ASSERT_TRUE(matches(scale, static_cast<int>((bits >> 32) % 256), bias));
  }
}

TEST(ExactWeight, RandomF32AndBf16Groups) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 60'000; ++i) {
    const auto bits = random();
    std::uint32_t scale_bits = static_cast<std::uint32_t>(bits);
    std::uint32_t bias_bits = static_cast<std::uint32_t>(bits >> 32);
    if (i % 2 == 0) {  // bf16
      scale_bits &= 0xFFFF0000u;
      bias_bits &= 0xFFFF0000u;
    }
    if (i % 3 != 0) {  // exponents near each other, where the sum needs every bit
      const auto distance = static_cast<std::uint32_t>(random() % 64);
      const std::uint32_t exponent = (scale_bits >> 23) & 0xFFu;
      const std::uint32_t near = exponent + 32u > distance ? exponent + 32u - distance : 0u;
      bias_bits = (bias_bits & 0x807FFFFFu) | (std::min(near, 254u) << 23);
    }
    const float scale = std::bit_cast<float>(scale_bits);
    const float bias = std::bit_cast<float>(bias_bits);
    if (!std::isfinite(scale) || !std::isfinite(bias)) continue;
    ASSERT_TRUE(matches(scale, static_cast<int>(random() % 256), bias));
  }
}

TEST(ExactWeight, TiesAndNeighboursOfTies) {
  // 1 + half an ulp of each type, and one f32 unit of the far end above and below it.
  for (const float half : {0x1p-24f, 0x1p-11f, 0x1p-8f}) {
    for (const float nudge : {0.0f, 0x1p-140f, -0x1p-140f}) {
      EXPECT_TRUE(matches(half, 1, 1.0f));
      EXPECT_TRUE(matches(half, 3, 1.0f));
      EXPECT_TRUE(matches(1.0f + 2.0f * half, 1, half));
      EXPECT_TRUE(matches(nudge, 1, 1.0f + half));
      EXPECT_TRUE(matches(std::bit_cast<float>(0x3F810000u) * half, 255, -1.0f));
    }
  }
  // Below and above half of the smallest subnormal of each type.
  for (const float tiny : {0x1p-149f, 0x1p-25f, 0x1p-134f}) {
    for (int code = 0; code < 5; ++code) EXPECT_TRUE(matches(tiny, code, 0.0f));
  }
}

TEST(ExactWeight, Overflow) {
  const float largest = std::numeric_limits<float>::max();
  EXPECT_TRUE(matches(largest, 1, largest));
  EXPECT_TRUE(matches(largest, 255, -largest));
  EXPECT_TRUE(matches(largest, 2, -largest));
  EXPECT_TRUE(matches(65504.0f, 1, 15.0f));
  EXPECT_TRUE(matches(65504.0f, 1, 16.0f));
  EXPECT_EQ(exact_weight(65504.0f, 1, 16.0f, DType::f16), std::numeric_limits<float>::infinity());
  EXPECT_EQ(exact_weight(65504.0f, 1, 15.984375f, DType::f16), 65504.0f);
}

TEST(ExactWeight, SignsOfZeroAndNonFinite) {
  for (const DType type : kTypes) {
    EXPECT_FALSE(std::signbit(exact_weight(1.0f, 1, -1.0f, type)));
    EXPECT_TRUE(std::signbit(exact_weight(-1.0f, 0, -0.0f, type)));
    EXPECT_FALSE(std::signbit(exact_weight(-1.0f, 0, 0.0f, type)));
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(exact_weight(infinity, 1, 0.0f, type), infinity);
    EXPECT_TRUE(std::isnan(exact_weight(infinity, 0, 0.0f, type)));
    EXPECT_TRUE(std::isnan(exact_weight(infinity, 1, -infinity, type)));
    EXPECT_TRUE(std::isnan(exact_weight(std::nanf(""), 1, 0.0f, type)));
    EXPECT_EQ(exact_weight(1.0f, 1, -infinity, type), -infinity);
  }
}

}  // namespace
}  // namespace qmlp
