#pragma once

#include <algorithm>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/launch_kernel.cuh"
#include "cuda/kernels/stream.cuh"

namespace qmlp::cuda {

// Shared memory that x may take: what is left beside a ring of the largest stages (dense weights).
inline std::size_t max_shared_x(const DeviceFacts& device) {
  constexpr std::size_t kRing = 95 << 10;
  return device.smem_bytes > kRing ? device.smem_bytes - kRing : 0;
}

inline std::size_t shared_x_bytes(std::int64_t num_chunks, std::int64_t rows) {
  return static_cast<std::size_t>(x_row_bytes(num_chunks)) * static_cast<std::size_t>(rows);
}

inline const void* rows_from(const void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<const std::uint16_t*>(rows) + elements;
}
inline void* rows_from(void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<std::uint16_t*>(rows) + elements;
}

template <class T, int kTokenBlocks, int kBits, int kGroup, bool kBulk, bool kSharedX>
int launch_stream_kernel(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  const auto kernel = stream_kernel<T, kTokenBlocks, kBits, kGroup, kBulk, kSharedX>;
  constexpr int kRows = kTokenBlocks * 8;
  const std::size_t x_bytes =
      kSharedX ? shared_x_bytes(args.num_chunks, std::min<std::int64_t>(args.M, kRows)) : 0;
  const StreamChoice shape =
      choose_stream({args.format, args.num_tiles, args.num_chunks, args.segments, kTokenBlocks,
                     x_bytes, kBulk ? 0 : kCopyStages},
                    device);
  const std::int64_t token_tiles = (args.M + kRows - 1) / kRows;
  constexpr std::int64_t kMaxGridY = 65535;
  for (std::int64_t y = 0; y < token_tiles; y += kMaxGridY) {
    const std::int64_t count = std::min(kMaxGridY, token_tiles - y);
    MatmulArgs part = args;
    const std::int64_t m = y * kRows;
    part.x = rows_from(args.x, m * args.x_stride);
    part.epilogue.out = rows_from(args.epilogue.out, m * args.epilogue.out_stride);
    part.epilogue.residual = rows_from(args.epilogue.residual, m * args.epilogue.residual_stride);
    part.epilogue.gate_tap = rows_from(args.epilogue.gate_tap, m * args.epilogue.gate_tap_stride);
    part.M = std::min<std::int64_t>(args.M - m, count * kRows);
    if constexpr (!kSharedX) {
      const dim3 grid(8, static_cast<unsigned>(count));
      lay_out_x_kernel<kTokenBlocks><<<grid, 256, 0, stream>>>(part);
    }
    const LaunchShape launch = {
        dim3(static_cast<unsigned>(shape.grid), static_cast<unsigned>(count)),
        static_cast<unsigned>(shape.warps) * 32, shape.shared_bytes, kBulk};
    if (const cudaError_t e =
            launch_kernel(kernel, launch, device, stream, part, shape.stages, shape.stage_chunks);
        e != cudaSuccess) {
      return e;
    }
  }
  return cudaSuccess;
}

template <class T, int kBits, int kGroup, bool kBulk>
int launch_stream_tokens(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  const bool one = args.M <= 8;
  if (args.x_fragments == nullptr) {
    return one ? launch_stream_kernel<T, 1, kBits, kGroup, kBulk, true>(args, device, stream)
               : launch_stream_kernel<T, 2, kBits, kGroup, kBulk, true>(args, device, stream);
  }
  return one ? launch_stream_kernel<T, 1, kBits, kGroup, kBulk, false>(args, device, stream)
             : launch_stream_kernel<T, 2, kBits, kGroup, kBulk, false>(args, device, stream);
}

}  // namespace qmlp::cuda
