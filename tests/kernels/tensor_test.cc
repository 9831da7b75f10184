// The vectorised `tensor` contract against the integer model, on operands over the whole range of
// their types. Results are seen after one rounding to the type, over chains of several steps.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/fixture.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

struct Range {
  const char* what;
  DType type;
  int x_low, x_high, w_low, w_high;  // exponent fields
  bool specials, cancelling;
};
constexpr Range kRanges[] = {
    {"ordinary", DType::bf16, 118, 130, 110, 125, false, false},
    {"cancelling", DType::bf16, 118, 130, 110, 125, false, true},
    {"results near the least subnormal", DType::bf16, 50, 54, 48, 56, false, false},
    {"subnormal results", DType::bf16, 50, 66, 50, 66, false, false},
    {"subnormal operands", DType::bf16, 0, 1, 100, 253, false, false},
    {"edge of the vector path, low", DType::bf16, 78, 88, 78, 88, false, true},
    {"edge of the vector path, high", DType::bf16, 178, 190, 178, 186, false, true},
    {"near overflow", DType::bf16, 180, 194, 180, 194, false, true},
    {"everything", DType::bf16, 0, 254, 0, 254, false, false},
    {"specials", DType::bf16, 110, 130, 110, 130, true, false},
    {"f16 ordinary", DType::f16, 10, 17, 8, 15, false, true},
    {"f16 subnormal", DType::f16, 0, 1, 0, 2, false, true},
    {"f16 everything", DType::f16, 0, 30, 0, 30, false, false},
    {"f16 large", DType::f16, 28, 30, 28, 30, false, true},
    {"f16 specials", DType::f16, 5, 25, 5, 25, true, false},
};

float draw(const Range& range, int low, int high, Random& random) {
  const int fraction_bits = range.type == DType::f16 ? 10 : 7;
  const int top = range.type == DType::f16 ? 31 : 255;
  int field = low + static_cast<int>(random.below(high - low + 1));
  if (range.specials && random.below(150) == 0) field = top;
  if (random.below(20) == 0) return 0.0f;
  const std::uint64_t fraction = random.bits() & ((1u << fraction_bits) - 1u);
  const std::uint64_t sign = random.bits() & 1u;
  const bool infinite = field == top && random.below(2) == 0;
  const auto bits = static_cast<std::uint16_t>(
      sign << 15 | static_cast<std::uint64_t>(field) << fraction_bits | (infinite ? 0 : fraction));
  return ref::from_bits16(bits, range.type);
}

TEST(Tensor, HardOperands) {
  Random random(600);
  for (const Range& range : kRanges) {
    for (const std::int64_t K : {16, 32, 48, 160}) {
      const std::int64_t M = 13;
      const std::int64_t N = 50;
      QuantizedTensor weight;
      weight.N = N;
      weight.K = K;
      weight.spec = QuantSpec::dense(range.type);
      weight.codes.resize(static_cast<std::size_t>(N * K * 2));
      std::vector<float> w(static_cast<std::size_t>(N * K));
      std::vector<float> x(static_cast<std::size_t>(M * K));
      for (float& v : w) v = draw(range, range.w_low, range.w_high, random);
      for (float& v : x) v = draw(range, range.x_low, range.x_high, random);
      if (range.cancelling) {  // neighbours of k cancel but for their last bits
        for (std::int64_t i = 0; i + 1 < N * K; i += 2) {
          w[static_cast<std::size_t>(i + 1)] = -w[static_cast<std::size_t>(i)];
        }
        for (std::int64_t i = 0; i + 1 < M * K; i += 2) {
          if (random.below(3) != 0)
            x[static_cast<std::size_t>(i + 1)] = x[static_cast<std::size_t>(i)];
        }
      }
      for (std::size_t i = 0; i < w.size(); ++i) {
        const std::uint16_t bits = ref::to_bits16(w[i], range.type);
        weight.codes[2 * i] = static_cast<std::byte>(bits & 0xFFu);
        weight.codes[2 * i + 1] = static_cast<std::byte>(bits >> 8);
      }
      const Matrix x_matrix = matrix_of(x, M, K, range.type);
      for (const int segments : {1, 2, 8}) {
        const auto expected =
            ref::linear(x, w, M, N, K, rules_of(range.type, Accumulation::tensor, segments));
        for (const KernelInfo& kernel :
             runnable_kernels("linear", range.type, Accumulation::tensor)) {
          LinearCase item{{M, N, K, weight.spec, range.type, Accumulation::tensor, segments},
                          std::string(kernel.name),
                          2};
          Linear linear(item, weight.view());
          expect_same(linear.checked(x_matrix, M), expected, M, N,
                      std::string(range.what) + ": " + describe(item, M));
        }
      }
    }
  }
}

// A first step whose result is a few of f32's least steps decides a tie of bf16 in the second:
// products far below f32's range must still be summed exactly.
TEST(Tensor, TinySumsAreNotFlushed) {
  const auto bf16 = [](double value) {
    return ref::round_to_type(static_cast<float>(value), DType::bf16);
  };
  const std::int64_t K = 32;
  for (int exponent = -82; exponent <= -68; ++exponent) {
    for (const double tie : {0x1p-67, 0x1.8p-66}) {
      QuantizedTensor weight;
      weight.N = 17;
      weight.K = K;
      weight.spec = QuantSpec::dense(DType::bf16);
      std::vector<float> x(static_cast<std::size_t>(K));
      std::vector<float> w(static_cast<std::size_t>(17 * K));
      for (std::int64_t k = 0; k < K; ++k) {
        const double tiny = 1.9 * std::exp2(exponent);
        x[static_cast<std::size_t>(k)] = bf16(k < 16 ? tiny : k == 20 ? 0x1p-67 : 0.0);
        for (std::int64_t n = 0; n < 17; ++n) {
          // Column n has n tiny products.
          w[static_cast<std::size_t>(n * K + k)] = bf16(k < 16 ? (k < n ? tiny : 0.0) : tie);
        }
      }
      for (const float value : w) {
        const std::uint16_t bits = ref::to_bits16(value, DType::bf16);
        weight.codes.push_back(static_cast<std::byte>(bits & 0xFFu));
        weight.codes.push_back(static_cast<std::byte>(bits >> 8));
      }
      const auto expected =
          ref::linear(x, w, 1, 17, K, rules_of(DType::bf16, Accumulation::tensor, 1));
      const Matrix x_matrix = matrix_of(x, 1, K, DType::bf16);
      for (const KernelInfo& kernel :
           runnable_kernels("linear", DType::bf16, Accumulation::tensor)) {
        LinearCase item{{1, 17, K, weight.spec, DType::bf16, Accumulation::tensor, 1},
                        std::string(kernel.name),
                        1};
        Linear linear(item, weight.view());
        expect_same(linear.checked(x_matrix, 1), expected, 1, 17,
                    "2^" + std::to_string(exponent) + ": " + describe(item, 1));
      }
    }
  }
}

// Long chains, where f32 and tensor sums part, at every number of segments.
TEST(Tensor, LongChains) {
  Random random(601);
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const std::int64_t K : {1024, 2080, 4096}) {
      const std::int64_t M = 3;
      const std::int64_t N = 33;
      const QuantSpec spec{4, 32, type};
      const auto weight = random_weight(N, K, spec, WeightKind::quantized, random);
      const auto x = random_x(M, K, type, random);
      const Matrix x_matrix = matrix_of(x, M, K, type);
      const auto w = ref::decode(weight.view(), type);
      for (const int segments : {0, 1, 2, 4, 8}) {
        const int chosen = segments != 0 ? segments : K < 4096 ? 1 : 4;
        const auto expected =
            ref::linear(x, w, M, N, K, rules_of(type, Accumulation::tensor, chosen));
        for (const KernelInfo& kernel : runnable_kernels("linear", type, Accumulation::tensor)) {
          LinearCase item{
              {M, N, K, spec, type, Accumulation::tensor, segments}, std::string(kernel.name), 2};
          Linear linear(item, weight.view());
          EXPECT_EQ(linear.plan().segments(), chosen);
          expect_same(linear.checked(x_matrix, M), expected, M, N, describe(item, M));
        }
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::test
