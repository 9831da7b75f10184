// The reference against results of MLX itself (tests/data/README.md). QMLP_GOLDENS names a folder
// of the same layout to check instead, such as the whole set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/verify/golden_file.h"
#include "io/files.h"
#include "ref/activation.h"
#include "ref/dot.h"
#include "ref/ops.h"
#include "ref/oracle.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp {
namespace {

std::vector<GoldenFile> golden_files(const std::string& folder) {
  const char* chosen = std::getenv("QMLP_GOLDENS");
  const std::string path = join_path(chosen != nullptr ? chosen : QMLP_TEST_DATA, folder);
  std::vector<GoldenFile> files;
  const auto names = list_directory(path);
  EXPECT_TRUE(names) << path;
  if (!names) return files;
  for (const std::string& name : *names) {
    if (!name.ends_with(".safetensors")) continue;
    auto file = read_golden_file(join_path(path, name));
    EXPECT_TRUE(file) << file.error().message;
    if (file) files.push_back(*std::move(file));
  }
  return files;
}

bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

TEST(Golden, ActivationTables) {
  int tables = 0;
  for (const GoldenFile& file : golden_files("mlx-cuda")) {
    for (const ActivationTable& table : file.tables) {
      ++tables;
      const auto& sigmoid = ref::sigmoid_table(table.type, ref::SigmoidKind::mlx_cuda);
      const bool silu = table.name.starts_with("silu");
      for (std::uint32_t i = 0; i < 65536; ++i) {
        const std::uint16_t expected = table.entries[i];
        if (!silu) {
          ASSERT_EQ(sigmoid[i], expected) << table.name << " " << i;
          continue;
        }
        const float x = ref::from_bits16(static_cast<std::uint16_t>(i), table.type);
        const float p = ref::from_bits16(sigmoid[i], table.type);
        const float got = ref::round_to_type(x * p, table.type);
        const float want = ref::from_bits16(expected, table.type);
        ASSERT_TRUE(same(got, want)) << table.name << " " << i;
      }
    }
  }
  EXPECT_EQ(tables, 4);
}

// M >= 8 is MLX's matrix kernel: tensor/1 to the bit. Below, its mat-vec sums in the activation
// type.
TEST(Golden, CudaQuantizedMatmul) {
  std::int64_t outputs = 0;
  std::int64_t weights = 0;
  double worst_small_m = 0.0;
  for (const GoldenFile& file : golden_files("mlx-cuda")) {
    for (const MatmulCase& item : file.matmuls) {
      const std::int64_t N = item.weight.N;
      const std::int64_t K = item.weight.K;
      const std::vector<float> w = ref::decode(item.weight.view(), item.type);
      for (std::size_t i = 0; i < item.dequantized.size(); ++i) {
        ASSERT_TRUE(same(w[i], item.dequantized[i])) << item.name << " weight " << i;
        ++weights;
      }
      for (std::int64_t m = 0; m < item.M; ++m) {
        for (std::int64_t n = 0; n < N; ++n) {
          const float* x_row = item.x.data() + m * K;
          const float* w_row = w.data() + n * K;
          const float expected = item.y[static_cast<std::size_t>(m * N + n)];
          if (item.M >= 8) {
            const float acc = ref::dot_tensor(x_row, w_row, K, 1, item.type);
            ASSERT_TRUE(same(ref::round_to_type(acc, item.type), expected))
                << item.name << " m " << m << " n " << n;
            ++outputs;
            continue;
          }
          const auto bound =
              ref::mlx_cuda_small_m_oracle(x_row, w_row, K, item.type, item.weight.spec.bits);
          const double error = ref::error_in_bounds(expected, bound, item.type);
          ASSERT_LE(error, 1.0) << item.name << " m " << m << " n " << n;
          worst_small_m = std::max(worst_small_m, error);
        }
      }
    }
  }
  EXPECT_GT(outputs, 5000);
  EXPECT_GT(weights, 30000);
  EXPECT_GT(worst_small_m, 0.0);
}

// Float64 references on exact weights, and MLX's own element-wise ops on its own gate and up.
TEST(Golden, CpuSwiglu) {
  int cases = 0;
  for (const GoldenFile& file : golden_files("mlx-cpu")) {
    for (const SwigluCase& item : file.swiglus) {
      ++cases;
      const std::int64_t N = item.gate_weight.N;
      const std::int64_t K = item.gate_weight.K;
      const ref::Rules rules{item.type, {}, Precision::match, ref::SigmoidKind::mlx_cuda};
      const auto gate_w = ref::decode(item.gate_weight.view(), item.type);
      const auto up_w = ref::decode(item.up_weight.view(), item.type);
      const auto gate_exact = ref::decode_f64(item.gate_weight.view(), 0, N);
      const auto up_exact = ref::decode_f64(item.up_weight.view(), 0, N);
      const auto result = ref::swiglu(item.x, gate_w, up_w, item.M, N, K, rules);
      const auto up = ref::linear(item.x, up_w, item.M, N, K, rules);
      for (std::int64_t m = 0; m < item.M; ++m) {
        for (std::int64_t n = 0; n < N; ++n) {
          const auto at = static_cast<std::size_t>(m * N + n);
          const float* x_row = item.x.data() + m * K;
          auto gate_bound =
              ref::linear_oracle_exact_weights(x_row, gate_exact.data() + n * K, K, item.type);
          auto up_bound =
              ref::linear_oracle_exact_weights(x_row, up_exact.data() + n * K, K, item.type);
          SCOPED_TRACE(item.name + " m " + std::to_string(m) + " n " + std::to_string(n));
          if (std::isfinite(item.ref_gate[at]) && std::isfinite(item.ref_up[at])) {
            // The generator summed its references on its own: only the last bits may differ.
            ASSERT_LE(std::fabs(gate_bound.value - item.ref_gate[at]), gate_bound.bound * 1e-3);
            gate_bound.value = item.ref_gate[at];
            up_bound.value = item.ref_up[at];
            ASSERT_LE(ref::error_in_bounds(result.gate[at], gate_bound, item.type), 1.0);
            ASSERT_LE(ref::error_in_bounds(up[at], up_bound, item.type), 1.0);
            auto hidden = ref::swiglu_oracle(gate_bound, up_bound, item.type, Precision::match);
            hidden.value = item.ref_hidden[at];
            ASSERT_LE(ref::error_in_bounds(result.out[at], hidden, item.type), 1.0)
                << result.out[at] << " for " << item.ref_hidden[at];
          } else {
            ASSERT_FALSE(std::isfinite(result.gate[at]));
            ASSERT_FALSE(std::isfinite(up[at]));
          }
          if (item.kind == "nonfinite" && m == 1) {
            ASSERT_TRUE(std::isnan(result.out[at]));
          }
          const float own =
              ref::match_epilogue(item.gate[at], item.up[at], item.type, ref::SigmoidKind::mlx_cpu);
          ASSERT_TRUE(same(own, item.hidden[at])) << own << " for " << item.hidden[at];
          if (item.gate_rounded.empty()) continue;
          const float rounded = ref::match_epilogue(item.gate_rounded[at], item.up_rounded[at],
                                                    item.type, ref::SigmoidKind::mlx_cpu);
          ASSERT_TRUE(same(rounded, item.hidden_rounded[at])) << rounded;
        }
      }
    }
  }
  EXPECT_GE(cases, 40);
}

}  // namespace
}  // namespace qmlp
