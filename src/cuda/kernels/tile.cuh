#pragma once

#include <cuda.h>

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"

// Many rows of x, sm_90a: a persistent CTA takes 128 rows of MMA operand A (8 tiles) by kTokens
// tokens. One warp copies x by TMA and the tiles' chunks by bulk copies; two warpgroups decode
// their weights into registers and multiply with wgmma, whose chain of 16-wide steps has the bits
// of mma.sync's.
namespace qmlp::cuda {

constexpr int kCtaTiles = 8;
constexpr int kConsumerThreads = 256;
constexpr int kTileThreads = 128 + kConsumerThreads;

struct TileArgs {
  MatmulArgs matmul;
  int num_stages;
  int raster;  // row groups that follow each other before the next token block
};

template <int kTokens>
QMLP_HOST_DEVICE constexpr int tile_x_bytes() {
  return kTokens * kChunkK * 2;
}
// Bytes of a stage: x, then the chunk of each tile. 1024-byte aligned for the swizzle.
template <int kTokens>
QMLP_HOST_DEVICE constexpr int tile_stage_bytes(const TileFormat& format) {
  return (tile_x_bytes<kTokens>() + kCtaTiles * format.chunk_bytes(0) + 1023) / 1024 * 1024;
}

// The sums of a thread's row of a tile: tokens m, m + 1, m + 8, m + 9, ...
template <class T, int kTokens>
__device__ __forceinline__ void finish_tokens(const EpilogueArgs& epilogue, std::int64_t tile, int g,
                                              std::int64_t m, std::int64_t M,
                                              const float (&acc)[kTokens / 2]) {
  const bool plain = epilogue.is_swiglu && !epilogue.wide && epilogue.linear_bias[0] == nullptr &&
                     epilogue.linear_bias[1] == nullptr && epilogue.gate_tap == nullptr;
  if (plain) {
    const std::int64_t n = tile * kHalfRows + g;
    if (n >= epilogue.N) return;
    auto* out = static_cast<std::uint16_t*>(epilogue.out) + m * epilogue.out_stride + n;
    const float scale0 = epilogue.unscale[0], scale1 = epilogue.unscale[1];
#pragma unroll
    for (int b = 0; b < kTokens / 8; ++b) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (m + b * 8 + e < M) {
          const float gate = rounded<T>(__fmul_rn(acc[4 * b + e], scale0));
          const float up = rounded<T>(__fmul_rn(acc[4 * b + 2 + e], scale1));
          out[e * epilogue.out_stride] =
              to_bits<T>(__fmul_rn(rounded<T>(__fmul_rn(gate, sigmoid<T>(gate))), up));
        }
      }
      out += 8 * epilogue.out_stride;
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < kTokens / 8; ++b) {
    const std::int64_t at = m + b * 8;
    if (at < M) finish<T>(epilogue, tile, g, at, acc[4 * b], acc[4 * b + 2]);
    if (at + 1 < M) finish<T>(epilogue, tile, g, at + 1, acc[4 * b + 1], acc[4 * b + 3]);
  }
}

template <class T, int kTokens, int kBits>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_kernel(const __grid_constant__ TileArgs args, const __grid_constant__ CUtensorMap x_map) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  constexpr int kMaxTileStages = 16;
  __shared__ __align__(8) std::uint64_t full[kMaxTileStages], empty[kMaxTileStages];
  const MatmulArgs& matmul = args.matmul;
  const TileFormat& format = matmul.format;
  const std::uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint8_t* base_pointer = shared + (base - shared_address(shared));
  const int stage_bytes = tile_stage_bytes<kTokens>(format);
  const int num_stages = args.num_stages;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int C = static_cast<int>(matmul.num_chunks);
  const int row_groups = static_cast<int>((matmul.num_tiles + kCtaTiles - 1) / kCtaTiles);
  const int token_blocks = static_cast<int>((matmul.M + kTokens - 1) / kTokens);
  const long long total = static_cast<long long>(row_groups) * token_blocks;

  if (threadIdx.x == 0) {
    for (int i = 0; i < num_stages; ++i) {
      barrier_init(shared_address(full + i), 1);
      barrier_init(shared_address(empty + i), kConsumerThreads / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents();

  // Neighbouring CTAs share a token block's x in L2 and a band of row groups.
  const auto place = [&](long long index, int& row_group, int& token_block) {
    const long long band = static_cast<long long>(args.raster) * token_blocks;
    const int b = static_cast<int>(index / band), r = static_cast<int>(index % band);
    const int left = row_groups - b * args.raster;
    const int width = left < args.raster ? left : args.raster;
    token_block = r / width;
    row_group = b * args.raster + r % width;
  };

  const ChunkShape shape = chunk_shape(format);
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp != 0) return;
    // Lane i < 8 copies tile i's chunks; lane 0 also announces the bytes and copies x.
    int slot = 0;
    std::uint32_t round = 0;
    bool waited = false;
    for (long long index = blockIdx.x; index < total; index += gridDim.x) {
      int row_group, token_block;
      place(index, row_group, token_block);
      const std::int64_t first_tile = static_cast<std::int64_t>(row_group) * kCtaTiles;
      const int tiles = static_cast<int>(
          matmul.num_tiles - first_tile < kCtaTiles ? matmul.num_tiles - first_tile : kCtaTiles);
      const std::uint8_t* from = matmul.weights + (first_tile + lane) * matmul.tile_bytes;
      for (int c = 0; c < C; ++c) {
        barrier_wait(shared_address(empty + slot), (round & 1) ^ 1);
        const std::uint32_t barrier = shared_address(full + slot), to = base + slot * stage_bytes;
        const std::uint32_t bytes = shape.bytes[c & 1];
        if (lane == 0) barrier_expect(barrier, tile_x_bytes<kTokens>() + tiles * bytes);
        __syncwarp();
        if (lane < tiles) {
          bulk_copy(to + tile_x_bytes<kTokens>() + lane * bytes, from, bytes, barrier);
        }
        from += bytes;
        if (!waited) {  // weights do not depend on the kernel before; x does
          wait_for_previous_grid();
          waited = true;
        }
        if (lane == 0) tensor_copy_2d(to, &x_map, c * kChunkK, token_block * kTokens, barrier);
        if (++slot == num_stages) slot = 0, ++round;
      }
    }
    if (!waited) wait_for_previous_grid();
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_previous_grid();  // the residual, and out itself, may be the kernel before's
  const int consumer = warp - 4, g = lane / 4, t = lane % 4;
  int slot = 0;
  std::uint32_t round = 0;
  for (long long index = blockIdx.x; index < total; index += gridDim.x) {
    int row_group, token_block;
    place(index, row_group, token_block);
    float acc[kTokens / 2];
    Scales<T> scales[2][2] = {};
    const auto work = [&](int parity, int accumulate) {
      std::uint32_t a[2][4][2];
      barrier_wait(shared_address(full + slot), round & 1);
      const std::uint8_t* stage = base_pointer + slot * stage_bytes;
      decode_chunk<T, kBits>(format, shape, parity,
                             stage + tile_x_bytes<kTokens>() + consumer * shape.bytes[parity], lane,
                             scales, a);
      const std::uint64_t descriptor = swizzled_descriptor(base + slot * stage_bytes);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wgmma<T, kTokens>(acc, a[0][j][0], a[1][j][0], a[0][j][1], a[1][j][1], descriptor + 2 * j,
                          j > 0 ? 1 : accumulate);
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(empty + slot));
      if (++slot == num_stages) slot = 0, ++round;
    };
    int c = 0;
    for (; c + 1 < C; c += 2) {
      work(0, c);
      work(1, 1);
    }
    if (c < C) work(0, c);
    const std::int64_t tile = static_cast<std::int64_t>(row_group) * kCtaTiles + consumer;
    if (tile >= matmul.num_tiles) continue;
    finish_tokens<T, kTokens>(matmul.epilogue, tile, g,
                              static_cast<std::int64_t>(token_block) * kTokens + t * 2, matmul.M, acc);
  }
}

}  // namespace qmlp::cuda
