#pragma once

#include <algorithm>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/stream.cuh"

namespace qmlp::cuda {

// Shared memory that x may take beside the rings.
constexpr std::size_t kMaxSharedX = 132 << 10;

inline std::size_t shared_x_bytes(std::int64_t num_chunks, int token_blocks, bool one_row) {
  return static_cast<std::size_t>(num_chunks) * (one_row ? 4 : 32 * token_blocks) * 32;
}

inline const void* rows_from(const void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<const std::uint16_t*>(rows) + elements;
}
inline void* rows_from(void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<std::uint16_t*>(rows) + elements;
}

struct StreamShape {
  int warps, stages, grid, blocks;
  std::size_t shared_bytes;
};

// Warps and stages: as many bytes in flight as shared memory holds, and an even share of the tiles.
inline StreamShape stream_shape(const MatmulArgs& args, const DeviceFacts& device,
                                std::size_t x_bytes, bool bulk) {
  const std::size_t stage = static_cast<std::size_t>(args.format.offset(kStageChunks));
  const std::size_t room = device.smem_bytes - x_bytes - 1024;
  const int stages_per_tile = static_cast<int>((args.num_chunks + kStageChunks - 1) / kStageChunks);
  const std::int64_t per_sm = (args.num_tiles + device.num_sms - 1) / device.num_sms;
  StreamShape shape{};
  shape.stages = bulk ? std::min(kMaxStages, std::max(2, stages_per_tile)) : kMaxStages;
  const auto fits = [&](int warps, int stages) {
    return static_cast<std::size_t>(warps) * stages * (stage + 8) + 128 <= room;
  };
  shape.warps = static_cast<int>(std::clamp<std::int64_t>(per_sm, 1, 16));
  // Every warp of a CTA works on `rounds` tiles; fewer warps that share them evenly do as well.
  const std::int64_t rounds = (per_sm + shape.warps - 1) / shape.warps;
  shape.warps = static_cast<int>((per_sm + rounds - 1) / rounds);
  while (bulk && shape.stages > 2 && !fits(shape.warps, shape.stages)) --shape.stages;
  while (shape.warps > 1 && !fits(shape.warps, shape.stages)) --shape.warps;
  shape.grid = static_cast<int>(
      std::min<std::int64_t>((args.num_tiles + shape.warps - 1) / shape.warps, device.num_sms));
  shape.shared_bytes =
      static_cast<std::size_t>(shape.warps) * shape.stages * (stage + 8) + 128 + x_bytes;
  return shape;
}

template <class T, int kTokenBlocks, bool kOneRow, int kBits, int kGroup, bool kBulk, bool kSharedX>
int launch_stream_kernel(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  const auto kernel = stream_kernel<T, kTokenBlocks, kOneRow, kBits, kGroup, kBulk, kSharedX>;
  const std::size_t x_bytes = kSharedX ? shared_x_bytes(args.num_chunks, kTokenBlocks, kOneRow) : 0;
  const StreamShape shape = stream_shape(args, device, x_bytes, kBulk);
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(device.smem_bytes - 512));
      e != cudaSuccess) {
    return e;
  }
  const std::int64_t token_tiles =
      kOneRow ? args.M : (args.M + kTokenBlocks * 8 - 1) / (kTokenBlocks * 8);
  constexpr std::int64_t kMaxGridY = 65535;
  for (std::int64_t y = 0; y < token_tiles; y += kMaxGridY) {
    const std::int64_t count = std::min(kMaxGridY, token_tiles - y);
    MatmulArgs part = args;
    const std::int64_t m = y * (kOneRow ? 1 : kTokenBlocks * 8);
    part.x = rows_from(args.x, m * args.x_stride);
    part.epilogue.out = rows_from(args.epilogue.out, m * args.epilogue.out_stride);
    part.epilogue.residual = rows_from(args.epilogue.residual, m * args.epilogue.residual_stride);
    part.epilogue.gate_tap = rows_from(args.epilogue.gate_tap, m * args.epilogue.gate_tap_stride);
    part.M = std::min<std::int64_t>(args.M - m, count * (kOneRow ? 1 : kTokenBlocks * 8));
    if constexpr (!kOneRow) {
      if (args.x_fragments != nullptr) {
        const dim3 grid(8, static_cast<unsigned>(count));
        lay_out_x_kernel<kTokenBlocks><<<grid, 256, 0, stream>>>(part);
      }
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(shape.grid), static_cast<unsigned>(count));
    config.blockDim = dim3(static_cast<unsigned>(shape.warps) * 32);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute dependent = {};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &dependent;
    config.numAttrs = kBulk ? 1 : 0;
    if (const cudaError_t e = cudaLaunchKernelEx(&config, kernel, part, shape.stages);
        e != cudaSuccess) {
      return e;
    }
  }
  return cudaSuccess;
}

template <class T, int kBits, int kGroup, bool kBulk>
int launch_stream_shared(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  if (args.M == 1) {
    return launch_stream_kernel<T, 1, true, kBits, kGroup, kBulk, true>(args, device, stream);
  }
  if (args.M <= 8) {
    return launch_stream_kernel<T, 1, false, kBits, kGroup, kBulk, true>(args, device, stream);
  }
  return launch_stream_kernel<T, 2, false, kBits, kGroup, kBulk, true>(args, device, stream);
}

template <class T, int kBits, bool kBulk>
int launch_stream_tokens(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  if (args.x_fragments == nullptr) {
    // MLX's own default group, and that of GGUF's types.
    if constexpr (kBits != 0) {
      const HalfFormat* half = args.format.half;
      if (half[0].group_size == 64 && half[1].group_size == 64) {
        return launch_stream_shared<T, kBits, 64, kBulk>(args, device, stream);
      }
      if constexpr (kBits == 4 || kBits == 8) {
        if (half[0].group_size == 32 && half[1].group_size == 32) {
          return launch_stream_shared<T, kBits, 32, kBulk>(args, device, stream);
        }
      }
    }
    return launch_stream_shared<T, kBits, 0, kBulk>(args, device, stream);
  }
  if (args.M <= 8) {
    return launch_stream_kernel<T, 1, false, kBits, 0, kBulk, false>(args, device, stream);
  }
  return launch_stream_kernel<T, 2, false, kBits, 0, kBulk, false>(args, device, stream);
}

}  // namespace qmlp::cuda
