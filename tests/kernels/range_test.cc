// Infinities, NaN, the edges of f16's range, and the activation over every input (docs/numerics.md
// section 4).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/fixture.h"
#include "ref/oracle.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

void store(std::vector<std::byte>& bytes, DType type, std::int64_t index, float value) {
  if (type == DType::f32) {
    std::memcpy(bytes.data() + 4 * index, &value, 4);
    return;
  }
  const std::uint16_t bits = ref::to_bits16(ref::round_to_type(value, type), type);
  std::memcpy(bytes.data() + 2 * index, &bits, 2);
}

// A weight whose codes are all `code`, with one scale and a bias for each row.
QuantizedTensor plain_weight(std::int64_t K, const QuantSpec& spec, int code, float scale,
                             const std::vector<float>& biases) {
  const auto N = static_cast<std::int64_t>(biases.size());
  QuantizedTensor weight;
  weight.N = N;
  weight.K = K;
  weight.spec = spec;
  weight.codes.resize(static_cast<std::size_t>(N * K / 8 * spec.bits));
  for (std::int64_t i = 0; i < N * K * spec.bits; ++i) {
    if ((code >> (i % spec.bits) & 1) == 0) continue;
    weight.codes[static_cast<std::size_t>(i / 8)] |= static_cast<std::byte>(1 << (i % 8));
  }
  const std::int64_t groups = K / spec.group_size;
  weight.scales.resize(static_cast<std::size_t>(N * groups) * size_of(spec.scale_dtype));
  weight.biases = weight.scales;
  for (std::int64_t i = 0; i < N * groups; ++i) {
    store(weight.scales, spec.scale_dtype, i, scale);
    store(weight.biases, spec.scale_dtype, i, biases[static_cast<std::size_t>(i / groups)]);
  }
  return weight;
}

QuantizedTensor column(const std::vector<float>& values, DType type) {
  QuantizedTensor weight;
  weight.N = static_cast<std::int64_t>(values.size());
  weight.K = 1;
  weight.spec = QuantSpec::dense(type);
  weight.codes.resize(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store(weight.codes, type, static_cast<std::int64_t>(i), values[i]);
  }
  return weight;
}

// The first unit vector in each of M rows.
Matrix first_units(std::int64_t M, std::int64_t K, DType type) {
  std::vector<float> values(static_cast<std::size_t>(M * K));
  for (std::int64_t m = 0; m < M; ++m) values[static_cast<std::size_t>(m * K)] = 1.0f;
  return matrix_of(values, M, K, type);
}

template <class Check>
void for_each_swiglu(DType type, Precision precision, const QuantizedTensor& gate,
                     const QuantizedTensor& up, std::int64_t M, const Check& check) {
  for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
    for (const KernelInfo& kernel : runnable_kernels("swiglu", type, accumulation)) {
      SwigluCase item{{M, gate.K, gate.N, gate.spec, up.spec, type, precision, accumulation, 0},
                      std::string(kernel.name),
                      2};
      Swiglu swiglu(item, gate.view(), up.view());
      check(swiglu, describe(item, M));
    }
  }
}
template <class Check>
void for_each_linear(DType type, const QuantizedTensor& weight, std::int64_t M,
                     const Check& check) {
  for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
    for (const KernelInfo& kernel : runnable_kernels("linear", type, accumulation)) {
      LinearCase item{
          {M, weight.N, weight.K, weight.spec, type, accumulation, 0}, std::string(kernel.name), 2};
      Linear linear(item, weight.view());
      check(linear, describe(item, M));
    }
  }
}

// Every 16-bit input of the gate, infinities and NaN too: `match` is the pinned table.
TEST(Range, MatchIsThePinnedTableForEveryGate) {
  for (const DType type : {DType::bf16, DType::f16}) {
    std::vector<float> gates(65536);
    std::vector<float> expected(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      gates[i] = ref::from_bits16(static_cast<std::uint16_t>(i), type);
      expected[i] =
          ref::match_epilogue(ref::round_to_type(std::fma(1.0f, gates[i], 0.0f), type), 1.0f, type);
    }
    const QuantizedTensor gate = column(gates, type);
    const QuantizedTensor up = column(std::vector<float>(65536, 1.0f), type);
    const Matrix x = first_units(1, 1, type);
    for_each_swiglu(type, Precision::match, gate, up, 1, [&](Swiglu& op, const std::string& what) {
      expect_same(op.checked(x, 1), expected, 1, 65536, what);
    });
    const float low = ref::from_bits16(0xFBFF, type);  // f16: -65504
    if (type == DType::f16) {
      EXPECT_EQ(ref::match_epilogue(low, 1.0f, type), 0.0f);
      EXPECT_EQ(ref::match_epilogue(65504.0f, 1.0f, type), 65504.0f);
    }
  }
}

TEST(Range, WideIsWithinOneUlpAndFloatWithinFour) {
  for (const DType type : kTypes) {
    std::vector<float> gates;
    if (type == DType::f32) {
      for (double g = -110.0; g <= 110.0; g += 0.0071) gates.push_back(static_cast<float>(g));
    } else {
      for (std::uint32_t i = 0; i < 65536; ++i) {
        const float g = ref::from_bits16(static_cast<std::uint16_t>(i), type);
        if (std::isfinite(g)) gates.push_back(g);
      }
    }
    const auto N = static_cast<std::int64_t>(gates.size());
    const QuantizedTensor gate = column(gates, type);
    const QuantizedTensor up = column(std::vector<float>(gates.size(), 1.0f), type);
    const Matrix x = first_units(1, 1, type);
    const Precision precision = type == DType::f32 ? Precision::match : Precision::wide;
    for_each_swiglu(type, precision, gate, up, 1, [&](Swiglu& op, const std::string& what) {
      const auto got = op.checked(x, 1);
      ASSERT_EQ(got.size(), static_cast<std::size_t>(N)) << what;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double g = gates[i];
        const double exact = g < 0 ? g * std::exp(g) / (1 + std::exp(g)) : g / (1 + std::exp(-g));
        const float nearest = ref::round_to_type(static_cast<float>(exact), type);
        // Below -87 the f32 sigmoid is subnormal: half a step of it, times the gate.
        const double allowed = type != DType::f32 ? 1.0 : g >= -87.0 ? 4.0 : 1.0 - g / 2;
        ASSERT_LE(static_cast<double>(ref::ulp_distance(got[i], nearest, type)), allowed)
            << what << " gate " << g;
      }
    });
  }
}

// gate * up past f16's range, whose inputs are ordinary.
TEST(Range, ProductPastF16) {
  for (const DType type : kTypes) {
    const QuantSpec spec{4, 64, type};
    const auto gate = plain_weight(64, spec, 0, 0.0f, {255.875f, 0.0f, 0.0f});
    const auto up = plain_weight(64, spec, 0, 0.0f, {261.75f, 0.0f, 0.0f});
    const Matrix x = first_units(1, 64, type);
    const auto down = plain_weight(64, {4, 64, type}, 0, 0.0f, {0.0009765625f});
    for_each_swiglu(type, Precision::match, gate, up, 1, [&](Swiglu& op, const std::string& what) {
      const auto got = op.checked(x, 1);
      ASSERT_EQ(got.size(), 3u);
      const float expected = type == DType::f32    ? 66975.28125f
                             : type == DType::bf16 ? 67072.0f
                                                   : kInfinity;
      EXPECT_EQ(got[0], expected) << what;
      EXPECT_EQ(got[1], 0.0f) << what;
    });
    // `wide` holds f32 to the end, where f16 overflows all the same, without a NaN.
    for_each_swiglu(type, Precision::wide, gate, up, 1, [&](Swiglu& op, const std::string& what) {
      EXPECT_FALSE(std::isnan(op.checked(x, 1)[0])) << what;
    });
  }
}

// Sums that are exact in f32 and would lose their small terms in a 16-bit accumulator.
TEST(Range, SmallTermsBesideLargeOnes) {
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
      const auto check = [&](std::int64_t K, const std::vector<float>& x_row, float expected) {
        const auto ones = plain_weight(K, {bits, 64, type}, 0, 0.0f, {1.0f, 1.0f});
        for (const std::int64_t M : {1, 2, 8}) {
          std::vector<float> values;
          for (std::int64_t m = 0; m < M; ++m) {
            values.insert(values.end(), x_row.begin(), x_row.end());
          }
          const Matrix x = matrix_of(values, M, K, type);
          for_each_linear(type, ones, M, [&](Linear& op, const std::string& what) {
            for (const float y : op.checked(x, M)) ASSERT_EQ(y, expected) << what;
          });
        }
      };
      const float pattern[4] = {1024.0f, 0.5f, 0.5f, -1024.0f};
      for (const std::int64_t stride : {1, 32, 512}) {
        std::vector<float> row(4096);
        for (std::int64_t k = 0; k < 4096; ++k) {
          row[static_cast<std::size_t>(k)] = pattern[k / stride % 4];
        }
        check(4096, row, 1024.0f);
      }
      if (bits == 4) check(8192, std::vector<float>(8192, 1.0f), 8192.0f);
    }
  }
}

// s * q leaves f16's range before the bias brings it back.
TEST(Range, ScaleTimesCodePastF16) {
  const QuantSpec spec{4, 32, DType::f16};
  const std::vector<float> biases(5, -60000.0f);
  const Matrix x = first_units(9, 32, DType::f16);
  for (const auto& [code, expected] : {std::pair{15, 60000.0f}, std::pair{7, -4000.0f}}) {
    const auto weight = plain_weight(32, spec, code, 8000.0f, biases);
    for_each_linear(DType::f16, weight, 9,
                    [&, want = expected](Linear& op, const std::string& what) {
                      for (const float y : op.checked(x, 9)) ASSERT_EQ(y, want) << what;
                    });
  }
}

TEST(Range, F16OutputsOverflowAsTheTypeDoes) {
  const auto weight = column({65504.0f, 65488.0f, -65504.0f}, DType::f16);
  QuantizedTensor two = weight;
  two.K = 2;
  two.codes.resize(12);
  const float rows[3][2] = {{65504.0f, 15.0f}, {65504.0f, 16.0f}, {-65504.0f, -16.0f}};
  for (int n = 0; n < 3; ++n) {
    for (int k = 0; k < 2; ++k) store(two.codes, DType::f16, 2 * n + k, rows[n][k]);
  }
  const Matrix x = matrix_of({1.0f, 1.0f}, 1, 2, DType::f16);
  for_each_linear(DType::f16, two, 1, [&](Linear& op, const std::string& what) {
    const auto y = op.checked(x, 1);
    ASSERT_EQ(y.size(), 3u);
    EXPECT_EQ(y[0], 65504.0f) << what;   // 65519 rounds down
    EXPECT_EQ(y[1], kInfinity) << what;  // 65520 is the tie, away from the finite
    EXPECT_EQ(y[2], -kInfinity) << what;
  });
}

// One bad element of x reaches its own row alone, and that row as the reference says.
TEST(Range, NonFiniteActivationsStayInTheirRow) {
  Random random(400);
  const std::int64_t M = 8;
  const std::int64_t N = 37;
  const std::int64_t K = 96;
  for (const DType type : kTypes) {
    const QuantSpec spec{4, 32, type};
    const QuantSpec up_spec{3, 32, type};
    const auto gate = random_weight(N, K, spec, WeightKind::quantized, random);
    const auto up = random_weight(N, K, up_spec, WeightKind::quantized, random);
    const auto clean = random_x(M, K, type, random);
    const auto g = ref::decode(gate.view(), type);
    const auto u = ref::decode(up.view(), type);
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      auto values = clean;
      values[3 * K + 5] = bad;
      const Matrix x = matrix_of(values, M, K, type);
      for_each_linear(type, gate, M, [&](Linear& op, const std::string& what) {
        const auto rules = rules_of(type, op.plan().accumulation(), 1);
        const auto y = op.checked(x, M);
        expect_same(y, ref::linear(values, g, M, N, K, rules), M, N, what);
        const auto untouched = ref::linear(clean, g, M, N, K, rules);
        for (std::int64_t i = 0; i < M * N; ++i) {
          const auto at = static_cast<std::size_t>(i);
          if (i / N == 3) {
            ASSERT_FALSE(std::isfinite(y[at])) << what;
          } else {
            ASSERT_TRUE(same_bits(y[at], untouched[at])) << what;
          }
        }
      });
      for (const Precision precision : {Precision::match, Precision::wide}) {
        for_each_swiglu(type, precision, gate, up, M, [&](Swiglu& op, const std::string& what) {
          const auto rules = rules_of(type, op.plan().accumulation(), 1, precision);
          const auto h = op.checked(x, M);
          const auto untouched = ref::swiglu(clean, g, u, M, N, K, rules).out;
          for (std::int64_t i = 0; i < M * N; ++i) {
            const auto at = static_cast<std::size_t>(i);
            if (i / N != 3) {
              ASSERT_TRUE(same_bits(h[at], untouched[at])) << what;
            }
          }
          expect_same(h, ref::swiglu(values, g, u, M, N, K, rules).out, M, N, what);
        });
      }
    }
  }
}

// One bad scale or bias reaches its own column alone; the packed weight says that it is there.
TEST(Range, NonFiniteScalesStayInTheirColumn) {
  Random random(401);
  const std::int64_t M = 7;
  const std::int64_t N = 37;
  const std::int64_t K = 64;
  for (const DType type : kTypes) {
    const QuantSpec spec{4, 32, type};
    const auto clean = random_weight(N, K, spec, WeightKind::quantized, random);
    const auto values = random_x(M, K, type, random);
    const Matrix x = matrix_of(values, M, K, type);
    for (const float bad : {kNan, kInfinity}) {
      for (const bool in_scale : {false, true}) {
        auto weight = clean;
        store(in_scale ? weight.scales : weight.biases, type, 20 * 2 + 1, bad);
        const auto w = ref::decode(weight.view(), type);
        for_each_linear(type, weight, M, [&](Linear& op, const std::string& what) {
          EXPECT_TRUE(packed_info(op.weight()).non_finite) << what;
          const auto rules = rules_of(type, op.plan().accumulation(), 1);
          const auto y = op.checked(x, M);
          expect_same(y, ref::linear(values, w, M, N, K, rules), M, N, what);
          for (std::int64_t i = 0; i < M * N; ++i) {
            ASSERT_EQ(std::isfinite(y[static_cast<std::size_t>(i)]), i % N != 20) << what;
          }
        });
      }
    }
    Linear fine({{M, N, K, spec, type, {}, 0}, "", 1}, clean.view());
    EXPECT_FALSE(packed_info(fine.weight()).non_finite);
  }
}

// A gate of -inf gives -inf * 0 = NaN in `match`, as the separate ops do.
TEST(Range, InfiniteGate) {
  for (const DType type : kTypes) {
    const auto gate = column({-kInfinity, kInfinity, kNan}, type);
    const auto up = column({1.0f, -2.0f, 1.0f}, type);
    const Matrix x = first_units(1, 1, type);
    for_each_swiglu(type, Precision::match, gate, up, 1, [&](Swiglu& op, const std::string& what) {
      const auto h = op.checked(x, 1);
      ASSERT_EQ(h.size(), 3u);
      EXPECT_TRUE(std::isnan(h[0])) << what;
      EXPECT_EQ(h[1], -kInfinity) << what;
      EXPECT_TRUE(std::isnan(h[2])) << what;
    });
  }
}

}  // namespace
}  // namespace qmlp::test
