#include "op_checks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <span>

#include "../context.h"
#include "../format.h"
#include "base/aligned_buffer.h"
#include "base/float16.h"
#include "ops/fault_hook.h"
#include "qmlp/exceptions.h"
#include "qmlp/quant.h"
#include "ref/ops.h"
#include "ref/oracle.h"
#include "ref/rounding.h"
#include "ref/weight.h"
#include "sample.h"

namespace qmlp::cli {
namespace {

constexpr std::int64_t kProbes = 64;      // one-hot rows
constexpr std::int64_t kOtherRows = 17;   // M of the checks that compare kernels or threads
constexpr std::int64_t kRefColumns = 12;  // outputs a row that are summed by src/ref
constexpr std::int64_t kRowBlock = 16;    // weight rows decoded at a time

bool same_value(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// A contiguous matrix of the activation type.
class Rows {
 public:
  Rows(std::int64_t rows, std::int64_t cols, DType type)
      : rows_(rows),
        cols_(cols),
        type_(type),
        bytes_(static_cast<std::size_t>(rows * cols) * size_of(type)) {}
  float at(std::int64_t row, std::int64_t col) const {
    return load_float(bytes_.data(), type_, row * cols_ + col);
  }
  void set(std::int64_t row, std::int64_t col, float value) {
    store_float(bytes_.data(), type_, row * cols_ + col, value);
  }
  MatrixView view(std::int64_t first, std::int64_t count) const {
    const auto offset = static_cast<std::size_t>(first * cols_) * size_of(type_);
    return {bytes_.data() + offset, count, cols_, cols_, type_, {}};
  }
  MatrixView view() const { return view(0, rows_); }
  MutableMatrixView out() { return {bytes_.data(), rows_, cols_, cols_, type_, {}}; }
  const std::byte* data() const { return bytes_.data(); }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }

 private:
  std::int64_t rows_, cols_;
  DType type_;
  std::vector<std::byte> bytes_;
};

class Checker {
 public:
  Checker(const OpSubject& subject, const OpCheckOptions& options, ThreadPool& pool,
          ThreadPool& other_pool)
      : subject_(subject),
        options_(options),
        pool_(pool),
        other_pool_(other_pool),
        type_(options.activations),
        N_(subject.parts[0].source.N),
        K_(subject.parts[0].source.K),
        M_(options.rows.back()),
        x_(M_, K_, type_) {
    report_.path = subject.op.path;
    report_.kernel = std::string(subject.op.plan.kernel_name(M_));
    for (const OpSubject::Part& part : subject.parts) {
      if (!report_.shape.empty()) report_.shape += " | ";
      report_.shape += spec_text(part.source.spec);
      problems_.push_back(
          {M_, N_, K_, part.source.spec, type_, options.accumulation, options.segments});
      if (problems_.back().M_max < kProbes) problems_.back().M_max = kProbes;
      plans_.push_back(value_or_throw(make_plan(problems_.back(), options.facts)));
    }
    if (is_swiglu()) {
      for (int i = 0; i < 2; ++i) weights_.push_back(value_or_throw(part(subject.op.weight, i)));
    } else {
      weights_.push_back(subject.op.weight);
    }
    const auto& bias = subject.op.linear_bias;
    for (std::size_t i = 0; i * static_cast<std::size_t>(N_) < bias.size(); ++i) {
      Rows row(1, N_, type_);
      for (std::int64_t n = 0; n < N_; ++n) {
        row.set(0, n, bias[i * static_cast<std::size_t>(N_) + static_cast<std::size_t>(n)]);
      }
      biases_.push_back(std::move(row));
    }
    fill_activations(x_.out(), options.seed);
    for (std::int64_t i = 0; i < std::min(options.sampled_columns, N_); ++i) {
      columns_.push_back(i * N_ / std::min(options.sampled_columns, N_));
    }
    columns_.back() = N_ - 1;
  }

  OpReport run() {
    check_weights();
    check_one_hot();
    Rows y(M_, N_, type_);
    if (options_.plant_kernel_fault) {
      const auto site = is_swiglu() ? testing::FaultSite::swiglu : testing::FaultSite::linear;
      testing::plant_kernel_fault(site, 0);
    }
    run_op(subject_.op.plan, x_.view(), y.out(), pool_);
    testing::clear_kernel_fault();
    check_fused(y);
    check_rows(y);
    check_kernels(y);
    check_threads(y);
    check_oracle(y);
    check_reference();
    note_non_finite(y);
    return std::move(report_);
  }

 private:
  bool is_swiglu() const { return subject_.op.is_swiglu; }
  CheckResult& begin(const char* name) {
    check_stop();
    report_.checks.push_back({});
    report_.checks.back().name = name;
    return report_.checks.back();
  }
  const std::byte* bias(std::size_t i) const {
    return i < biases_.size() ? biases_[i].data() : nullptr;
  }
  const float* bias_value(std::size_t i, std::int64_t n, float& storage) const {
    if (i >= biases_.size()) return nullptr;
    storage = biases_[i].at(0, n);
    return &storage;
  }

  // Scratch full of NaN, so that a kernel that reads before it writes shows.
  Workspace workspace(std::size_t bytes) {
    if (scratch_.size() < bytes) {
      scratch_ = value_or_throw(AlignedBuffer::allocate(bytes));
    }
    if (bytes != 0) std::memset(scratch_.data(), 0xFF, bytes);
    return {{scratch_.data(), bytes}};
  }

  void run_op(const Plan& plan, const MatrixView& x, const MutableMatrixView& out,
              ThreadPool& pool) {
    const Workspace scratch = workspace(plan.workspace_bytes(x.rows));
    if (is_swiglu()) {
      SwigluEpilogue epilogue;
      epilogue.gate_bias = bias(0);
      epilogue.up_bias = bias(1);
      value_or_throw(
          fused_swiglu(plan, *subject_.op.weight, x, out, scratch, cpu_stream(pool), epilogue));
    } else {
      LinearEpilogue epilogue;
      epilogue.linear_bias = bias(0);
      value_or_throw(
          quantized_linear(plan, *subject_.op.weight, x, out, scratch, cpu_stream(pool), epilogue));
    }
  }
  void run_part(std::size_t i, const MatrixView& x, const MutableMatrixView& out, bool with_bias) {
    const Workspace scratch = workspace(plans_[i].workspace_bytes(x.rows));
    LinearEpilogue epilogue;
    if (with_bias) epilogue.linear_bias = bias(i);
    value_or_throw(
        quantized_linear(plans_[i], *weights_[i], x, out, scratch, cpu_stream(pool_), epilogue));
  }

  void compare(CheckResult& check, const Rows& got, std::int64_t got_row, const Rows& want,
               std::int64_t want_row, std::int64_t count, const std::string& what) {
    for (std::int64_t m = 0; m < count; ++m) {
      for (std::int64_t n = 0; n < got.cols(); ++n) {
        ++check.compared;
        const float a = got.at(got_row + m, n);
        const float b = want.at(want_row + m, n);
        if (same_value(a, b)) continue;
        const long long row = want_row + m;
        check.miss(format("%s: row %lld column %lld is %.9g, must be %.9g", what.c_str(), row,
                          static_cast<long long>(n), static_cast<double>(a),
                          static_cast<double>(b)));
      }
    }
  }

  // A problem of the whole op, for plans of other kernels.
  std::vector<KernelVerdict> verdicts() const {
    if (is_swiglu())
      return explain(swiglu_problem(options_.accumulation, options_.segments), options_.facts);
    return explain(problems_[0], options_.facts);
  }
  SwigluProblem swiglu_problem(std::optional<Accumulation> accumulation, int segments) const {
    return {M_,
            K_,
            N_,
            problems_[0].weight,
            problems_[1].weight,
            type_,
            options_.precision,
            accumulation,
            segments};
  }
  Plan plan_with(std::optional<Accumulation> accumulation, int segments,
                 std::string_view kernel) const {
    if (is_swiglu()) {
      return value_or_throw(
          make_plan(swiglu_problem(accumulation, segments), options_.facts, {kernel}));
    }
    LinearProblem problem = problems_[0];
    problem.accumulation = accumulation;
    problem.segments = segments;
    return value_or_throw(make_plan(problem, options_.facts, {kernel}));
  }

  // Every packed weight, decoded, against the checkpoint's; a sample of rows by src/ref as well.
  void check_weights();
  void check_one_hot();
  void check_fused(const Rows& y);
  void check_rows(const Rows& y);
  void check_kernels(const Rows& y);
  void check_threads(const Rows& y);
  void check_oracle(const Rows& y);
  void check_reference();
  void note_non_finite(const Rows& y);

  const OpSubject& subject_;
  const OpCheckOptions& options_;
  ThreadPool& pool_;
  ThreadPool& other_pool_;
  DType type_;
  std::int64_t N_, K_, M_;
  Rows x_;
  std::vector<LinearProblem> problems_;
  std::vector<Plan> plans_;
  std::vector<PackedWeightPtr> weights_;
  std::vector<Rows> biases_;
  std::vector<std::int64_t> columns_;
  std::vector<std::int64_t> probe_k_;
  std::vector<std::vector<float>> probed_;  // of each part: [N][probes] weights
  bool weights_finite_ = true;
  AlignedBuffer scratch_;
  OpReport report_;
};

// The first non-finite element of a tensor, as a sentence; empty when there is none.
std::string non_finite_in(std::span<const std::byte> bytes, DType type, std::int64_t columns,
                          const std::string& name) {
  const auto count = static_cast<std::int64_t>(bytes.size() / size_of(type));
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = load_float(bytes.data(), type, i);
    if (std::isfinite(value)) continue;
    return format("%s: element (%lld, %lld) is %s", name.c_str(),
                  static_cast<long long>(i / columns), static_cast<long long>(i % columns),
                  std::isnan(value) ? "NaN" : "infinite");
  }
  return {};
}

void Checker::check_weights() {
  CheckResult& check = begin("weights");
  const std::int64_t probes = std::min(kProbes, K_);
  for (std::int64_t i = 0; i < probes; ++i) probe_k_.push_back(i * K_ / probes);
  probed_.assign(subject_.parts.size(), {});
  for (std::size_t p = 0; p < subject_.parts.size(); ++p) {
    const QuantizedTensorView& source = subject_.parts[p].source;
    const std::string& module = subject_.parts[p].module;
    const QuantSpec& spec = source.spec;
    std::vector<std::string> bad;
    if (spec.is_dense()) {
      bad.push_back(non_finite_in(source.codes, spec.scale_dtype, K_, module + ".weight"));
    } else {
      const std::int64_t groups = K_ / spec.group_size;
      bad.push_back(non_finite_in(source.scales, spec.scale_dtype, groups, module + ".scales"));
      bad.push_back(non_finite_in(source.biases, spec.scale_dtype, groups, module + ".biases"));
    }
    for (const std::string& text : bad) {
      if (text.empty()) continue;
      check.miss(text);
      weights_finite_ = false;
    }

    probed_[p].resize(static_cast<std::size_t>(N_ * probes));
    std::mutex mutex;
    std::atomic<bool> overflowed{false};
    const std::int64_t blocks = (N_ + kRowBlock - 1) / kRowBlock;
    const std::int64_t ref_step = std::max<std::int64_t>(1, blocks / 4);
    pool_.for_each(blocks, [&](std::int64_t block, int) {
      const std::int64_t begin = block * kRowBlock;
      const std::int64_t end = std::min(N_, begin + kRowBlock);
      std::vector<float> want(static_cast<std::size_t>((end - begin) * K_));
      const Status decoded = dequantize(source, begin, end, type_, want);
      const bool by_ref = block % ref_step == 0 || block + 1 == blocks;
      std::vector<float> exact;
      if (by_ref) exact = ref::decode(source, end - 1, end, type_);
      Rows row(1, K_, type_);
      for (std::int64_t n = begin; n < end; ++n) {
        const Status status = decode_row(*weights_[p], n, row.out());
        if (!decoded || !status) {
          const std::lock_guard lock(mutex);
          check.miss(module + ": " + (!decoded ? decoded : status).error().message);
          return;
        }
        const float* want_row = want.data() + (n - begin) * K_;
        for (std::int64_t k = 0; k < K_; ++k) {
          const float value = row.at(0, k);
          if (!std::isfinite(value)) overflowed = true;
          bool good = same_value(value, want_row[k]);
          if (by_ref && n == end - 1) {
            good = good && same_value(value, exact[static_cast<std::size_t>(k)]);
          }
          if (good) continue;
          const std::lock_guard lock(mutex);
          check.miss(format("%s: weight (%lld, %lld) is %.9g packed, %.9g in the checkpoint",
                            module.c_str(), static_cast<long long>(n), static_cast<long long>(k),
                            static_cast<double>(value), static_cast<double>(want_row[k])));
        }
        for (std::int64_t i = 0; i < probes; ++i) {
          probed_[p][static_cast<std::size_t>(n * probes + i)] =
              want_row[probe_k_[static_cast<std::size_t>(i)]];
        }
      }
    });
    check.compared += N_ * K_;
    if (overflowed && weights_finite_) {
      weights_finite_ = false;
      check.miss(module + ": some weights are infinite in " + to_string(type_));
    }
  }
}

// Rows of x with a single 1 give columns of the weight, whatever the kernel.
void Checker::check_one_hot() {
  CheckResult& check = begin("one-hot");
  if (!weights_finite_) {
    check.detail = "the weights are not finite";
    return;
  }
  const auto probes = static_cast<std::int64_t>(probe_k_.size());
  Rows x(probes, K_, type_);
  for (std::int64_t i = 0; i < probes; ++i) x.set(i, probe_k_[static_cast<std::size_t>(i)], 1.0f);
  Rows y(probes, N_, type_);
  for (std::size_t p = 0; p < subject_.parts.size(); ++p) {
    run_part(p, x.view(), y.out(), false);
    for (std::int64_t i = 0; i < probes; ++i) {
      for (std::int64_t n = 0; n < N_; ++n) {
        ++check.compared;
        const float want = probed_[p][static_cast<std::size_t>(n * probes + i)];
        if (same_value(y.at(i, n), want)) continue;
        check.miss(format("%s: the kernel decodes weight (%lld, %lld) as %.9g, must be %.9g",
                          subject_.parts[p].module.c_str(), static_cast<long long>(n),
                          static_cast<long long>(probe_k_[static_cast<std::size_t>(i)]),
                          static_cast<double>(y.at(i, n)), static_cast<double>(want)));
      }
    }
  }
}

void Checker::check_fused(const Rows& y) {
  CheckResult& check = begin("fused");
  if (!is_swiglu()) return;
  if (options_.precision == Precision::wide) {
    check.detail = "wide precision is not the separate ops' arithmetic";
    return;
  }
  for (const std::int64_t M : options_.rows) {
    Rows gate(M, N_, type_);
    Rows up(M, N_, type_);
    Rows separate(M, N_, type_);
    run_part(0, x_.view(0, M), gate.out(), true);
    run_part(1, x_.view(0, M), up.out(), true);
    value_or_throw(swiglu_activation(gate.view(), up.view(), separate.out(), cpu_stream(pool_)));
    const std::string what = "M " + std::to_string(M) + ", fused against gate, up, silu * up";
    if (M == M_) {
      compare(check, y, 0, separate, 0, M, what);
      continue;
    }
    Rows fused(M, N_, type_);
    run_op(subject_.op.plan, x_.view(0, M), fused.out(), pool_);
    compare(check, fused, 0, separate, 0, M, what);
  }
}

// Rows of the largest call again, at other M and other places.
void Checker::check_rows(const Rows& y) {
  CheckResult& check = begin("rows");
  for (const std::int64_t M : options_.rows) {
    for (const std::int64_t first : {std::int64_t{0}, M_ - M}) {
      if (M == M_ && first == 0) continue;
      if (M == M_) break;
      Rows part(M, N_, type_);
      run_op(subject_.op.plan, x_.view(first, M), part.out(), pool_);
      compare(check, part, 0, y, first, M,
              "M " + std::to_string(M) + " against M " + std::to_string(M_));
    }
  }
  if (check.compared == 0) check.detail = "one value of M";
}

// Every other kernel that takes the problem on this machine.
void Checker::check_kernels(const Rows& y) {
  CheckResult& check = begin("kernels");
  const std::int64_t M = std::min(M_, kOtherRows);
  for (const KernelVerdict& verdict : verdicts()) {
    if (!verdict.support) continue;
    const Plan plan = plan_with(options_.accumulation, options_.segments, verdict.kernel);
    const auto table = kernel_table();
    const auto row = std::find_if(table.begin(), table.end(),
                                  [&](const KernelInfo& k) { return k.name == verdict.kernel; });
    if (row == table.end() || !row->compiled) continue;
    for (const std::int64_t rows : {std::int64_t{1}, M}) {
      if (subject_.op.plan.kernel_name(M_) == verdict.kernel) break;
      Rows other(rows, N_, type_);
      run_op(plan, x_.view(M_ - rows, rows), other.out(), pool_);
      compare(check, other, 0, y, M_ - rows, rows, std::string(verdict.kernel));
      if (M == 1) break;
    }
  }
  if (check.compared == 0) check.detail = "no second kernel on this machine";
}

void Checker::check_threads(const Rows& y) {
  CheckResult& check = begin("threads");
  const std::int64_t M = std::min(M_, kOtherRows);
  Rows other(M, N_, type_);
  // A plan says how many threads a call may use; the pool says how many there are.
  DeviceFacts facts = options_.facts;
  facts.num_threads = other_pool_.num_threads();
  const Plan plan = is_swiglu()
                        ? value_or_throw(make_plan(
                              swiglu_problem(options_.accumulation, options_.segments), facts))
                        : value_or_throw(make_plan(problems_[0], facts));
  run_op(plan, x_.view(M_ - M, M), other.out(), other_pool_);
  compare(check, other, 0, y, M_ - M, M,
          std::to_string(other_pool_.num_threads()) + " threads against " +
              std::to_string(pool_.num_threads()));
}

void Checker::check_oracle(const Rows& y) {
  CheckResult& check = begin("oracle");
  check.worst = 0.0;
  std::vector<float> x(static_cast<std::size_t>(M_ * K_));
  for (std::int64_t i = 0; i < M_ * K_; ++i) {
    x[static_cast<std::size_t>(i)] = load_float(x_.data(), type_, i);
  }
  for (const std::int64_t n : columns_) {
    std::vector<std::vector<float>> weights;
    for (const OpSubject::Part& part : subject_.parts) {
      weights.push_back(ref::decode(part.source, n, n + 1, type_));
    }
    for (std::int64_t m = 0; m < M_; ++m) {
      ref::Bounded expected[2];
      for (std::size_t p = 0; p < weights.size(); ++p) {
        float storage = 0.0f;
        expected[p] = ref::linear_oracle(x.data() + m * K_, weights[p].data(), K_, type_,
                                         bias_value(p, n, storage));
      }
      if (is_swiglu()) {
        expected[0] = ref::swiglu_oracle(expected[0], expected[1], type_, options_.precision);
      }
      const float got = y.at(m, n);
      const double error = ref::error_in_bounds(got, expected[0], type_);
      ++check.compared;
      check.worst = std::max(check.worst, error);
      const auto nearest = ref::round_to_type(static_cast<float>(expected[0].value), type_);
      report_.ulps.add(std::isfinite(got) && std::isfinite(nearest)
                           ? ref::ulp_distance(got, nearest, type_)
                           : -1);
      if (error <= 1.0) continue;
      check.miss(format("row %lld column %lld is %.9g, float64 gives %.9g within %.3g",
                        static_cast<long long>(m), static_cast<long long>(n),
                        static_cast<double>(got), expected[0].value, expected[0].bound));
    }
  }
}

// Both contracts on sampled outputs, to the bit.
void Checker::check_reference() {
  CheckResult& check = begin("contract");
  const std::int64_t M = std::min<std::int64_t>(M_, 2);
  std::vector<std::int64_t> columns;
  for (std::size_t i = 0; i < columns_.size(); i += 1 + columns_.size() / kRefColumns) {
    columns.push_back(columns_[i]);
  }
  if (columns.back() != N_ - 1) columns.push_back(N_ - 1);
  for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
    if (accumulation == Accumulation::tensor && type_ == DType::f32) continue;
    const bool own = accumulation == subject_.op.plan.accumulation();
    const int segments = own ? subject_.op.plan.segments() : 1;
    const Plan plan = plan_with(accumulation, segments, {});
    Rows got(M, N_, type_);
    run_op(plan, x_.view(0, M), got.out(), pool_);
    const ref::Rules rules{type_, {accumulation, segments}, options_.precision, {}};
    std::vector<float> x(static_cast<std::size_t>(M * K_));
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = load_float(x_.data(), type_, static_cast<std::int64_t>(i));
    }
    for (const std::int64_t n : columns) {
      float storage[2] = {};
      const float* first_bias = bias_value(0, n, storage[0]);
      const auto w = ref::decode(subject_.parts[0].source, n, n + 1, type_);
      std::vector<float> want;
      if (is_swiglu()) {
        const auto u = ref::decode(subject_.parts[1].source, n, n + 1, type_);
        want = ref::swiglu(x, w, u, M, 1, K_, rules, first_bias, bias_value(1, n, storage[1])).out;
      } else {
        want = ref::linear(x, w, M, 1, K_, rules, first_bias);
      }
      for (std::int64_t m = 0; m < M; ++m) {
        ++check.compared;
        const float value = want[static_cast<std::size_t>(m)];
        if (same_value(got.at(m, n), value)) continue;
        check.miss(format("%s/%d: row %lld column %lld is %.9g, the reference gives %.9g",
                          to_string(accumulation), segments, static_cast<long long>(m),
                          static_cast<long long>(n), static_cast<double>(got.at(m, n)),
                          static_cast<double>(value)));
      }
    }
  }
}

void Checker::note_non_finite(const Rows& y) {
  std::int64_t count = 0;
  for (std::int64_t m = 0; m < M_; ++m) {
    for (std::int64_t n = 0; n < N_; ++n) count += !std::isfinite(y.at(m, n));
  }
  if (count == 0) return;
  const long long outputs = M_ * N_;
  std::string note = format("%s: %lld of %lld outputs are not finite", report_.path.c_str(),
                            static_cast<long long>(count), outputs);
  if (weights_finite_ && type_ == DType::f16) {
    note += "; f16 ends at 65504, --activations bf16 reaches further";
  }
  report_.notes.push_back(std::move(note));
}

}  // namespace

OpReport check_op(const OpSubject& subject, const OpCheckOptions& options, ThreadPool& pool,
                  ThreadPool& other_pool) {
  return Checker(subject, options, pool, other_pool).run();
}

const std::vector<std::string>& op_check_names() {
  static const std::vector<std::string> names = {"weights", "one-hot", "fused",  "rows",
                                                 "kernels", "threads", "oracle", "contract"};
  return names;
}

}  // namespace qmlp::cli
