#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qmlp/ops.h"
#include "qmlp/plan.h"

namespace qmlp::plan {

enum class Op : std::uint8_t { linear, swiglu };

// The two public problems in one shape, as selection and kernels see them.
struct Problem {
  Op op = Op::linear;
  std::int64_t M = 1;
  std::int64_t N = 0;
  std::int64_t K = 0;
  QuantSpec spec[2];  // gate and up; linear uses the first
  DType activation = DType::bf16;
  Precision precision = Precision::match;
  Accumulation accumulation = Accumulation::f32;
  int segments = 1;

  int num_weights() const noexcept { return op == Op::swiglu ? 2 : 1; }
};
Problem to_problem(const SwigluProblem& problem, const DeviceFacts& device) noexcept;
Problem to_problem(const LinearProblem& problem, const DeviceFacts& device) noexcept;

// A checked call of an op.
struct OpCall {
  const Plan::State& plan;
  const PackedWeight& weight;
  MatrixView x;
  MutableMatrixView out;
  Workspace workspace;
  Stream stream;
  const std::byte* linear_bias[2] = {};
  MatrixView residual;
  MutableMatrixView gate_tap;
};

struct Kernel {
  const char* name;  // <op>_<activation>_<codes>_<tile>_<isa>
  Op op;
  DType activation;
  Isa isa;
  Accumulation accumulation;
  int max_segments;             // of the `tensor` contract; 1 where K is never cut
  std::uint8_t body;            // which of its backend's bodies runs
  std::uint32_t layout_id;      // kernels that share it can share packed weights
  std::int64_t M_begin, M_end;  // the rows it is meant for; any kernel is right at any M
  int (*run)(const Kernel& kernel,
             const OpCall& call) noexcept;  // 0 or an Errc; null: not in this build
  std::size_t (*workspace_bytes)(const Kernel& kernel, const Problem& problem,
                                 const DeviceFacts& device) noexcept;
  // Of rows that share a range of M: whether this one is meant for a problem. May change at M = 1
  // modulo kPreferenceStep, up to kPreferenceEnd. Null: always.
  bool (*preferred)(const Kernel& kernel, const Problem& problem,
                    const DeviceFacts& device) noexcept = nullptr;
};
constexpr std::int64_t kPreferenceStep = 16, kPreferenceEnd = 4096;

// Constant tables, fastest first, the reference last.
std::span<const Kernel> kernels(DeviceKind kind) noexcept;

Support supports(const Kernel& kernel, const Problem& problem, const DeviceFacts& device) noexcept;
// The first kernel that takes the problem; null when none does.
const Kernel* select(std::span<const Kernel> table, const Problem& problem,
                     const DeviceFacts& device, std::string_view force_kernel) noexcept;

void count_dispatch(const Kernel& kernel) noexcept;

}  // namespace qmlp::plan

namespace qmlp {

struct Plan::State {
  plan::Problem problem;  // M is M_max
  DeviceFacts device;
  int segments = 1;
  struct Range {
    std::int64_t M_begin;
    const plan::Kernel* kernel;
  };
  std::vector<Range> ranges;  // ascending M_begin, the first 0

  const plan::Kernel& kernel(std::int64_t M) const noexcept {
    const Range* found = &ranges.front();
    for (const Range& range : ranges) {
      if (range.M_begin <= M) found = &range;
    }
    return *found->kernel;
  }
};

}  // namespace qmlp
