#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "../context.h"
#include "../format.h"
#include "base/aligned_buffer.h"
#include "base/float16.h"
#include "qmlp/exceptions.h"
#include "qmlp/ops.h"
#include "ref/ops.h"
#include "ref/oracle.h"
#include "ref/rounding.h"
#include "ref/weight.h"

namespace qmlp::cli {
namespace {

bool same_value(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

std::vector<std::byte> narrow(const std::vector<float>& values, DType type) {
  std::vector<std::byte> bytes(values.size() * size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_float(bytes.data(), type, static_cast<std::int64_t>(i), values[i]);
  }
  return bytes;
}
std::vector<float> widen(const std::vector<std::byte>& bytes, DType type) {
  std::vector<float> values(bytes.size() / size_of(type));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_float(bytes.data(), type, static_cast<std::int64_t>(i));
  }
  return values;
}

class VectorChecker {
 public:
  VectorChecker(const VectorOptions& options, ThreadPool& pool, VectorReport& report)
      : options_(options), pool_(pool), report_(report) {}

  void matmul(const MatmulCase& item);
  void swiglu(const SwigluCase& item);
  void table(const ActivationTable& table);

 private:
  struct Result {
    Plan plan;
    PackedWeightPtr weight;
    std::vector<float> y;
  };
  Workspace workspace(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_ = value_or_throw(AlignedBuffer::allocate(bytes));
    if (bytes != 0) std::memset(scratch_.data(), 0xFF, bytes);
    return {{scratch_.data(), bytes}};
  }
  std::pair<Accumulation, int> contract(Accumulation own, DType type) const {
    const Accumulation chosen = options_.accumulation.value_or(own);
    // f32 activations have the f32 contract alone.
    if (type == DType::f32) return {Accumulation::f32, 0};
    return {chosen, chosen == Accumulation::tensor ? std::max(options_.segments, 1) : 0};
  }
  void name_contract(std::pair<Accumulation, int> chosen) {
    report_.contract = to_string(chosen.first);
    if (chosen.first == Accumulation::tensor) {
      report_.contract += "/" + std::to_string(chosen.second);
    }
  }
  Result linear(const QuantizedTensor& weight, const std::vector<float>& x, std::int64_t M,
                DType type, std::pair<Accumulation, int> chosen) {
    const LinearProblem problem{M,    weight.N,     weight.K,     weight.spec,
                                type, chosen.first, chosen.second};
    Result result{value_or_throw(make_plan(problem, options_.facts)), nullptr, {}};
    result.weight = value_or_throw(pack(result.plan, weight.view(), cpu_stream(pool_)));
    const auto in = narrow(x, type);
    std::vector<std::byte> out(static_cast<std::size_t>(M * weight.N) * size_of(type));
    value_or_throw(quantized_linear(result.plan, *result.weight,
                                    {in.data(), M, weight.K, weight.K, type, {}},
                                    {out.data(), M, weight.N, weight.N, type, {}},
                                    workspace(result.plan.workspace_bytes(M)), cpu_stream(pool_)));
    result.y = widen(out, type);
    return result;
  }
  std::vector<float> fused(const SwigluCase& item, std::pair<Accumulation, int> chosen) {
    const std::int64_t N = item.gate_weight.N;
    const std::int64_t K = item.gate_weight.K;
    const SwigluProblem problem{item.M,
                                K,
                                N,
                                item.gate_weight.spec,
                                item.up_weight.spec,
                                item.type,
                                Precision::match,
                                chosen.first,
                                chosen.second};
    const Plan plan = value_or_throw(make_plan(problem, options_.facts));
    const PackedWeightPtr weight = value_or_throw(
        pack(plan, item.gate_weight.view(), item.up_weight.view(), cpu_stream(pool_)));
    const auto in = narrow(item.x, item.type);
    std::vector<std::byte> out(static_cast<std::size_t>(item.M * N) * size_of(item.type));
    value_or_throw(fused_swiglu(plan, *weight, {in.data(), item.M, K, K, item.type, {}},
                                {out.data(), item.M, N, N, item.type, {}},
                                workspace(plan.workspace_bytes(item.M)), cpu_stream(pool_)));
    return widen(out, item.type);
  }

  void exact(float got, float want, const std::string& what, std::int64_t index) {
    ++report_.exact.compared;
    if (same_value(got, want)) return;
    report_.exact.miss(format("%s element %lld is %.9g, must be %.9g", what.c_str(),
                              static_cast<long long>(index), static_cast<double>(got),
                              static_cast<double>(want)));
  }
  void bounded(float got, const ref::Bounded& want, DType type, const std::string& what,
               std::int64_t index) {
    ++report_.bounded.compared;
    const double error = ref::error_in_bounds(got, want, type);
    report_.bounded.worst = std::max(report_.bounded.worst, error);
    if (error <= 1.0) return;
    report_.bounded.miss(format("%s element %lld is %.9g, must be %.9g within %.3g", what.c_str(),
                                static_cast<long long>(index), static_cast<double>(got), want.value,
                                want.bound));
  }

  const VectorOptions& options_;
  ThreadPool& pool_;
  VectorReport& report_;
  AlignedBuffer scratch_;
};

void VectorChecker::matmul(const MatmulCase& item) {
  const std::int64_t N = item.weight.N;
  const std::int64_t K = item.weight.K;
  const auto chosen = contract(Accumulation::tensor, item.type);
  name_contract(chosen);
  const Result ours = linear(item.weight, item.x, item.M, item.type, chosen);
  const std::vector<float> w = ref::decode(item.weight.view(), item.type);
  if (!item.dequantized.empty()) {
    std::vector<std::byte> row(static_cast<std::size_t>(K) * size_of(item.type));
    for (std::int64_t n = 0; n < N; ++n) {
      value_or_throw(decode_row(*ours.weight, n, {row.data(), 1, K, K, item.type, {}}));
      for (std::int64_t k = 0; k < K; ++k) {
        exact(load_float(row.data(), item.type, k),
              item.dequantized[static_cast<std::size_t>(n * K + k)], item.name + ".dequantized",
              n * K + k);
      }
    }
  }
  // MLX's matrix kernel is tensor/1, from 8 rows on; f32 activations are summed as `f32` there.
  const bool same_contract =
      item.M >= 8 &&
      (item.type == DType::f32 || (chosen.first == Accumulation::tensor && chosen.second == 1));
  for (std::int64_t m = 0; m < item.M; ++m) {
    for (std::int64_t n = 0; n < N; ++n) {
      const auto at = static_cast<std::size_t>(m * N + n);
      const auto index = static_cast<std::int64_t>(at);
      if (same_contract) {
        exact(ours.y[at], item.y[at], item.name + ".y", index);
        continue;
      }
      const float* x_row = item.x.data() + m * K;
      const float* w_row = w.data() + n * K;
      bounded(ours.y[at], ref::linear_oracle(x_row, w_row, K, item.type), item.type,
              "our " + item.name, index);
      const ref::Bounded theirs =
          item.M >= 8
              ? ref::linear_oracle(x_row, w_row, K, item.type)
              : ref::mlx_cuda_small_m_oracle(x_row, w_row, K, item.type, item.weight.spec.bits);
      bounded(item.y[at], theirs, item.type, item.name + ".y", index);
    }
  }
}

void VectorChecker::swiglu(const SwigluCase& item) {
  const std::int64_t N = item.gate_weight.N;
  const std::int64_t K = item.gate_weight.K;
  const auto chosen = contract(Accumulation::f32, item.type);
  name_contract(chosen);
  const std::vector<float> gate = linear(item.gate_weight, item.x, item.M, item.type, chosen).y;
  const std::vector<float> up = linear(item.up_weight, item.x, item.M, item.type, chosen).y;
  const std::vector<float> hidden = fused(item, chosen);
  const std::vector<double> gate_w = ref::decode_f64(item.gate_weight.view(), 0, N);
  const std::vector<double> up_w = ref::decode_f64(item.up_weight.view(), 0, N);
  for (std::int64_t m = 0; m < item.M; ++m) {
    for (std::int64_t n = 0; n < N; ++n) {
      const auto at = static_cast<std::size_t>(m * N + n);
      const auto index = static_cast<std::int64_t>(at);
      const float* x_row = item.x.data() + m * K;
      if (std::isfinite(item.ref_gate[at]) && std::isfinite(item.ref_up[at])) {
        ref::Bounded g =
            ref::linear_oracle_exact_weights(x_row, gate_w.data() + n * K, K, item.type);
        ref::Bounded u = ref::linear_oracle_exact_weights(x_row, up_w.data() + n * K, K, item.type);
        g.value = item.ref_gate[at];
        u.value = item.ref_up[at];
        ref::Bounded h = ref::swiglu_oracle(g, u, item.type, Precision::match);
        h.value = item.ref_hidden[at];
        bounded(gate[at], g, item.type, "gate", index);
        bounded(up[at], u, item.type, "up", index);
        bounded(hidden[at], h, item.type, "hidden", index);
      } else {
        // NaN or infinite by the formula used: what counts is that the row is not finite.
        ++report_.bounded.compared;
        if (std::isfinite(gate[at]) || std::isfinite(up[at])) {
          report_.bounded.miss(
              format("element %lld is finite in a row that is not", static_cast<long long>(index)));
        }
      }
      if (item.kind == "nonfinite" && m == 1) {
        exact(hidden[at], std::nanf(""), "hidden of the NaN row", index);
      }
      // MLX's element-wise ops on its own gate and up, with its CPU's sigmoid.
      exact(ref::match_epilogue(item.gate[at], item.up[at], item.type, ref::SigmoidKind::mlx_cpu),
            item.hidden[at], "hidden of MLX's gate and up", index);
      if (item.gate_rounded.empty()) continue;
      exact(ref::match_epilogue(item.gate_rounded[at], item.up_rounded[at], item.type,
                                ref::SigmoidKind::mlx_cpu),
            item.hidden_rounded[at], "hidden of MLX's rounded gate and up", index);
    }
  }
}

void VectorChecker::table(const ActivationTable& table) {
  report_.contract = "match";
  const auto& sigmoid = ref::sigmoid_table(table.type, ref::SigmoidKind::mlx_cuda);
  std::vector<float> ours(65536);
  if (table.name.starts_with("silu")) {
    // The library's own op, whose table this is: silu(x) * 1.
    std::vector<float> x(65536);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      x[i] = ref::from_bits16(static_cast<std::uint16_t>(i), table.type);
    }
    const auto in = narrow(x, table.type);
    const auto ones = narrow(std::vector<float>(65536, 1.0f), table.type);
    std::vector<std::byte> out(in.size());
    value_or_throw(swiglu_activation({in.data(), 1, 65536, 65536, table.type, {}},
                                     {ones.data(), 1, 65536, 65536, table.type, {}},
                                     {out.data(), 1, 65536, 65536, table.type, {}},
                                     cpu_stream(pool_)));
    ours = widen(out, table.type);
  } else {
    for (std::uint32_t i = 0; i < 65536; ++i) {
      ours[i] = ref::from_bits16(sigmoid[i], table.type);
    }
  }
  for (std::uint32_t i = 0; i < 65536; ++i) {
    exact(ours[i], ref::from_bits16(table.entries[i], table.type), table.name,
          static_cast<std::int64_t>(i));
  }
}

}  // namespace

VectorReport check_vectors(const std::string& path, const VectorOptions& options,
                           ThreadPool& pool) {
  const GoldenFile golden = value_or_throw(read_golden_file(path));
  VectorReport report;
  report.file = path;
  report.made_with = golden.made_with;
  report.exact.name = "exact";
  report.bounded.name = "bounded";
  VectorChecker checker(options, pool, report);
  switch (golden.layout) {
    case GoldenLayout::matmul:
      report.layout = "quantized_matmul";
      break;
    case GoldenLayout::swiglu:
      report.layout = "swiglu";
      break;
    case GoldenLayout::activation_tables:
      report.layout = "activation_tables";
      break;
  }
  for (const MatmulCase& item : golden.matmuls) {
    check_stop();
    ++report.problems;
    checker.matmul(item);
  }
  for (const SwigluCase& item : golden.swiglus) {
    check_stop();
    ++report.problems;
    checker.swiglu(item);
  }
  for (const ActivationTable& table : golden.tables) {
    ++report.problems;
    checker.table(table);
  }
  return report;
}

}  // namespace qmlp::cli
