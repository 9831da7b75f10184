#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "heads_items.h"

namespace qmlp_mlx {
namespace {

struct Bf16 {
  using Type = __nv_bfloat16;
  static __device__ float wide(Type v) { return __bfloat162float(v); }
  static __device__ Type narrow(float v) { return __float2bfloat16_rn(v); }
};
struct F16 {
  using Type = __half;
  static __device__ float wide(Type v) { return __half2float(v); }
  static __device__ Type narrow(float v) { return __float2half_rn(v); }
};

// grid: (rows, blocks over a row's threads)
template <class Number>
__global__ void __launch_bounds__(kHeadsBlock) heads_kernel(const __grid_constant__ HeadsArgs a) {
  heads_item<Number>(a, static_cast<int>(blockIdx.x),
                     static_cast<int>(blockIdx.y * kHeadsBlock + threadIdx.x));
}

// grid: (blocks over a room, rooms)
__global__ void __launch_bounds__(kCarryBlock) carry_kernel(const __grid_constant__ CarryArgs a) {
  const std::int64_t count = std::int64_t{a.batch} * a.heads * a.room * a.width;
  std::int64_t i = std::int64_t{blockIdx.x} * kCarryBlock + threadIdx.x;
  for (; i < count; i += std::int64_t{gridDim.x} * kCarryBlock) {
    carry_item<uint4>(a, static_cast<int>(blockIdx.y), i);
  }
}

// A kernel's function on the current device; `known` is by device.
constexpr int kDevices = 64;
using Known = std::atomic<void*>[kDevices];

template <class Kernel>
void* function_of(Kernel* kernel, Known& known) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  if (device < kDevices) {
    void* const found = known[device].load(std::memory_order_acquire);
    if (found != nullptr) return found;
  }
  cudaFunction_t function = nullptr;
  if (cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(kernel)) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the caller's next check is of its own calls
    return nullptr;
  }
  if (device < kDevices) known[device].store(function, std::memory_order_release);
  return function;
}

}  // namespace

void* heads_function(bool bf16) {
  static Known of_bf16, of_f16;
  return bf16 ? function_of(heads_kernel<Bf16>, of_bf16) : function_of(heads_kernel<F16>, of_f16);
}
void* carry_function() {
  static Known known;
  return function_of(carry_kernel, known);
}

}  // namespace qmlp_mlx
