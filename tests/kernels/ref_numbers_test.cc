// The reference's own building blocks: rounding, decoded weights, the tensor-core step,
// activations.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/float16.h"
#include "io/safetensors.h"
#include "kernels/random.h"
#include "qmlp/quant.h"
#include "quant/exact.h"
#include "ref/activation.h"
#include "ref/dot.h"
#include "ref/oracle.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr DType kHalfTypes[] = {DType::f16, DType::bf16};

bool same(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

TEST(RefRounding, EveryHalfPatternComesBack) {
  for (const DType type : kHalfTypes) {
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const float value = ref::from_bits16(bits, type);
      const float widened = type == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
      ASSERT_TRUE(same(value, widened)) << to_string(type) << " " << i;
      if (!std::isnan(value)) {
        ASSERT_EQ(ref::to_bits16(value, type), bits) << to_string(type);
      }
    }
  }
}

// Between two neighbours of the type: below, at and above the middle, where ties go to even.
TEST(RefRounding, RoundsToNearestEven) {
  for (const DType type : kHalfTypes) {
    const std::uint32_t infinity = type == DType::bf16 ? 0x7F80u : 0x7C00u;
    for (std::uint32_t i = 0; i + 1 < infinity; ++i) {
      const float low = ref::from_bits16(static_cast<std::uint16_t>(i), type);
      const float high = ref::from_bits16(static_cast<std::uint16_t>(i + 1), type);
      const float middle = low + (high - low) / 2;
      ASSERT_EQ(ref::round_to_type(middle, type), (i & 1) == 0 ? low : high) << i;
      ASSERT_EQ(ref::round_to_type(std::nextafter(middle, 0.0f), type), low) << i;
      ASSERT_EQ(ref::round_to_type(-std::nextafter(middle, high), type), -high) << i;
    }
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ref::round_to_type(65519.996f, DType::f16), 65504.0f);
  EXPECT_EQ(ref::round_to_type(65520.0f, DType::f16), kInfinity);
  EXPECT_EQ(ref::round_to_type(-65520.0f, DType::f16), -kInfinity);
  EXPECT_EQ(ref::round_to_type(std::numeric_limits<float>::max(), DType::bf16), kInfinity);
}

TEST(RefRounding, AgreesWithTheLibraryOnRandomFloats) {
  test::Random random(1);
  for (int i = 0; i < 300000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    for (const DType type : kTypes) {
      ASSERT_TRUE(same(ref::round_to_type(value, type), round_to(value, type)))
          << value << " " << to_string(type);
    }
  }
}

// Two independent routes to the same single rounding: integers here, doubles rounded to odd there.
TEST(RefWeight, AgreesWithTheExactDoubleForm) {
  test::Random random(2);
  const auto draw = [&random](DType stored) -> float {
    if (random.below(3) != 0) {  // any pattern
      const std::uint64_t bits = random.bits();
      if (stored == DType::f32) return std::bit_cast<float>(static_cast<std::uint32_t>(bits));
      return ref::from_bits16(static_cast<std::uint16_t>(bits), stored);
    }
    return ref::round_to_type(static_cast<float>(random.normal() * 0.02), stored);
  };
  for (int i = 0; i < 400000; ++i) {
    const DType stored = random.pick(kTypes);
    const float scale = draw(stored);
    float bias = draw(stored);
    const int code = static_cast<int>(random.below(256));
    // Near cancellation, where the second rounding would show.
    if (random.below(4) == 0) bias = ref::round_to_type(-scale * static_cast<float>(code), stored);
    for (const DType type : kTypes) {
      ASSERT_TRUE(
          same(ref::decoded_weight(scale, code, bias, type), exact_weight(scale, code, bias, type)))
          << "scale " << scale << " code " << code << " bias " << bias << " to " << to_string(type);
    }
  }
}

TEST(RefWeight, KnownDoubleRoundings) {
  // f32 first would round s * q + z to a tie of f16 and then the wrong way.
  const float scale = std::ldexp(565.0f, -24);
  const float exact = ref::decoded_weight(scale, 29, 2.0f, DType::f16);
  const float twice = ref::round_to_type(scale * 29.0f + 2.0f, DType::f16);
  EXPECT_NE(exact, twice);
  EXPECT_EQ(exact, std::ldexp(1025.0f, -9));
  // q * s leaves f16's range before the bias brings it back.
  EXPECT_EQ(ref::decoded_weight(8000.0f, 15, -60000.0f, DType::f16), 60000.0f);
  EXPECT_EQ(ref::decoded_weight(8000.0f, 7, -60000.0f, DType::f16), -4000.0f);
  // Signs of zero as IEEE sums have them.
  EXPECT_TRUE(std::signbit(ref::decoded_weight(-1.0f, 0, -0.0f, DType::bf16)));
  EXPECT_FALSE(std::signbit(ref::decoded_weight(-1.0f, 0, 0.0f, DType::bf16)));
}

TEST(RefWeight, DecodesAsTheLibraryDoes) {
  test::Random random(3);
  const std::int64_t N = 3;
  const std::int64_t K = 256;
  std::vector<float> values(static_cast<std::size_t>(N * K));
  for (float& value : values) value = static_cast<float>(random.normal() * 0.1);
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int group : {32, 64, 128}) {
      for (const DType stored : kTypes) {
        const auto quantized = quantize(values, N, K, {bits, group, stored});
        ASSERT_TRUE(quantized) << quantized.error().message;
        for (const DType type : kTypes) {
          std::vector<float> decoded(values.size());
          ASSERT_TRUE(dequantize(quantized->view(), 0, N, type, decoded));
          const std::vector<float> expected = ref::decode(quantized->view(), type);
          for (std::size_t i = 0; i < decoded.size(); ++i) {
            ASSERT_TRUE(same(decoded[i], expected[i])) << bits << "/" << group << " at " << i;
          }
        }
      }
    }
  }
}

TEST(RefStep16, EqualsTheIntegerModel) {
  const auto file = SafetensorsFile::open(QMLP_TEST_DATA "/step16.safetensors");
  ASSERT_TRUE(file) << file.error().message;
  const auto data = [&file](const std::string& name) {
    for (const SafetensorsEntry& entry : file->header().entries) {
      if (entry.name == name) return file->data(entry);
    }
    return std::span<const std::byte>();
  };
  for (const DType type : kHalfTypes) {
    const std::string name = to_string(type);
    const auto a = data(name + ".a");
    const auto b = data(name + ".b");
    const auto acc = data(name + ".acc");
    const auto out = data(name + ".out");
    const std::size_t count = out.size() / 4;
    ASSERT_GT(count, 500u);
    ASSERT_EQ(a.size(), count * 32);
    for (std::size_t i = 0; i < count; ++i) {
      std::uint16_t row_a[16];
      std::uint16_t row_b[16];
      std::uint32_t start;
      std::uint32_t expected;
      std::memcpy(row_a, a.data() + i * 32, 32);
      std::memcpy(row_b, b.data() + i * 32, 32);
      std::memcpy(&start, acc.data() + i * 4, 4);
      std::memcpy(&expected, out.data() + i * 4, 4);
      ASSERT_EQ(ref::step16(row_a, row_b, start, type), expected) << name << " case " << i;
      ASSERT_EQ(ref::step16(row_b, row_a, start, type), expected) << name << " swapped " << i;
    }
  }
}

TEST(RefDot, SegmentsCutKInBlocksOf64) {
  test::Random random(4);
  for (const std::int64_t K : {32, 64, 96, 160, 512, 544}) {
    std::vector<float> x(static_cast<std::size_t>(K));
    std::vector<float> w(static_cast<std::size_t>(K));
    for (auto& v : x) v = ref::round_to_type(static_cast<float>(random.normal()), DType::bf16);
    for (auto& v : w) v = ref::round_to_type(static_cast<float>(random.normal()), DType::bf16);
    const auto part = [&](std::int64_t begin, std::int64_t end) {
      return ref::dot_tensor(x.data() + begin, w.data() + begin, end - begin, 1, DType::bf16);
    };
    const std::int64_t blocks = (K + 63) / 64;
    const auto edge = [&](int i, int segments) { return std::min(K, i * blocks / segments * 64); };
    EXPECT_EQ(ref::dot_tensor(x.data(), w.data(), K, 2, DType::bf16),
              part(0, edge(1, 2)) + part(edge(1, 2), K));
    float s[4];
    for (int i = 0; i < 4; ++i) s[i] = part(edge(i, 4), edge(i + 1, 4));
    EXPECT_EQ(ref::dot_tensor(x.data(), w.data(), K, 4, DType::bf16),
              (s[0] + s[1]) + (s[2] + s[3]));
  }
}

TEST(RefActivation, ExpIsWithinTwoUlpAndSigmoidInRange) {
  double worst = 0.0;
  for (double x = -103.0; x <= 0.0; x += 0.00037) {
    const auto argument = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(argument));
    const float got = ref::exp_nonpositive(argument);
    const double ulp = std::max(std::ldexp(1.0, std::ilogb(exact) - 23), std::ldexp(1.0, -149));
    worst = std::max(worst, std::fabs(got - exact) / ulp);
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_EQ(ref::exp_nonpositive(0.0f), 1.0f);
  EXPECT_EQ(ref::exp_nonpositive(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(ref::exp_nonpositive(std::nanf(""))));
  EXPECT_EQ(ref::sigmoid_f32(0.0f), 0.5f);
  EXPECT_EQ(ref::sigmoid_f32(200.0f), 1.0f);
  EXPECT_EQ(ref::sigmoid_f32(-200.0f), 0.0f);
  for (float x = -80.0f; x < 80.0f; x += 0.013f) {
    const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
    ASSERT_NEAR(ref::sigmoid_f32(x), exact, exact * 5e-7) << x;
  }
}

TEST(RefOracle, ErrorInBoundsTreatsRangeAndNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ref::error_in_bounds(1.5f, {1.0, 0.5, 0}, DType::bf16), 1.0);
  EXPECT_EQ(ref::error_in_bounds(1.0f, {1.0, 0.0, 0}, DType::bf16), 0.0);
  EXPECT_EQ(ref::error_in_bounds(infinity, {65500.0, 30.0, 0}, DType::f16), 0.0);
  EXPECT_GT(ref::error_in_bounds(infinity, {65000.0, 30.0, 0}, DType::f16), 1.0);
  EXPECT_GT(ref::error_in_bounds(-infinity, {70000.0, 30.0, 0}, DType::f16), 1.0);
  EXPECT_GT(ref::error_in_bounds(std::nanf(""), {1.0, 9.0, 0}, DType::f32), 1.0);
  EXPECT_GT(ref::error_in_bounds(1.0f, {std::nan(""), 9.0, 0}, DType::f32), 1.0);
  EXPECT_EQ(ref::ulp_distance(1.0f, 1.0078125f, DType::bf16), 1);
  EXPECT_EQ(ref::ulp_distance(-0.0f, 0.0f, DType::f16), 0);
  EXPECT_EQ(ref::ulp_distance(std::nextafter(0.0f, -1.0f), std::nextafter(0.0f, 1.0f), DType::f32),
            2);
}

}  // namespace
}  // namespace qmlp
