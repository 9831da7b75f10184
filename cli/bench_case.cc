#include "bench_case.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>

#include "base/aligned_buffer.h"
#include "base/float16.h"
#include "context.h"
#include "format.h"
#include "progress.h"
#include "qmlp/ops.h"
#include "qmlp/quant.h"

namespace qmlp::cli {
namespace {

using Clock = std::chrono::steady_clock;

// SplitMix64: fixed seeds give the same weights everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }  // [0, 1)

 private:
  std::uint64_t state_;
};

// Random weights of the format: every code occurs, decoded values have a spread of about 1/sqrt(K).
QuantizedTensor random_weight(std::int64_t N, std::int64_t K, const QuantSpec& spec,
                              std::uint64_t seed) {
  const QuantSizes sizes = value_or_throw(quant_sizes(N, K, spec));
  QuantizedTensor weight;
  weight.N = N;
  weight.K = K;
  weight.spec = spec;
  weight.codes.resize(sizes.codes_bytes);
  weight.scales.resize(sizes.scales_bytes);
  weight.biases.resize(sizes.scales_bytes);
  Random random(seed);
  const float spread = 1.0f / std::sqrt(static_cast<float>(K));
  if (spec.is_dense()) {
    const std::int64_t count = N * K;
    for (std::int64_t i = 0; i < count; ++i) {
      store_float(weight.codes.data(), spec.scale_dtype, i,
                  (random.uniform() - 0.5f) * 3.5f * spread);
    }
    return weight;
  }
  for (std::size_t i = 0; i < weight.codes.size(); i += 4) {
    const auto word = static_cast<std::uint32_t>(random.next());
    std::memcpy(weight.codes.data() + i, &word, 4);
  }
  const float step = 3.5f * spread / static_cast<float>(1 << spec.bits);
  const auto groups = static_cast<std::int64_t>(sizes.scales_bytes / size_of(spec.scale_dtype));
  for (std::int64_t i = 0; i < groups; ++i) {
    const float scale = step * (0.5f + random.uniform());
    store_float(weight.scales.data(), spec.scale_dtype, i, scale);
    store_float(weight.biases.data(), spec.scale_dtype, i,
                -scale * static_cast<float>(1 << (spec.bits - 1)));
  }
  return weight;
}

double format_bytes(const BenchShape& shape) {
  double bytes = 0.0;
  for (const QuantSpec& spec : {shape.gate, shape.up}) {
    const QuantSizes sizes = value_or_throw(quant_sizes(shape.intermediate, shape.hidden, spec));
    bytes += static_cast<double>(sizes.codes_bytes + 2 * sizes.scales_bytes);
  }
  return bytes;
}

SwigluProblem swiglu_problem(const BenchShape& shape, const BenchSettings& settings,
                             std::int64_t M_max) {
  SwigluProblem problem;
  problem.M_max = M_max;
  problem.hidden = shape.hidden;
  problem.intermediate = shape.intermediate;
  problem.gate = shape.gate;
  problem.up = shape.up;
  problem.activation = settings.activation;
  problem.precision = settings.precision;
  problem.accumulation = settings.accumulation;
  problem.segments = settings.segments;
  return problem;
}

LinearProblem linear_problem(const BenchShape& shape, const QuantSpec& spec,
                             const BenchSettings& settings, std::int64_t M_max) {
  LinearProblem problem;
  problem.M_max = M_max;
  problem.N = shape.intermediate;
  problem.K = shape.hidden;
  problem.weight = spec;
  problem.activation = settings.activation;
  problem.accumulation = settings.accumulation;
  problem.segments = settings.segments;
  return problem;
}

// A matrix that owns its elements.
struct OwnedMatrix {
  AlignedBuffer buffer;
  MutableMatrixView view;
  OwnedMatrix(std::int64_t rows, std::int64_t cols, DType dtype)
      : buffer(value_or_throw(
            AlignedBuffer::allocate(static_cast<std::size_t>(rows * cols) * size_of(dtype)))),
        view{buffer.data(), rows, cols, cols, dtype, {}} {
    std::memset(buffer.data(), 0, buffer.size());
  }
  MutableMatrixView rows(std::int64_t M) const {
    MutableMatrixView part = view;
    part.rows = M;
    return part;
  }
  MatrixView const_rows(std::int64_t M) const {
    return {view.data, M, view.cols, view.row_stride, view.dtype, {}};
  }
};

// Packed copies of one shape's weights, with the plans that run them.
struct PackedCopies {
  BenchShape shape;
  Plan swiglu;
  Plan gate;
  Plan up;
  std::vector<PackedWeightPtr> both;
  std::vector<PackedWeightPtr> gates;
  std::vector<PackedWeightPtr> ups;
  std::uint64_t copy_bytes = 0;
};

PackedCopies make_copies(const BenchShape& shape, const BenchSettings& settings,
                         const DeviceFacts& facts, ThreadPool& pool, Progress& progress) {
  const std::int64_t M_max = *std::max_element(settings.M.begin(), settings.M.end());
  PackedCopies copies{
      shape,
      value_or_throw(make_plan(swiglu_problem(shape, settings, M_max), facts)),
      value_or_throw(make_plan(linear_problem(shape, shape.gate, settings, M_max), facts)),
      value_or_throw(make_plan(linear_problem(shape, shape.up, settings, M_max), facts)),
      {},
      {},
      {},
      0};
  const QuantizedTensor gate = random_weight(shape.intermediate, shape.hidden, shape.gate, 1);
  const QuantizedTensor up = random_weight(shape.intermediate, shape.hidden, shape.up, 2);
  std::uint64_t total = 0;
  while (copies.both.empty() || total < settings.rotate_bytes) {
    check_stop();
    auto packed = value_or_throw(pack(copies.swiglu, gate.view(), up.view(), cpu_stream(pool)));
    copies.gates.push_back(value_or_throw(part(packed, 0)));
    copies.ups.push_back(value_or_throw(part(packed, 1)));
    copies.copy_bytes = packed_info(*packed).bytes;
    total += std::max<std::uint64_t>(copies.copy_bytes, 1);
    copies.both.push_back(std::move(packed));
    progress.update("packing " + shape_text(shape), static_cast<std::int64_t>(total >> 20),
                    static_cast<std::int64_t>(settings.rotate_bytes >> 20));
  }
  return copies;
}

struct Variant {
  std::string name;
  const PackedCopies* copies = nullptr;
  bool fused = true;
  MutableMatrixView out;
  std::size_t next = 0;  // copy that the next call uses
  std::vector<double> times_us;
};

class Runner {
 public:
  Runner(const BenchShape& shape, const BenchSettings& settings, std::int64_t M_max,
         std::size_t workspace_bytes, ThreadPool& pool)
      : pool_(pool),
        x_(M_max, shape.hidden, settings.activation),
        gate_(M_max, shape.intermediate, settings.activation),
        up_(M_max, shape.intermediate, settings.activation),
        workspace_(value_or_throw(AlignedBuffer::allocate(workspace_bytes))) {
    Random random(3);
    for (std::int64_t i = 0; i < M_max * shape.hidden; ++i) {
      store_float(x_.buffer.data(), settings.activation, i, (random.uniform() - 0.5f) * 3.5f);
    }
  }

  void call(Variant& variant, std::int64_t M) {
    const PackedCopies& c = *variant.copies;
    const std::size_t i = variant.next;
    variant.next = (i + 1) % c.both.size();
    const Stream stream = cpu_stream(pool_);
    const Workspace workspace{{workspace_.data(), workspace_.size()}};
    const MatrixView x = x_.const_rows(M);
    if (variant.fused) {
      value_or_throw(fused_swiglu(c.swiglu, *c.both[i], x, variant.out, workspace, stream));
      return;
    }
    value_or_throw(quantized_linear(c.gate, *c.gates[i], x, gate_.rows(M), workspace, stream));
    value_or_throw(quantized_linear(c.up, *c.ups[i], x, up_.rows(M), workspace, stream));
    value_or_throw(swiglu_activation(gate_.const_rows(M), up_.const_rows(M), variant.out, stream));
  }

 private:
  ThreadPool& pool_;
  OwnedMatrix x_;
  OwnedMatrix gate_;
  OwnedMatrix up_;
  AlignedBuffer workspace_;
};

std::size_t workspace_bytes(const PackedCopies& copies, std::int64_t M) {
  return std::max({copies.swiglu.workspace_bytes(M), copies.gate.workspace_bytes(M),
                   copies.up.workspace_bytes(M)});
}

// The results must be finite, not all zero, and fused must have unfused's bits where both round
// alike.
void check_results(const BenchShape& shape, std::int64_t M, const std::vector<Variant>& variants,
                   bool compare_bits) {
  const std::string where = " at M = " + std::to_string(M) + ", " + shape_text(shape);
  for (const Variant& v : variants) {
    bool any = false;
    for (std::int64_t i = 0; i < M * shape.intermediate; ++i) {
      const float value = load_float(v.out.data, v.out.dtype, i);
      if (!std::isfinite(value)) {
        throw CheckFailed(v.name + where + ": output " + std::to_string(i) + " is not finite");
      }
      any = any || value != 0.0f;
    }
    if (!any) throw CheckFailed(v.name + where + ": all outputs are 0");
  }
  const std::size_t element = size_of(variants[0].out.dtype);
  for (std::int64_t i = 0; compare_bits && i < M * shape.intermediate; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * element;
    if (std::memcmp(variants[0].out.data + at, variants[1].out.data + at, element) != 0) {
      throw CheckFailed("fused and unfused differ" + where + ": first at output " +
                        std::to_string(i));
    }
  }
}

BenchRow make_row(const Variant& variant, std::int64_t M, const MachineLimits& limits) {
  const PackedCopies& c = *variant.copies;
  BenchRow row;
  row.variant = variant.name;
  row.kernel = std::string(variant.fused ? c.swiglu.kernel_name(M) : c.gate.kernel_name(M));
  row.M = M;
  row.copies = static_cast<std::int64_t>(c.both.size());
  row.packed_bytes = c.copy_bytes;
  row.runs = static_cast<int>(variant.times_us.size());
  row.median_us = quantile(variant.times_us, 0.5);
  row.p10_us = quantile(variant.times_us, 0.1);
  row.p90_us = quantile(variant.times_us, 0.9);
  row.min_us = quantile(variant.times_us, 0.0);
  const auto m = static_cast<double>(M);
  const auto hidden = static_cast<double>(c.shape.hidden);
  const auto intermediate = static_cast<double>(c.shape.intermediate);
  const auto element = static_cast<double>(size_of(variant.out.dtype));
  row.bytes = format_bytes(c.shape) + m * (hidden + intermediate) * element;
  row.flops = 4.0 * m * hidden * intermediate;
  const double memory_us = 1e6 * row.bytes / limits.read_bytes_per_s;
  const double compute_us = 1e6 * row.flops / limits.flops_per_s;
  row.memory_bound = memory_us >= compute_us;
  row.limit_us = std::max(memory_us, compute_us);
  row.percent_of_limit = 100.0 * row.limit_us / row.median_us;
  return row;
}

}  // namespace

std::string shape_text(const BenchShape& shape) {
  const auto spec = [](const QuantSpec& s) {
    return s.is_dense() ? std::string("dense ") + to_string(s.scale_dtype)
                        : format("%d/%d", s.bits, s.group_size);
  };
  std::string text = format("%lldx%lld ", static_cast<long long>(shape.hidden),
                            static_cast<long long>(shape.intermediate)) +
                     spec(shape.gate);
  if (!(shape.up == shape.gate)) text.append("+").append(spec(shape.up));
  return text;
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(at);
  const std::size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

BenchCaseResult run_bench_case(const BenchShape& shape, const BenchSettings& settings,
                               const DeviceFacts& facts, const MachineLimits& limits,
                               ThreadPool& pool, Progress& progress) {
  BenchShape dense_shape = shape;
  dense_shape.gate = dense_shape.up = QuantSpec::dense(settings.activation);
  const PackedCopies copies = make_copies(shape, settings, facts, pool, progress);
  const PackedCopies dense = make_copies(dense_shape, settings, facts, pool, progress);
  const std::int64_t M_max = *std::max_element(settings.M.begin(), settings.M.end());
  Runner runner(shape, settings, M_max,
                std::max(workspace_bytes(copies, M_max), workspace_bytes(dense, M_max)), pool);
  std::vector<OwnedMatrix> outputs;
  for (int i = 0; i < 3; ++i) outputs.emplace_back(M_max, shape.intermediate, settings.activation);

  BenchCaseResult result;
  result.rotated_bytes =
      std::min(copies.copy_bytes * copies.both.size(), dense.copy_bytes * dense.both.size());
  for (const std::int64_t M : settings.M) {
    std::vector<Variant> variants = {{"fused", &copies, true, outputs[0].rows(M), 0, {}},
                                     {"unfused", &copies, false, outputs[1].rows(M), 0, {}},
                                     {std::string("dense ") + to_string(settings.activation),
                                      &dense,
                                      true,
                                      outputs[2].rows(M),
                                      0,
                                      {}}};
    for (Variant& v : variants) runner.call(v, M);
    check_results(shape, M, variants, settings.precision == Precision::match);
    // Fused and unfused share their copies: apart by half of them, so that none warms the other's.
    variants[1].next = copies.both.size() / 2;

    const auto start = Clock::now();
    for (int round = 0;; ++round) {
      check_stop();
      const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
      if (round >= settings.min_runs && elapsed >= settings.seconds) break;
      progress.update("measuring " + shape_text(shape) + " M=" + std::to_string(M), 0, 0);
      for (Variant& v : variants) {
        const auto begin = Clock::now();
        runner.call(v, M);
        v.times_us.push_back(
            std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      }
    }
    for (const Variant& v : variants) result.rows.push_back(make_row(v, M, limits));
  }
  return result;
}

}  // namespace qmlp::cli
