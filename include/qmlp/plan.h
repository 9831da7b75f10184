#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"
#include "qmlp/tensor.h"
#include "qmlp/types.h"

namespace qmlp {

enum class Isa : std::uint8_t { portable, avx2, avx512, neon, sm80, sm90a };
const char* to_string(Isa isa) noexcept;

// What is known of a device. Public, so that a plan can be asked about a machine that is not here.
struct DeviceFacts {
  DeviceKind kind = DeviceKind::cpu;
  int ordinal = 0;
  Isa isa = Isa::portable;  // the best instruction set that may be used
  int num_threads = 1;      // CPU: threads that a call may use
  int num_sms = 0;
  std::size_t l2_bytes = 0;
  std::size_t smem_bytes = 0;  // CUDA: shared memory a block may use
  bool present = false;        // false: plans can be made and read, not run
};
// The machine this process runs on; num_threads from affinity and cgroup.
DeviceFacts host_facts() noexcept;
// Facts of a machine by name: portable, avx2, avx512, a100, h200.
Result<DeviceFacts> machine_facts(std::string_view name);

// out[M, intermediate] = silu(x * gate^T) * (x * up^T), K = hidden.
struct SwigluProblem {
  std::int64_t M_max = 1;         // most tokens one call may carry
  std::int64_t hidden = 0;        // K
  std::int64_t intermediate = 0;  // N
  QuantSpec gate;
  QuantSpec up;
  DType activation = DType::bf16;
  Precision precision = Precision::match;
  std::optional<Accumulation> accumulation = {};  // empty: the device's own
  int segments = 0;                               // of `tensor`; 0: the plan's choice for (N, K)
};

// out[M, N] = x * w^T.
struct LinearProblem {
  std::int64_t M_max = 1;
  std::int64_t N = 0;
  std::int64_t K = 0;
  QuantSpec weight;
  DType activation = DType::bf16;
  std::optional<Accumulation> accumulation = {};
  int segments = 0;
};

enum class Reason : std::uint8_t {
  ok,
  no_device,
  no_isa,
  dtype,
  bits,
  group_size,
  shape,
  accumulation,
};
const char* to_string(Reason reason) noexcept;

struct Support {  // trivially copyable; to_string() makes the sentence
  Reason reason = Reason::ok;
  const char* field = "";  // "intermediate"
  std::int64_t have = 0;   // 40
  const char* need = "";   // "a multiple of 16"
  explicit constexpr operator bool() const noexcept { return reason == Reason::ok; }
};
std::string to_string(const Support& support);

// Whether some kernel takes the problem. Never throws, allocates or prints. When all refuse, the
// answer is the reference kernel's reason, since that kernel has the fewest demands.
Support supports(const SwigluProblem& problem, const DeviceFacts& device) noexcept;
Support supports(const LinearProblem& problem, const DeviceFacts& device) noexcept;

struct KernelVerdict {
  std::string_view kernel;
  Support support;
};
// Every kernel's answer at M = M_max, fastest first.
std::vector<KernelVerdict> explain(const SwigluProblem& problem, const DeviceFacts& device);
std::vector<KernelVerdict> explain(const LinearProblem& problem, const DeviceFacts& device);

struct PlanOptions {
  std::string_view force_kernel = {};  // a registry name; empty: the library chooses
};

// Immutable and safe to share between threads: one packed layout, one kernel for each range of M.
class Plan {
 public:
  struct State;
  explicit Plan(std::shared_ptr<const State> state) noexcept : state_(std::move(state)) {}

  std::string_view kernel_name(std::int64_t M) const noexcept;
  // Bytes of workspace that a call of M tokens needs; monotone in M.
  std::size_t workspace_bytes(std::int64_t M) const noexcept;
  Accumulation accumulation() const noexcept;
  int segments() const noexcept;  // 1 unless `tensor` cuts K
  const DeviceFacts& device() const noexcept;
  const State& state() const noexcept { return *state_; }

 private:
  std::shared_ptr<const State> state_;
};
Result<Plan> make_plan(const SwigluProblem& problem, const DeviceFacts& device,
                       const PlanOptions& options = {});
Result<Plan> make_plan(const LinearProblem& problem, const DeviceFacts& device,
                       const PlanOptions& options = {});

// One row of the kernel tables, as `qmlp info --kernels` and the docs list it.
struct KernelInfo {
  std::string_view name;
  DeviceKind device = DeviceKind::cpu;
  Isa isa = Isa::portable;
  Accumulation accumulation = Accumulation::f32;
  bool compiled = false;  // this build holds its code
};
std::vector<KernelInfo> kernel_table();

// How often each kernel ran in this process since the last reset, names with a count of 0 left out.
struct KernelCount {
  std::string_view kernel;
  std::uint64_t calls = 0;
};
std::vector<KernelCount> dispatch_counts();
void reset_dispatch_counts() noexcept;

}  // namespace qmlp
