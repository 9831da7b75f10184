#include "qmlp/plan.h"

#include <algorithm>

#include "base/try.h"
#include "plan/kernel.h"

namespace qmlp {
namespace plan {
namespace {

Accumulation default_accumulation(const DeviceFacts& device) noexcept {
  return device.kind == DeviceKind::cuda ? Accumulation::tensor : Accumulation::f32;
}

// S of `tensor` unless one is asked for: four where chains are long and too few to hide each
// other's latency (docs/decisions/0018-default-segments.md). A function of (N, K) and of the
// device's contract alone: bits depend on nothing else, and fused calls equal unfused ones.
int default_segments(Accumulation accumulation, std::int64_t N, std::int64_t K,
                     const DeviceFacts& device) noexcept {
  constexpr std::int64_t kLongChain = 4096, kMostChains = 8192;
  const bool was_measured = device.isa != Isa::sm80;
  return accumulation == Accumulation::tensor && was_measured && K >= kLongChain && N <= kMostChains
             ? 4
             : 1;
}

Support supports_any(const Problem& problem, const DeviceFacts& device) noexcept {
  Support last{Reason::no_device, "device", static_cast<std::int64_t>(device.kind), "cpu or cuda"};
  for (const Kernel& kernel : kernels(device.kind)) {
    const Support s = supports(kernel, problem, device);
    if (s) return s;
    // A row for another op or type says nothing about the problem.
    if (kernel.op == problem.op &&
        (s.reason != Reason::no_isa || last.reason == Reason::no_device)) {
      const bool other_row =
          kernel.activation != problem.activation || kernel.accumulation != problem.accumulation;
      const bool vague = last.reason == Reason::no_device || last.reason == Reason::no_isa;
      if (!other_row || vague) last = s;
    }
  }
  return last;
}

std::vector<KernelVerdict> explain_all(const Problem& problem, const DeviceFacts& device) {
  std::vector<KernelVerdict> verdicts;
  for (const Kernel& kernel : kernels(device.kind)) {
    if (kernel.op != problem.op) continue;
    verdicts.push_back({kernel.name, supports(kernel, problem, device)});
  }
  return verdicts;
}

std::string describe(const Problem& p) {
  return std::string(p.op == Op::swiglu ? "swiglu" : "linear") + " N=" + std::to_string(p.N) +
         " K=" + std::to_string(p.K) + " " + to_string(p.activation) + " " +
         to_string(p.accumulation);
}

Result<Plan> make(const Problem& problem, const DeviceFacts& device, const PlanOptions& options) {
  const auto table = kernels(device.kind);
  if (!options.force_kernel.empty()) {
    const auto named = std::find_if(table.begin(), table.end(), [&](const Kernel& k) {
      return options.force_kernel == k.name;
    });
    if (named == table.end()) {
      return Error{Errc::invalid_argument,
                   "no kernel is called " + std::string(options.force_kernel) + " on this device"};
    }
    if (const Support s = supports(*named, problem, device); !s) {
      return Error{Errc::unsupported, std::string(options.force_kernel) + " refuses " +
                                          describe(problem) + ": " + to_string(s)};
    }
  } else if (const Support s = supports_any(problem, device); !s) {
    return Error{Errc::unsupported, "no kernel takes " + describe(problem) + ": " + to_string(s)};
  }

  auto state = std::make_shared<Plan::State>();
  state->problem = problem;
  state->device = device;
  state->segments = problem.segments;
  std::vector<std::int64_t> borders = {0};
  for (const Kernel& kernel : table) {
    for (const std::int64_t M : {kernel.M_begin, kernel.M_end}) {
      if (M <= problem.M) borders.push_back(M);
    }
    if (kernel.preferred == nullptr || !supports(kernel, problem, device)) {
      continue;
    }
    for (std::int64_t M = 1; M <= std::min(problem.M, kPreferenceEnd); M += kPreferenceStep) {
      if (M > kernel.M_begin && M < kernel.M_end) borders.push_back(M);
    }
  }
  std::sort(borders.begin(), borders.end());
  for (const std::int64_t M : borders) {
    Problem at = problem;
    at.M = M;
    const Kernel* kernel = select(table, at, device, options.force_kernel);
    if (state->ranges.empty() || state->ranges.back().kernel != kernel) {
      state->ranges.push_back({M, kernel});
    }
  }
  return Plan(std::move(state));
}

}  // namespace

Problem to_problem(const SwigluProblem& p, const DeviceFacts& device) noexcept {
  const Accumulation accumulation = p.accumulation.value_or(default_accumulation(device));
  const int segments = p.segments != 0
                           ? p.segments
                           : default_segments(accumulation, p.intermediate, p.hidden, device);
  return {Op::swiglu,   p.M_max,     p.intermediate, p.hidden, {p.gate, p.up},
          p.activation, p.precision, accumulation,   segments};
}

Problem to_problem(const LinearProblem& p, const DeviceFacts& device) noexcept {
  const Accumulation accumulation = p.accumulation.value_or(default_accumulation(device));
  const int segments =
      p.segments != 0 ? p.segments : default_segments(accumulation, p.N, p.K, device);
  return {Op::linear,   p.M_max,          p.N,          p.K,     {p.weight, {}},
          p.activation, Precision::match, accumulation, segments};
}

}  // namespace plan

std::string to_string(const Support& support) {
  if (support) return "supported";
  std::string text = support.field;
  if (support.reason == Reason::no_isa) {
    text += std::string(" is ") + to_string(static_cast<Isa>(support.have));
  } else if (support.reason == Reason::dtype) {
    text += std::string(" is ") + to_string(static_cast<DType>(support.have));
  } else if (support.reason == Reason::accumulation &&
             std::string_view(support.field) == "accumulation") {
    text += std::string(" is ") + to_string(static_cast<Accumulation>(support.have));
  } else if (std::string_view(support.field) == "op") {
    text +=
        support.have == static_cast<std::int64_t>(plan::Op::swiglu) ? " is swiglu" : " is linear";
  } else {
    text += " is " + std::to_string(support.have);
  }
  return text + ", needs " + support.need;
}

Support supports(const SwigluProblem& problem, const DeviceFacts& device) noexcept {
  return plan::supports_any(plan::to_problem(problem, device), device);
}
Support supports(const LinearProblem& problem, const DeviceFacts& device) noexcept {
  return plan::supports_any(plan::to_problem(problem, device), device);
}
std::vector<KernelVerdict> explain(const SwigluProblem& problem, const DeviceFacts& device) {
  return plan::explain_all(plan::to_problem(problem, device), device);
}
std::vector<KernelVerdict> explain(const LinearProblem& problem, const DeviceFacts& device) {
  return plan::explain_all(plan::to_problem(problem, device), device);
}
Result<Plan> make_plan(const SwigluProblem& problem, const DeviceFacts& device,
                       const PlanOptions& options) {
  return plan::make(plan::to_problem(problem, device), device, options);
}
Result<Plan> make_plan(const LinearProblem& problem, const DeviceFacts& device,
                       const PlanOptions& options) {
  return plan::make(plan::to_problem(problem, device), device, options);
}

std::string_view Plan::kernel_name(std::int64_t M) const noexcept { return state_->kernel(M).name; }

std::size_t Plan::workspace_bytes(std::int64_t M) const noexcept {
  std::size_t most = 0;
  for (const State::Range& range : state_->ranges) {
    if (range.M_begin > M || range.kernel->workspace_bytes == nullptr) continue;
    plan::Problem problem = state_->problem;
    problem.M = M;
    most = std::max(most, range.kernel->workspace_bytes(*range.kernel, problem, state_->device));
  }
  return most;
}

Accumulation Plan::accumulation() const noexcept { return state_->problem.accumulation; }
int Plan::segments() const noexcept { return state_->segments; }
const DeviceFacts& Plan::device() const noexcept { return state_->device; }

}  // namespace qmlp
