#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Small kernels that the measurements compare with.
namespace gpu {

void launch_read(const void* data, std::size_t bytes, void* sink, int grid, int threads,
                 cudaStream_t stream);
// out[M, I] = silu(in[:, :I]) * in[:, I:], bf16.
void launch_silu_mul(const void* in, void* out, std::int64_t M, std::int64_t I,
                     cudaStream_t stream);
void fill_random(void* data, std::size_t count, cudaStream_t stream);  // bf16, near normal

}  // namespace gpu
