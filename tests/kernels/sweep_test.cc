// Every CPU kernel of the tables over the formats and the edges of its tiles, to the bit against
// src/ref. Shapes are drawn from lists by fixed seeds; QMLP_TEST_ROUNDS draws more of them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "kernels/fixture.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroups[] = {32, 64, 128};
constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
constexpr std::int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 23, 25, 33};
constexpr std::int64_t kColumns[] = {1,  2,  3,  7,  8,  9,  12, 15, 16, 17, 18, 24,
                                     31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 96, 129};
constexpr int kThreads[] = {1, 2, 3};

int rounds() {
  const char* text = std::getenv("QMLP_TEST_ROUNDS");
  const int parsed = text != nullptr ? std::atoi(text) : 0;
  return parsed > 0 ? parsed : 1;
}

struct Contract {
  DType type;
  Accumulation accumulation;
};
std::vector<Contract> contracts() {
  std::vector<Contract> all;
  for (const DType type : kTypes) {
    all.push_back({type, Accumulation::f32});
    if (type != DType::f32) all.push_back({type, Accumulation::tensor});
  }
  return all;
}

// Scales mostly of the activation's type, sometimes of another.
DType scale_type(DType activation, Random& random) {
  return random.below(3) != 0 ? activation : random.pick(kTypes);
}

std::int64_t draw_k(int group_a, int group_b, Random& random) {
  const int group = group_a > group_b ? group_a : group_b;  // powers of two: a multiple of both
  constexpr std::int64_t kMultiples[] = {1, 2, 3, 5, 9};
  std::int64_t K = group * random.pick(kMultiples);
  if (K < 512 && random.below(6) == 0) K += 512;
  return K;
}

int draw_segments(Accumulation accumulation, Random& random) {
  constexpr int kSegments[] = {0, 1, 1, 2, 4, 8};
  return accumulation == Accumulation::tensor ? random.pick(kSegments) : 0;
}

WeightKind draw_kind(Random& random) {
  return random.below(3) == 0 ? WeightKind::wild : WeightKind::quantized;
}

void check_linear(const Contract& contract, const QuantSpec& spec, std::int64_t M_max,
                  std::int64_t N, std::int64_t K, Random& random) {
  const GuardedWeight weight(random_weight(N, K, spec, draw_kind(random), random));
  const auto values = random_x(M_max, K, contract.type, random);
  const Matrix x = matrix_of(values, M_max, K, contract.type, K + random.below(3) * 5);
  LinearCase item;
  item.problem = {M_max,
                  N,
                  K,
                  spec,
                  contract.type,
                  contract.accumulation,
                  draw_segments(contract.accumulation, random)};
  const auto rules = rules_of(contract.type, contract.accumulation, item.problem.segments);
  const auto decoded = ref::decode(weight.view(), contract.type);
  const auto expected = ref::linear(values, decoded, M_max, N, K, rules);
  for (const KernelInfo& kernel :
       runnable_kernels("linear", contract.type, contract.accumulation)) {
    item.kernel = kernel.name;
    item.threads = random.pick(kThreads);
    Linear linear(item, weight.view());
    for (const std::int64_t M : {std::int64_t{1}, M_max, 1 + random.below(M_max)}) {
      expect_same(linear.checked(x, M), expected, M, N, describe(item, M));
    }
  }
}

void check_swiglu(const Contract& contract, const QuantSpec& gate_spec, const QuantSpec& up_spec,
                  Precision precision, std::int64_t M_max, std::int64_t N, std::int64_t K,
                  Random& random) {
  const GuardedWeight gate(random_weight(N, K, gate_spec, draw_kind(random), random));
  const GuardedWeight up(random_weight(N, K, up_spec, draw_kind(random), random));
  const auto values = random_x(M_max, K, contract.type, random);
  const Matrix x = matrix_of(values, M_max, K, contract.type, K + random.below(3) * 5);
  SwigluCase item;
  item.problem = {M_max,
                  K,
                  N,
                  gate_spec,
                  up_spec,
                  contract.type,
                  precision,
                  contract.accumulation,
                  draw_segments(contract.accumulation, random)};
  const auto rules =
      rules_of(contract.type, contract.accumulation, item.problem.segments, precision);
  const auto expected = ref::swiglu(values, ref::decode(gate.view(), contract.type),
                                    ref::decode(up.view(), contract.type), M_max, N, K, rules);
  for (const KernelInfo& kernel :
       runnable_kernels("swiglu", contract.type, contract.accumulation)) {
    item.kernel = kernel.name;
    item.threads = random.pick(kThreads);
    Swiglu swiglu(item, gate.view(), up.view());
    for (const std::int64_t M : {std::int64_t{1}, M_max, 1 + random.below(M_max)}) {
      Matrix tap(M, N, contract.type, N + 1, kOutputGuard);
      SwigluEpilogue epilogue;
      if (precision == Precision::match) epilogue.gate_tap = tap.out();
      expect_same(swiglu.checked(x, M, epilogue), expected.out, M, N, describe(item, M));
      if (precision != Precision::match) continue;
      expect_same(tap.values(), expected.gate, M, N, "gate tap of " + describe(item, M));
      EXPECT_TRUE(tap.untouched_outside(M, kOutputGuard)) << describe(item, M);
    }
  }
}

TEST(Sweep, LinearEveryFormat) {
  Random random(100);
  for (int round = 0; round < rounds(); ++round) {
    for (const Contract& contract : contracts()) {
      for (const int bits : kBits) {
        for (const int group : kGroups) {
          const QuantSpec spec{bits, group, scale_type(contract.type, random)};
          for (int draw = 0; draw < 4; ++draw) {
            check_linear(contract, spec, random.pick(kRows), random.pick(kColumns),
                         draw_k(group, 32, random), random);
          }
        }
      }
    }
  }
}

TEST(Sweep, SwigluEveryFormatMixed) {
  Random random(101);
  for (int round = 0; round < rounds(); ++round) {
    for (const Contract& contract : contracts()) {
      for (const int bits : kBits) {
        for (const int group : kGroups) {
          for (int draw = 0; draw < 3; ++draw) {
            const QuantSpec gate{bits, group, scale_type(contract.type, random)};
            QuantSpec up{random.pick(kBits), random.pick(kGroups),
                         scale_type(contract.type, random)};
            if (draw == 0) up = gate;
            const Precision precision = draw == 1 ? Precision::wide : Precision::match;
            check_swiglu(contract, gate, up, precision, random.pick(kRows), random.pick(kColumns),
                         draw_k(group, up.group_size, random), random);
          }
        }
      }
    }
  }
}

TEST(Sweep, DenseWeights) {
  Random random(102);
  for (const Contract& contract : contracts()) {
    for (const DType stored : kTypes) {
      const QuantSpec dense = QuantSpec::dense(stored);
      for (const std::int64_t K : {1, 2, 15, 16, 17, 31, 48, 63, 65, 255, 257, 300}) {
        // Dense K needs no group, so every residue of the tiles is a valid K.
        check_linear(contract, dense, random.pick(kRows), random.pick(kColumns), K, random);
      }
      const QuantSpec quantized{4, 32, contract.type};
      check_swiglu(contract, dense, quantized, Precision::match, 5, 17, 96, random);
      check_swiglu(contract, quantized, dense, Precision::wide, 5, 33, 64, random);
    }
  }
}

// Each N in turn and each M in turn, at one format, through every kernel.
TEST(Sweep, EveryColumnCount) {
  Random random(103);
  for (const Contract& contract : contracts()) {
    for (std::int64_t N = 1; N <= 33; ++N) {
      const QuantSpec spec{kBits[N % 6], kGroups[N % 2], contract.type};
      check_linear(contract, spec, 1 + N % 3, N, 64, random);
      const QuantSpec up{kBits[(N / 2) % 6], 32, contract.type};
      check_swiglu(contract, spec, up, Precision::match, 2, N, 64, random);
    }
  }
}

TEST(Sweep, EveryRowCount) {
  Random random(104);
  for (const Contract& contract : contracts()) {
    const std::int64_t M_max = 72;
    const std::int64_t N = 35;
    const std::int64_t K = 96;
    const QuantSpec spec{5, 32, contract.type};
    const GuardedWeight weight(random_weight(N, K, spec, WeightKind::wild, random));
    const auto values = random_x(M_max, K, contract.type, random);
    const Matrix x = matrix_of(values, M_max, K, contract.type);
    LinearCase item;
    item.problem = {M_max, N, K, spec, contract.type, contract.accumulation, 0};
    const auto expected = ref::linear(values, ref::decode(weight.view(), contract.type), M_max, N,
                                      K, rules_of(contract.type, contract.accumulation, 1));
    for (const KernelInfo& kernel :
         runnable_kernels("linear", contract.type, contract.accumulation)) {
      item.kernel = kernel.name;
      item.threads = 2;
      Linear linear(item, weight.view());
      for (std::int64_t M = 1; M <= M_max; ++M) {
        expect_same(linear.checked(x, M), expected, M, N, describe(item, M));
      }
    }
  }
}

// The same row at the end of calls of many sizes: its bits depend on nothing but the row.
TEST(Sweep, RowsDoNotDependOnTheCall) {
  Random random(105);
  constexpr std::int64_t kCalls[] = {1,  2,  3,  4,  5,  7,  8,  9,  13,  14,
                                     16, 17, 31, 32, 33, 63, 64, 65, 128, 257};
  for (const Contract& contract : contracts()) {
    const std::int64_t N = 33;
    const std::int64_t K = 160;
    const QuantSpec gate_spec{3, 32, contract.type};
    const QuantSpec up_spec{8, 32, contract.type};
    const GuardedWeight gate(random_weight(N, K, gate_spec, WeightKind::quantized, random));
    const GuardedWeight up(random_weight(N, K, up_spec, WeightKind::quantized, random));
    const auto values = random_x(258, K, contract.type, random);
    const std::vector<float> row(values.end() - K, values.end());
    SwigluCase item;
    item.problem = {
        257, K, N, gate_spec, up_spec, contract.type, Precision::match, contract.accumulation, 0};
    std::vector<float> first;
    for (const KernelInfo& kernel :
         runnable_kernels("swiglu", contract.type, contract.accumulation)) {
      item.kernel = kernel.name;
      item.threads = 2;
      Swiglu swiglu(item, gate.view(), up.view());
      for (const std::int64_t M : kCalls) {
        std::vector<float> rows(values.begin(), values.begin() + M * K);
        std::copy(row.begin(), row.end(), rows.end() - K);
        const auto got = swiglu.checked(matrix_of(rows, M, K, contract.type), M);
        ASSERT_EQ(got.size(), static_cast<std::size_t>(M * N));
        const std::vector<float> last(got.end() - N, got.end());
        if (first.empty()) first = last;
        expect_same(last, first, 1, N, describe(item, M));
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::test
