#pragma once

#include <cuda.h>

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/kernels/ring.cuh"

// Many rows of x, sm_90a: a persistent CTA takes 128 rows of MMA operand A (8 tiles, one a warp) by
// kTokens tokens. A producer warp copies x by TMA; each of the eight consumer warps streams its own
// tile through a ring, as the stream kernel does, decodes it into registers and multiplies with
// wgmma, whose chain of 16-wide steps has the bits of mma.sync's.
namespace qmlp::cuda {

constexpr int kCtaTiles = 8;
constexpr int kConsumerThreads = 256;
constexpr int kTileThreads = 128 + kConsumerThreads;
constexpr int kMaxXStages = 12;

struct TileArgs {
  MatmulArgs matmul;
  int x_stages;
  int weight_stages;
  int raster;  // row groups that follow each other before the next token block
};

template <int kTokens>
QMLP_HOST_DEVICE constexpr int tile_x_bytes() {
  return kTokens * kChunkK *
         2;  // (kTokens, kChunkK), K-major, a multiple of the swizzle's 1024 bytes
}

// The sums of a thread's row of a tile: tokens m, m + 1, m + 8, m + 9, ...
template <class T, int kTokens>
__device__ __forceinline__ void finish_tokens(const EpilogueArgs& epilogue, std::int64_t tile,
                                              int g, std::int64_t m, std::int64_t M,
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
  __shared__ __align__(8) std::uint64_t full[kMaxXStages], empty[kMaxXStages];
  __shared__ __align__(8) std::uint64_t weight_barriers[kCtaTiles * kMaxStages];
  const MatmulArgs& matmul = args.matmul;
  const ChunkShape shape = chunk_shape(matmul.format);
  const std::uint32_t x_base = (shared_address(shared) + 1023) & ~1023u;
  const int x_stages = args.x_stages;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int C = static_cast<int>(matmul.num_chunks);
  const int row_groups = static_cast<int>((matmul.num_tiles + kCtaTiles - 1) / kCtaTiles);
  const int token_blocks = static_cast<int>((matmul.M + kTokens - 1) / kTokens);
  const long long total = static_cast<long long>(row_groups) * token_blocks;

  if (threadIdx.x == 0) {
    for (int i = 0; i < x_stages; ++i) {
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

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x != 0) return;
    wait_for_previous_grid();
    int slot = 0;
    std::uint32_t round = 0;
    for (long long index = blockIdx.x; index < total; index += gridDim.x) {
      int row_group, token_block;
      place(index, row_group, token_block);
      for (int c = 0; c < C; ++c) {
        barrier_wait(shared_address(empty + slot), (round & 1) ^ 1);
        const std::uint32_t barrier = shared_address(full + slot);
        barrier_expect(barrier, tile_x_bytes<kTokens>());
        tensor_copy_2d(x_base + slot * tile_x_bytes<kTokens>(), &x_map, c * kChunkK,
                       token_block * kTokens, barrier);
        if (++slot == x_stages) slot = 0, ++round;
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int consumer = warp - 4, g = lane / 4, t = lane % 4;
  const std::uint32_t stage_bytes = (shape.bytes[0] + shape.bytes[1]) * (kStageChunks / 2);
  const int stages_per_tile = (C + kStageChunks - 1) / kStageChunks;
  const int last_chunks = C - (stages_per_tile - 1) * kStageChunks;
  const std::uint32_t last_bytes =
      (shape.bytes[0] + shape.bytes[1]) * (last_chunks / 2) + shape.bytes[0] * (last_chunks % 2);
  const std::uint32_t ring_base =
      x_base + x_stages * tile_x_bytes<kTokens>() + consumer * args.weight_stages * stage_bytes;
  const std::uint8_t* ring_data = shared + (ring_base - shared_address(shared));
  const Ring<true> ring{ring_base, shared_address(weight_barriers + consumer * kMaxStages),
                        stage_bytes, args.weight_stages};
  ring.init(lane);

  // Where the next copy of weights comes from. A warp past the last tile streams the last one
  // again.
  long long produced_index = blockIdx.x;
  int produced_slot = 0, produced_stage = 0;
  const std::uint8_t* from = nullptr;
  const auto produce = [&] {
    if (produced_index >= total) return;
    if (produced_stage == 0) {
      int row_group, token_block;
      place(produced_index, row_group, token_block);
      const std::int64_t tile = static_cast<std::int64_t>(row_group) * kCtaTiles + consumer;
      const std::int64_t last = matmul.num_tiles - 1;
      from = matmul.weights + (tile < last ? tile : last) * matmul.tile_bytes;
    }
    const bool last = produced_stage + 1 == stages_per_tile;
    ring.fill(produced_slot, from, last ? last_bytes : stage_bytes, lane);
    from += stage_bytes;
    if (++produced_slot == args.weight_stages) produced_slot = 0;
    if (++produced_stage == stages_per_tile) {
      produced_stage = 0;
      produced_index += gridDim.x;
    }
  };
  // Weights do not depend on the kernel before; x, the residual and out itself may.
  for (int i = 0; i < args.weight_stages; ++i) produce();
  wait_for_previous_grid();

  int slot = 0, weight_slot = 0, stage_chunk = 0;
  std::uint32_t round = 0, weight_round = 0;
  const std::uint8_t* chunk = ring_data;
  for (long long index = blockIdx.x; index < total; index += gridDim.x) {
    int row_group, token_block;
    place(index, row_group, token_block);
    float acc[kTokens / 2];
    Scales<T> scales[2][2] = {};
    // Two sets of A fragments: one is decoded while the tensor cores still read the other.
    std::uint32_t even[2][4][2], odd[2][4][2];
    const auto decode = [&](int parity, int c, std::uint32_t(&a)[2][4][2]) {
      if (stage_chunk == 0) {
        ring.wait(weight_slot, weight_round);
        chunk = ring_data + weight_slot * stage_bytes;
      }
      decode_chunk<T, kBits>(matmul.format, shape, parity, chunk, lane, scales, a);
      chunk += shape.bytes[parity];
      if (++stage_chunk == kStageChunks || c + 1 == C) {
        stage_chunk = 0;
        __syncwarp();
        produce();
        if (++weight_slot == args.weight_stages) weight_slot = 0, ++weight_round;
      }
    };
    const auto multiply = [&](const std::uint32_t(&a)[2][4][2], int accumulate) {
      barrier_wait(shared_address(full + slot), round & 1);
      const std::uint64_t descriptor = swizzled_descriptor(x_base + slot * tile_x_bytes<kTokens>());
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wgmma<T, kTokens>(acc, a[0][j][0], a[1][j][0], a[0][j][1], a[1][j][1], descriptor + 2 * j,
                          j > 0 ? 1 : accumulate);
      }
      wgmma_commit();
      if (++slot == x_stages) slot = 0, ++round;
    };
    const auto release = [&] {  // the slot before `slot`
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(shared_address(empty + (slot == 0 ? x_stages : slot) - 1));
    };
    decode(0, 0, even);
    for (int c = 0; c < C; c += 2) {
      multiply(even, c);
      if (c + 1 < C) decode(1, c + 1, odd);
      release();
      if (c + 1 < C) {
        multiply(odd, 1);
        if (c + 2 < C) decode(0, c + 2, even);
        release();
      }
    }
    const std::int64_t tile = static_cast<std::int64_t>(row_group) * kCtaTiles + consumer;
    if (tile >= matmul.num_tiles) continue;
    finish_tokens<T, kTokens>(matmul.epilogue, tile, g,
                              static_cast<std::int64_t>(token_block) * kTokens + t * 2, matmul.M,
                              acc);
  }
}

}  // namespace qmlp::cuda
