#include <limits>

#include "cpu/pack.h"
#include "cpu/run.h"
#include "plan/kernel.h"

namespace qmlp::plan {
namespace {

constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();

// A kernel serves every bits, group and scale type; `k16` marks the steps of the tensor contract.
#define QMLP_CPU_ROW(op, dtype, isa, tile, accumulation, body, M_end)                      \
  Kernel {                                                                                 \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa,                 \
        Accumulation::accumulation, cpu::body, cpu::kLayoutN16, 0, M_end, cpu::run_kernel, \
        cpu::kernel_workspace_bytes                                                        \
  }
#define QMLP_CPU_TYPES(op, isa, tile, body, M_end)        \
  QMLP_CPU_ROW(op, bf16, isa, tile, f32, body, M_end),    \
      QMLP_CPU_ROW(op, f16, isa, tile, f32, body, M_end), \
      QMLP_CPU_ROW(op, f32, isa, tile, f32, body, M_end)
#define QMLP_CPU_TENSOR(op, isa)                                 \
  QMLP_CPU_ROW(op, bf16, isa, m1n16k16, tensor, kTensor, kAnyM), \
      QMLP_CPU_ROW(op, f16, isa, m1n16k16, tensor, kTensor, kAnyM)
#define QMLP_CPU_SIMD(op, isa, tile)                                                      \
  QMLP_CPU_TYPES(op, isa, m4n16, kRows, 5), QMLP_CPU_TYPES(op, isa, tile, kTiles, kAnyM), \
      QMLP_CPU_TENSOR(op, isa)
#define QMLP_CPU_PORTABLE(op) \
  QMLP_CPU_TYPES(op, portable, m6n16, kTiles, kAnyM), QMLP_CPU_TENSOR(op, portable)

constexpr Kernel kCpuKernels[] = {
#if defined(__x86_64__)
    QMLP_CPU_SIMD(swiglu, avx512, m12n32),
    QMLP_CPU_SIMD(linear, avx512, m12n32),
    QMLP_CPU_SIMD(swiglu, avx2, m6n16),
    QMLP_CPU_SIMD(linear, avx2, m6n16),
#endif
    QMLP_CPU_PORTABLE(swiglu),
    QMLP_CPU_PORTABLE(linear),
};

constexpr std::uint32_t kLayoutFragment = 16;

// Rows of every build; their code comes with CUDA.
#define QMLP_CUDA_ROW(op, dtype, isa, tile, M_begin, M_end)                                      \
  Kernel {                                                                                       \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa, Accumulation::tensor, \
        0, kLayoutFragment, M_begin, M_end, nullptr, nullptr                                     \
  }
#define QMLP_CUDA_OP(op, dtype)                                \
  QMLP_CUDA_ROW(op, dtype, sm90a, m16n16k16, 0, 17),           \
      QMLP_CUDA_ROW(op, dtype, sm90a, m256n128k64, 17, kAnyM), \
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
