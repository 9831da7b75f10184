#pragma once

#include <algorithm>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/launch_kernel.cuh"
#include "cuda/kernels/rows.h"
#include "cuda/kernels/stream.cuh"

namespace qmlp::cuda {

// Shared memory that x may take: what is left beside a ring of the largest stages (dense weights).
inline std::size_t max_shared_x(const DeviceFacts& device) {
  constexpr std::size_t kRing = 95 << 10;
  return device.smem_bytes > kRing ? device.smem_bytes - kRing : 0;
}

// Calls `launch(part, tiles)` for blocks of `rows` rows of x, as many at once as a grid may have.
template <class Launch>
int for_token_tiles(const MatmulArgs& args, int rows, Launch launch) {
  const std::int64_t token_tiles = (args.M + rows - 1) / rows;
  constexpr std::int64_t kMaxGridY = 65535;
  for (std::int64_t y = 0; y < token_tiles; y += kMaxGridY) {
    const std::int64_t count = std::min(kMaxGridY, token_tiles - y);
    const MatmulArgs part = rows_of(args, y * rows, count * rows);
    if (const cudaError_t e = launch(part, static_cast<unsigned>(count)); e != cudaSuccess) {
      return e;
    }
  }
  return cudaSuccess;
}

template <class T, int kTokenBlocks, int kBits, int kGroup, bool kBulk, bool kSharedX>
int launch_stream_kernel(const MatmulArgs& args, const DeviceFacts& device,
                         const LaunchTarget& target) {
  constexpr int kRows = kTokenBlocks * 8;
  const std::size_t x_bytes =
      kSharedX ? shared_x_bytes(args.num_chunks, std::min<std::int64_t>(args.M, kRows)) : 0;
  const StreamChoice shape =
      choose_stream({args.format, args.num_tiles, args.num_chunks, args.segments, kTokenBlocks,
                     x_bytes, kBulk ? 0 : kCopyStages},
                    device);
  return for_token_tiles(args, kRows, [&](const MatmulArgs& part, unsigned count) {
    if constexpr (!kSharedX) {
      if (const cudaError_t e =
              launch_kernel(lay_out_x_kernel<kTokenBlocks>, {dim3(8, count), 256, 0, false}, device,
                            target, part);
          e != cudaSuccess) {
        return e;
      }
    }
    return launch_kernel(stream_kernel<T, kTokenBlocks, kBits, kGroup, kBulk, kSharedX>,
                         {dim3(static_cast<unsigned>(shape.grid), count),
                          static_cast<unsigned>(shape.warps) * 32, shape.shared_bytes, kBulk},
                         device, target, part, shape.stages, shape.first_stages,
                         shape.stage_chunks);
  });
}

template <class T, int kBits, int kGroup, bool kBulk>
int launch_stream_tokens(const MatmulArgs& args, const DeviceFacts& device,
                         const LaunchTarget& target) {
  const bool one = args.M <= 8;
  if (args.scratch == nullptr) {
    return one ? launch_stream_kernel<T, 1, kBits, kGroup, kBulk, true>(args, device, target)
               : launch_stream_kernel<T, 2, kBits, kGroup, kBulk, true>(args, device, target);
  }
  return one ? launch_stream_kernel<T, 1, kBits, kGroup, kBulk, false>(args, device, target)
             : launch_stream_kernel<T, 2, kBits, kGroup, kBulk, false>(args, device, target);
}

}  // namespace qmlp::cuda
