#include <atomic>

#include "plan/kernel.h"
#include "qmlp/quant.h"

namespace qmlp::plan {
namespace {

bool runs_on(Isa isa, Isa have) noexcept {
  if (isa == have) return true;
  switch (have) {
    case Isa::avx512:
      return isa == Isa::avx2 || isa == Isa::portable;
    case Isa::avx2:
    case Isa::neon:
      return isa == Isa::portable;
    case Isa::sm90a:
      return isa == Isa::sm80;
    default:
      return false;
  }
}

Support check_spec(const QuantSpec& spec, std::int64_t K, bool is_up) noexcept {
  if (spec.is_dense()) {
    const int need = spec.scale_dtype == DType::f32 ? 32 : 16;
    if (spec.bits != need) {
      return {Reason::bits, is_up ? "up.bits" : "weight.bits", spec.bits,
              "16 or 32 as the stored floats have, when group_size is 0"};
    }
    return {};
  }
  switch (spec.bits) {
    case 2:
    case 3:
    case 4:
    case 5:
    case 6:
    case 8:
      break;
    default:
      return {Reason::bits, is_up ? "up.bits" : "weight.bits", spec.bits, "2, 3, 4, 5, 6 or 8"};
  }
  if (spec.group_size != 32 && spec.group_size != 64 && spec.group_size != 128) {
    return {Reason::group_size, is_up ? "up.group_size" : "weight.group_size", spec.group_size,
            "32, 64 or 128"};
  }
  if (K % spec.group_size != 0) return {Reason::shape, "K", K, "a multiple of the group size"};
  return {};
}

constexpr std::size_t kMaxKernels = 128;
std::atomic<std::uint64_t> g_dispatches[kMaxKernels];

std::size_t counter_index(const Kernel& kernel) noexcept {
  const auto cpu = kernels(DeviceKind::cpu);
  if (&kernel >= cpu.data() && &kernel < cpu.data() + cpu.size()) {
    return static_cast<std::size_t>(&kernel - cpu.data());
  }
  return cpu.size() + static_cast<std::size_t>(&kernel - kernels(DeviceKind::cuda).data());
}

}  // namespace

Support supports(const Kernel& kernel, const Problem& problem, const DeviceFacts& device) noexcept {
  if (!runs_on(kernel.isa, device.isa)) {
    return {Reason::no_isa, "device.isa", static_cast<std::int64_t>(device.isa),
            to_string(kernel.isa)};
  }
  if (problem.op != kernel.op) {
    return {Reason::shape, "op", static_cast<std::int64_t>(problem.op),
            kernel.op == Op::swiglu ? "swiglu" : "linear"};
  }
  if (problem.N < 1) return {Reason::shape, "N", problem.N, "at least 1"};
  if (problem.K < 1) return {Reason::shape, "K", problem.K, "at least 1"};
  if (problem.M < 0) return {Reason::shape, "M_max", problem.M, "at least 0"};
  constexpr std::int64_t kMaxSide = std::int64_t{1} << 31;
  if (problem.N > kMaxSide) return {Reason::shape, "N", problem.N, "at most 2147483648"};
  if (problem.K > kMaxSide) return {Reason::shape, "K", problem.K, "at most 2147483648"};
  if (problem.M > kMaxSide) return {Reason::shape, "M_max", problem.M, "at most 2147483648"};
  for (int i = 0; i < problem.num_weights(); ++i) {
    if (const Support s = check_spec(problem.spec[i], problem.K, i == 1); !s) return s;
  }
  if (problem.accumulation == Accumulation::tensor) {
    if (problem.activation == DType::f32) {
      return {Reason::dtype, "activation", static_cast<std::int64_t>(problem.activation),
              "bf16 or f16, which the tensor contract is defined for"};
    }
    const int s = problem.segments;
    if (s != 1 && s != 2 && s != 4 && s != 8) {
      return {Reason::accumulation, "segments", s, "1, 2, 4 or 8"};
    }
  } else if (problem.segments != 1) {
    return {Reason::accumulation, "segments", problem.segments, "1 with f32 accumulation"};
  }
  if (problem.segments > kernel.max_segments) {
    return {Reason::accumulation, "segments", problem.segments, "1 with this kernel"};
  }
  if (problem.activation != kernel.activation) {
    return {Reason::dtype, "activation", static_cast<std::int64_t>(problem.activation),
            to_string(kernel.activation)};
  }
  if (problem.accumulation != kernel.accumulation) {
    return {Reason::accumulation, "accumulation", static_cast<std::int64_t>(problem.accumulation),
            to_string(kernel.accumulation)};
  }
  return {};
}

const Kernel* select(std::span<const Kernel> table, const Problem& problem,
                     const DeviceFacts& device, std::string_view force_kernel) noexcept {
  const Kernel* any = nullptr;
  for (const Kernel& kernel : table) {
    if (!force_kernel.empty() && force_kernel != kernel.name) continue;
    if (!supports(kernel, problem, device)) continue;
    if (!force_kernel.empty()) return &kernel;
    if (problem.M >= kernel.M_begin && problem.M < kernel.M_end &&
        (kernel.preferred == nullptr || kernel.preferred(kernel, problem, device))) {
      return &kernel;
    }
    if (any == nullptr) any = &kernel;
  }
  return any;
}

void count_dispatch(const Kernel& kernel) noexcept {
  g_dispatches[counter_index(kernel)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace qmlp::plan

namespace qmlp {

std::vector<KernelInfo> kernel_table() {
  std::vector<KernelInfo> table;
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda}) {
    for (const plan::Kernel& k : plan::kernels(kind)) {
      table.push_back({k.name, kind, k.isa, k.accumulation, k.run != nullptr});
    }
  }
  return table;
}

std::vector<KernelCount> dispatch_counts() {
  std::vector<KernelCount> counts;
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda}) {
    for (const plan::Kernel& k : plan::kernels(kind)) {
      const std::uint64_t calls =
          plan::g_dispatches[plan::counter_index(k)].load(std::memory_order_relaxed);
      if (calls != 0) counts.push_back({k.name, calls});
    }
  }
  return counts;
}

void reset_dispatch_counts() noexcept {
  for (auto& count : plan::g_dispatches) count.store(0, std::memory_order_relaxed);
}

}  // namespace qmlp
