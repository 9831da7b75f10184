#include <cuda_bf16.h>

#include "gpu_kernels.h"

namespace gpu {
namespace {

__global__ void read_kernel(const uint4* data, std::size_t count, uint4* sink) {
  uint4 sum = {0, 0, 0, 0};
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < 4; ++u) sum.x ^= v[u].x, sum.y ^= v[u].y, sum.z ^= v[u].z, sum.w ^= v[u].w;
  }
  for (; i < count; i += stride) {
    const uint4 v = __ldcs(data + i);
    sum.x ^= v.x, sum.y ^= v.y, sum.z ^= v.z, sum.w ^= v.w;
  }
  if ((sum.x & sum.y & sum.z & sum.w) == 0x12345678u) *sink = sum;
}

__global__ void silu_mul_kernel(const __nv_bfloat16* in, __nv_bfloat16* out, std::int64_t M,
                                std::int64_t I) {
  const std::int64_t i = (blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x) * 8;
  if (i >= M * I) return;
  const std::int64_t m = i / I, n = i % I;
  const uint4 a = *reinterpret_cast<const uint4*>(in + m * 2 * I + n);
  const uint4 b = *reinterpret_cast<const uint4*>(in + m * 2 * I + I + n);
  uint4 r;
  const auto* g = reinterpret_cast<const __nv_bfloat16*>(&a);
  const auto* u = reinterpret_cast<const __nv_bfloat16*>(&b);
  auto* h = reinterpret_cast<__nv_bfloat16*>(&r);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float x = __bfloat162float(g[e]);
    h[e] = __float2bfloat16(x / (1.0f + __expf(-x)) * __bfloat162float(u[e]));
  }
  *reinterpret_cast<uint4*>(out + i) = r;
}

__global__ void fill_kernel(__nv_bfloat16* data, std::size_t count) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  std::uint64_t h = (i + 1) * 0x9E3779B97F4A7C15ull;
  h ^= h >> 32;
  h *= 0xD6E8FEB86659FD93ull;
  float sum = -2.0f;
  for (int k = 0; k < 4; ++k) sum += static_cast<float>(h >> (16 * k) & 0xFFFF) / 65536.0f;
  data[i] = __float2bfloat16(0.05f * sum);
}

}  // namespace

void launch_read(const void* data, std::size_t bytes, void* sink, int grid, int threads,
                 cudaStream_t stream) {
  read_kernel<<<grid, threads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16,
                                            static_cast<uint4*>(sink));
}

void launch_silu_mul(const void* in, void* out, std::int64_t M, std::int64_t I,
                     cudaStream_t stream) {
  const std::int64_t threads = (M * I + 7) / 8;
  silu_mul_kernel<<<static_cast<unsigned>((threads + 255) / 256), 256, 0, stream>>>(
      static_cast<const __nv_bfloat16*>(in), static_cast<__nv_bfloat16*>(out), M, I);
}

void fill_random(void* data, std::size_t count, cudaStream_t stream) {
  fill_kernel<<<static_cast<unsigned>((count + 255) / 256), 256, 0, stream>>>(
      static_cast<__nv_bfloat16*>(data), count);
}

}  // namespace gpu
