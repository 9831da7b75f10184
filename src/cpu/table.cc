#include <limits>

#include "cpu/pack.h"
#include "cpu/run.h"
#include "plan/kernel.h"

namespace qmlp::plan {
namespace {

constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();

// A kernel serves every bits, group and scale type; `k16` marks the steps of the tensor contract.
#define QMLP_CPU_KERNELS(isa, f32_tile)                                                            \
  QMLP_CPU_OP(swiglu, isa, f32_tile), QMLP_CPU_OP(linear, isa, f32_tile)
#define QMLP_CPU_OP(op, isa, f32_tile)                                                             \
  QMLP_CPU_ROW(op, bf16, isa, f32_tile, f32), QMLP_CPU_ROW(op, f16, isa, f32_tile, f32),           \
      QMLP_CPU_ROW(op, f32, isa, f32_tile, f32), QMLP_CPU_ROW(op, bf16, isa, m1n16k16, tensor),    \
      QMLP_CPU_ROW(op, f16, isa, m1n16k16, tensor)
#define QMLP_CPU_ROW(op, dtype, isa, tile, accumulation)                                           \
  Kernel {                                                                                         \
    #op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa,                          \
        Accumulation::accumulation, cpu::kLayoutN16, 0, kAnyM, cpu::run_kernel,                    \
        cpu::kernel_workspace_bytes                                                                \
  }

constexpr Kernel kCpuKernels[] = {
#if defined(__x86_64__)
    QMLP_CPU_KERNELS(avx512, m12n32),
    QMLP_CPU_KERNELS(avx2, m6n16),
#endif
    QMLP_CPU_KERNELS(portable, m6n16),
};

constexpr std::uint32_t kLayoutFragment = 16;

// Rows of every build; their code comes with CUDA.
#define QMLP_CUDA_ROW(op, dtype, isa, tile, M_begin, M_end)                                        \
  Kernel {                                                                                         \
    #op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa, Accumulation::tensor,    \
        kLayoutFragment, M_begin, M_end, nullptr, nullptr                                          \
  }
#define QMLP_CUDA_OP(op, dtype)                                                                    \
  QMLP_CUDA_ROW(op, dtype, sm90a, m16n16k16, 0, 17),                                               \
      QMLP_CUDA_ROW(op, dtype, sm90a, m256n128k64, 17, kAnyM),                                     \
      QMLP_CUDA_ROW(op, dtype, sm80, m16n16k16, 0, kAnyM)

constexpr Kernel kCudaKernels[] = {
    QMLP_CUDA_OP(swiglu, bf16),
    QMLP_CUDA_OP(swiglu, f16),
    QMLP_CUDA_OP(linear, bf16),
    QMLP_CUDA_OP(linear, f16),
};

}  // namespace

std::span<const Kernel> kernels(DeviceKind kind) noexcept {
  if (kind == DeviceKind::cpu) return kCpuKernels;
  if (kind == DeviceKind::cuda) return kCudaKernels;
  return {};
}

}  // namespace qmlp::plan
