#pragma once

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/kernels/segments.cuh"

namespace qmlp::cuda {

constexpr int kCombineWarps = 4;

// Adds the sums of segments that tile kernels left, [tile][block of 8 tokens][segment][lane], a
// warp a tile, a blockIdx.y a block, and finishes them.
template <class T>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_kernel(const __grid_constant__ EpilogueArgs epilogue, const float4* partials,
                   int num_tiles, std::int64_t M, int segments) {
  launch_dependents();
  const int tile = static_cast<int>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const float4* const from =
      partials + (static_cast<std::int64_t>(tile) * gridDim.y + blockIdx.y) * segments * 32 + lane;
  wait_for_previous_grid();
  if (tile >= num_tiles) return;
  const auto partial = [&](int segment) { return from[segment * 32]; };
  const float4 sum = sum_segments(partial(0), segments, partial);
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  const std::int64_t m = std::int64_t{8} * blockIdx.y;
  if (word_stores_suffice(epilogue)) {
    store_words<T, 1>(epilogue, tile, lane, m, M, sums);
  } else {
    store_elements<T, 1>(epilogue, tile, lane, m, M, sums);
  }
}

}  // namespace qmlp::cuda
