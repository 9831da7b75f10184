// What follows the dot product, and that ops which are one call equal the calls they stand for.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "kernels/fixture.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

constexpr DType kTypes[] = {DType::bf16, DType::f16, DType::f32};
// Every kernel pair of this machine: a linear one and the SwiGLU one of the same tile.
struct Setting {
  DType type;
  Accumulation accumulation;
  std::string linear, swiglu;
};
std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const DType type : kTypes) {
    for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
      for (const KernelInfo& kernel : runnable_kernels("linear", type, accumulation)) {
        const std::string name(kernel.name);
        const std::string pair = "swiglu" + name.substr(name.find('_'));
        for (const KernelInfo& other : runnable_kernels("swiglu", type, accumulation)) {
          if (other.name == pair) all.push_back({type, accumulation, name, pair});
        }
      }
    }
  }
  EXPECT_GE(all.size(), 5u);
  return all;
}

std::vector<float> random_vector(std::int64_t n, DType type, Random& random) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& v : values) v = ref::round_to_type(static_cast<float>(random.normal()), type);
  return values;
}

const std::byte* bytes_of(const Matrix& matrix) { return matrix.view().data; }

TEST(Ops, LinearBiasAndResidual) {
  Random random(200);
  const std::int64_t M = 14;
  const std::int64_t N = 41;
  const std::int64_t K = 96;
  for (const Setting& s : settings()) {
    const QuantSpec spec{4, 32, s.type};
    const GuardedWeight weight(random_weight(N, K, spec, WeightKind::quantized, random));
    const auto values = random_x(M, K, s.type, random);
    const auto bias = random_vector(N, s.type, random);
    const auto added = random_vector(M * N, s.type, random);
    const Matrix x = matrix_of(values, M, K, s.type);
    const Matrix bias_row = matrix_of(bias, 1, N, s.type);
    const Matrix residual = matrix_of(added, M, N, s.type, N + 2);
    const auto w = ref::decode(weight.view(), s.type);
    const auto rules = rules_of(s.type, s.accumulation, 1);
    const LinearCase item{{M, N, K, spec, s.type, s.accumulation, 0}, s.linear, 2};
    Linear linear(item, weight.view());
    for (const bool with_bias : {false, true}) {
      for (const bool with_residual : {false, true}) {
        LinearEpilogue epilogue;
        if (with_bias) epilogue.linear_bias = bytes_of(bias_row);
        if (with_residual) epilogue.residual = residual.view();
        const auto expected =
            ref::linear(values, w, M, N, K, rules, with_bias ? bias.data() : nullptr,
                        with_residual ? added.data() : nullptr);
        expect_same(linear.checked(x, M, epilogue), expected, M, N, describe(item, M));
        if (with_residual) epilogue.residual = residual.view(1);
        expect_same(linear.checked(x, 1, epilogue), expected, 1, N, describe(item, 1));
        if (!with_residual) continue;
        // In place: the residual is the output's own memory.
        Matrix out = matrix_of(added, M, N, s.type, N + 5);
        epilogue.residual = out.view();
        ASSERT_TRUE(linear.run(x.view(), out.out(), epilogue));
        expect_same(out.values(), expected, M, N, "in place, " + describe(item, M));
      }
    }
  }
}

TEST(Ops, SwigluBiases) {
  Random random(201);
  const std::int64_t M = 13;
  const std::int64_t N = 35;
  const std::int64_t K = 64;
  for (const Setting& s : settings()) {
    const QuantSpec gate_spec{6, 64, s.type};
    const QuantSpec up_spec{3, 32, s.type};
    const GuardedWeight gate(random_weight(N, K, gate_spec, WeightKind::quantized, random));
    const GuardedWeight up(random_weight(N, K, up_spec, WeightKind::quantized, random));
    const auto values = random_x(M, K, s.type, random);
    const auto gate_bias = random_vector(N, s.type, random);
    const auto up_bias = random_vector(N, s.type, random);
    const Matrix x = matrix_of(values, M, K, s.type);
    const Matrix gate_row = matrix_of(gate_bias, 1, N, s.type);
    const Matrix up_row = matrix_of(up_bias, 1, N, s.type);
    const auto g = ref::decode(gate.view(), s.type);
    const auto u = ref::decode(up.view(), s.type);
    for (const Precision precision : {Precision::match, Precision::wide}) {
      const SwigluCase item{
          {M, K, N, gate_spec, up_spec, s.type, precision, s.accumulation, 0}, s.swiglu, 2};
      Swiglu swiglu(item, gate.view(), up.view());
      for (int which = 1; which < 4; ++which) {
        SwigluEpilogue epilogue;
        if ((which & 1) != 0) epilogue.gate_bias = bytes_of(gate_row);
        if ((which & 2) != 0) epilogue.up_bias = bytes_of(up_row);
        const auto expected =
            ref::swiglu(values, g, u, M, N, K, rules_of(s.type, s.accumulation, 1, precision),
                        (which & 1) != 0 ? gate_bias.data() : nullptr,
                        (which & 2) != 0 ? up_bias.data() : nullptr);
        for (const std::int64_t rows : {std::int64_t{1}, M}) {
          expect_same(swiglu.checked(x, rows, epilogue), expected.out, rows, N,
                      describe(item, rows));
        }
      }
    }
  }
}

TEST(Ops, FusedEqualsUnfused) {
  Random random(202);
  const std::int64_t M_max = 29;
  const std::int64_t N = 50;
  const std::int64_t K = 128;
  for (const Setting& s : settings()) {
    const QuantSpec gate_spec{4, 64, s.type};
    const QuantSpec up_spec{5, 128, DType::f16};
    const GuardedWeight gate(random_weight(N, K, gate_spec, WeightKind::wild, random));
    const GuardedWeight up(random_weight(N, K, up_spec, WeightKind::quantized, random));
    const Matrix x = matrix_of(random_x(M_max, K, s.type, random), M_max, K, s.type);
    const SwigluCase fused_item{
        {M_max, K, N, gate_spec, up_spec, s.type, Precision::match, s.accumulation, 0},
        s.swiglu,
        2};
    Swiglu fused(fused_item, gate.view(), up.view());
    const LinearCase gate_item{{M_max, N, K, gate_spec, s.type, s.accumulation, 0}, s.linear, 1};
    const LinearCase up_item{{M_max, N, K, up_spec, s.type, s.accumulation, 0}, s.linear, 3};
    Linear gate_linear(gate_item, gate.view());
    Linear up_linear(up_item, up.view());
    for (const std::int64_t M : {1, 2, 7, 13, 29}) {
      Matrix g(M, N, s.type, N + 1);
      Matrix u(M, N, s.type, N + 2);
      Matrix h(M, N, s.type);
      ASSERT_TRUE(gate_linear.run(x.view(M), g.out()));
      ASSERT_TRUE(up_linear.run(x.view(M), u.out()));
      ASSERT_TRUE(swiglu_activation(g.view(), u.view(), h.out(), cpu_stream(pool(2))));
      const auto got = fused.checked(x, M);
      expect_same(got, h.values(), M, N, describe(fused_item, M));
      // In place on either input.
      ASSERT_TRUE(swiglu_activation(g.view(), u.view(), u.out(), cpu_stream(pool(1))));
      expect_same(u.values(), got, M, N, "activation in place");

      // The halves of the packed pair are weights of their own.
      for (int index = 0; index < 2; ++index) {
        const auto half = part(fused.weight_ptr(), index);
        ASSERT_TRUE(half) << half.error().message;
        Linear& whole = index == 0 ? gate_linear : up_linear;
        Matrix from_half(M, N, s.type);
        Matrix from_whole(M, N, s.type);
        std::vector<std::byte> scratch(whole.plan().workspace_bytes(M) + 256);
        void* aligned = scratch.data();
        std::size_t space = scratch.size();
        std::align(256, space - 256, aligned, space);
        const Workspace workspace{{static_cast<std::byte*>(aligned), space}};
        const int threads = index == 0 ? 1 : 3;
        ASSERT_TRUE(quantized_linear(whole.plan(), **half, x.view(M), from_half.out(), workspace,
                                     cpu_stream(pool(threads))));
        ASSERT_TRUE(whole.run(x.view(M), from_whole.out()));
        expect_same(from_half.values(), from_whole.values(), M, N, "part");
      }
    }
    EXPECT_FALSE(part(fused.weight_ptr(), 2));
    EXPECT_FALSE(part(fused.weight_ptr(), -1));
    EXPECT_FALSE(part(nullptr, 0));
  }
}

TEST(Ops, FusedMlpEqualsSeparateCalls) {
  Random random(203);
  const std::int64_t M_max = 17;
  const std::int64_t hidden = 96;
  const std::int64_t intermediate = 160;
  for (const Setting& s : settings()) {
    const QuantSpec gate_spec{4, 32, s.type};
    const QuantSpec up_spec{8, 32, s.type};
    const QuantSpec down_spec{6, 32, s.type};
    const auto gate = random_weight(intermediate, hidden, gate_spec, WeightKind::quantized, random);
    const auto up = random_weight(intermediate, hidden, up_spec, WeightKind::quantized, random);
    const auto down = random_weight(hidden, intermediate, down_spec, WeightKind::quantized, random);
    const SwigluCase swiglu_item{{M_max, hidden, intermediate, gate_spec, up_spec, s.type,
                                  Precision::match, s.accumulation, 0},
                                 s.swiglu,
                                 2};
    const LinearCase down_item{
        {M_max, hidden, intermediate, down_spec, s.type, s.accumulation, 0}, s.linear, 2};
    Swiglu swiglu(swiglu_item, gate.view(), up.view());
    Linear linear(down_item, down.view());
    const Matrix x = matrix_of(random_x(M_max, hidden, s.type, random), M_max, hidden, s.type);
    const Matrix bias = matrix_of(random_vector(hidden, s.type, random), 1, hidden, s.type);
    for (const std::int64_t M : {0, 1, 6, 17}) {
      LinearEpilogue epilogue;
      epilogue.linear_bias = bytes_of(bias);
      epilogue.residual = x.view(M);
      Matrix h(M, intermediate, s.type);
      Matrix separate(M, hidden, s.type);
      ASSERT_TRUE(swiglu.run(x.view(M), h.out()));
      ASSERT_TRUE(linear.run(h.view(), separate.out(), epilogue));
      Matrix together(M, hidden, s.type, hidden + 7, kOutputGuard);
      Guarded scratch(mlp_workspace_bytes(swiglu.plan(), linear.plan(), M), kOutputGuard);
      if (scratch.size() != 0) std::memset(scratch.data(), 0xFF, scratch.size());
      const Workspace workspace{{scratch.data(), scratch.size()}};
      const Status status =
          fused_mlp(swiglu.plan(), swiglu.weight(), linear.plan(), linear.weight(), x.view(M),
                    together.out(), workspace, cpu_stream(pool(2)), {}, epilogue);
      ASSERT_TRUE(status) << status.error().message;
      EXPECT_TRUE(scratch.intact());
      EXPECT_TRUE(together.untouched_outside(M, kOutputGuard));
      expect_same(together.values(), separate.values(), M, hidden, describe(swiglu_item, M));
    }
  }
}

// A column slice of a wider matrix, and rows that start one element past any alignment.
TEST(Ops, RowsAnyDistanceApart) {
  Random random(204);
  const std::int64_t K = 128;
  const std::int64_t N = 19;
  for (const Setting& s : settings()) {
    const QuantSpec spec{2, 64, s.type};
    const auto weight = random_weight(N, K, spec, WeightKind::quantized, random);
    const LinearCase item{{40, N, K, spec, s.type, s.accumulation, 0}, s.linear, 2};
    Linear linear(item, weight.view());
    for (const std::int64_t M : {1, 8, 40}) {
      const auto wide = random_x(M, 3 * K, s.type, random);
      const Matrix big = matrix_of(wide, M, 3 * K, s.type);
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, K + 3}) {
        std::vector<float> copied;
        for (std::int64_t m = 0; m < M; ++m) {
          const float* row = wide.data() + m * 3 * K + first;
          copied.insert(copied.end(), row, row + K);
        }
        MatrixView slice = big.view();
        slice.data += static_cast<std::size_t>(first) * size_of(s.type);
        slice.cols = K;
        Matrix out(M, N, s.type);
        ASSERT_TRUE(linear.run(slice, out.out()));
        expect_same(out.values(), linear.checked(matrix_of(copied, M, K, s.type), M), M, N,
                    describe(item, M));
      }
    }
  }
}

// Weights that the file leaves at any byte: packing needs no alignment.
TEST(Ops, WeightsAtOddAddresses) {
  Random random(205);
  const QuantSpec spec{3, 32, DType::f16};
  const auto weight = random_weight(20, 96, spec, WeightKind::quantized, random);
  const Matrix x = matrix_of(random_x(3, 96, DType::f16, random), 3, 96, DType::f16);
  const LinearCase item{{3, 20, 96, spec, DType::f16, Accumulation::f32, 0}, "", 2};
  Linear plain(item, weight.view());
  const auto expected = plain.checked(x, 3);
  std::vector<std::vector<std::byte>> moved;
  for (const auto* source : {&weight.codes, &weight.scales, &weight.biases}) {
    moved.emplace_back(source->size() + 1);
    std::memcpy(moved.back().data() + 1, source->data(), source->size());
  }
  const auto tail = [&moved](std::size_t i) {
    return std::span<const std::byte>(moved[i]).subspan(1);
  };
  Linear odd(item, {tail(0), tail(1), tail(2), 20, 96, spec});
  expect_same(odd.checked(x, 3), expected, 3, 20, "odd addresses");
}

TEST(Ops, NoRows) {
  Random random(206);
  for (const Setting& s : settings()) {
    const QuantSpec spec{4, 32, s.type};
    const auto weight = random_weight(9, 32, spec, WeightKind::quantized, random);
    const LinearCase item{{4, 9, 32, spec, s.type, s.accumulation, 0}, s.linear, 2};
    Linear linear(item, weight.view());
    EXPECT_TRUE(linear.run({nullptr, 0, 32, 32, s.type, {}}, {nullptr, 0, 9, 9, s.type, {}}));
    const SwigluCase fused{
        {4, 32, 9, spec, spec, s.type, Precision::match, s.accumulation, 0}, s.swiglu, 2};
    Swiglu swiglu(fused, weight.view(), weight.view());
    EXPECT_TRUE(swiglu.run({nullptr, 0, 32, 32, s.type, {}}, {nullptr, 0, 9, 9, s.type, {}}));
    EXPECT_TRUE(swiglu_activation({nullptr, 0, 9, 9, s.type, {}}, {nullptr, 0, 9, 9, s.type, {}},
                                  {nullptr, 0, 9, 9, s.type, {}}, cpu_stream(pool(1))));
  }
}

// The library's own choice runs the same bits as any forced kernel, and is counted.
TEST(Ops, ChosenKernelIsCountedAndAgrees) {
  Random random(207);
  const QuantSpec spec{4, 64, DType::bf16};
  const auto weight = random_weight(70, 192, spec, WeightKind::quantized, random);
  const Matrix x = matrix_of(random_x(20, 192, DType::bf16, random), 20, 192, DType::bf16);
  LinearCase item{{20, 70, 192, spec, DType::bf16, {}, 0}, "", 2};
  Linear chosen(item, weight.view());
  item.kernel = kernel_of("linear", DType::bf16, Accumulation::f32, Isa::portable);
  Linear portable(item, weight.view());
  for (const std::int64_t M : {1, 2, 20}) {
    reset_dispatch_counts();
    const auto got = chosen.checked(x, M);
    const auto counts = dispatch_counts();
    ASSERT_EQ(counts.size(), 1u);
    EXPECT_EQ(counts[0].kernel, chosen.plan().kernel_name(M));
    EXPECT_EQ(counts[0].calls, 2u);
    expect_same(got, portable.checked(x, M), M, 70, describe(item, M));
  }
}

// Many calls at once from several threads on one pool, plan and weight.
TEST(Ops, ConcurrentCallsAgree) {
  Random random(208);
  const QuantSpec spec{4, 64, DType::f16};
  const auto weight = random_weight(65, 128, spec, WeightKind::quantized, random);
  const Matrix x = matrix_of(random_x(9, 128, DType::f16, random), 9, 128, DType::f16);
  const LinearCase item{{9, 65, 128, spec, DType::f16, {}, 0}, "", 2};
  Linear linear(item, weight.view());
  const auto expected = linear.checked(x, 9);
  std::vector<std::vector<float>> results(4);
  std::vector<std::thread> callers;
  for (auto& result : results) {
    callers.emplace_back([&linear, &x, &result] {
      for (int i = 0; i < 50; ++i) {
        Matrix out(9, 65, DType::f16);
        if (!linear.run(x.view(), out.out())) return;
        const auto values = out.values();
        if (i > 0 && values != result) {
          result.clear();
          return;
        }
        result = values;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& result : results) expect_same(result, expected, 9, 65, "concurrent");
}

}  // namespace
}  // namespace qmlp::test
