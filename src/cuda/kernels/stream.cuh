#pragma once

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/kernels/ring.cuh"

// Few rows of x: every warp streams whole tiles of weights through its own ring of shared memory
// and sums them with mma.m16n8k16, one chain an output. Weights are operand A, so tokens are
// columns.
namespace qmlp::cuda {

// Where x's fragments are kept: two planes (steps 0 and 1, steps 2 and 3 of a chunk) of
// [chunk][token block][lane] 16-byte vectors, so that a warp's reads have no bank conflicts. A
// single row is kept once for all eight columns: [chunk][t]. This is the word of k = 8 v, 8 v + 1
// of row m; the next three pairs follow at the next lanes, 4 words apart.
template <int kTokenBlocks, bool kOneRow>
__device__ __forceinline__ int fragment_word(int num_chunks, int m, int v) {
  const int c = v / 8, r = v % 8, j = r / 2;
  const int lanes = kOneRow ? 4 : 32 * kTokenBlocks;
  const int lane = kOneRow ? 0 : m / 8 * 32 + m % 8 * 4;
  return ((j / 2 * num_chunks + c) * lanes + lane) * 4 + j % 2 * 2 + r % 2;
}

// Elements 8 v .. 8 v + 7 of a row, zero past K.
__device__ __forceinline__ uint4 load_eight(const std::uint16_t* row, int v, std::int64_t K) {
  const std::int64_t k = 8 * static_cast<std::int64_t>(v);
  if (k + 8 <= K && (reinterpret_cast<std::uintptr_t>(row) & 15) == 0) {
    return *reinterpret_cast<const uint4*>(row + k);
  }
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int64_t at = k + 2 * i;
    const std::uint32_t low = at < K ? row[at] : 0, high = at + 1 < K ? row[at + 1] : 0;
    words[i] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int kTokenBlocks, bool kOneRow>
__device__ __forceinline__ void lay_out_row(const MatmulArgs& args, std::int64_t m_begin, int m,
                                            std::uint32_t* fragments, int first, int step) {
  const int C = static_cast<int>(args.num_chunks);
  const bool exists = m_begin + m < args.M;
  const auto* row = static_cast<const std::uint16_t*>(args.x) + (m_begin + m) * args.x_stride;
  for (int v = first; v < C * 8; v += step) {
    const uint4 value = exists ? load_eight(row, v, args.K) : make_uint4(0, 0, 0, 0);
    std::uint32_t* to = fragments + fragment_word<kTokenBlocks, kOneRow>(C, m, v);
    to[0] = value.x, to[4] = value.y, to[8] = value.z, to[12] = value.w;
  }
}

template <int kTokenBlocks, bool kOneRow>
__device__ __forceinline__ void lay_out_x(const MatmulArgs& args, std::int64_t m_begin,
                                          std::uint32_t* fragments) {
  if constexpr (kOneRow) {
    lay_out_row<kTokenBlocks, true>(args, m_begin, 0, fragments, threadIdx.x, blockDim.x);
  } else {
    // A row a warp, or several warps a row.
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int kRows = kTokenBlocks * 8;
    const int share = warps > kRows ? warps / kRows : 1;
    if (warp < kRows * share) {
      for (int m = warp / share; m < kRows; m += warps / share) {
        lay_out_row<kTokenBlocks, false>(args, m_begin, m, fragments, warp % share * 32 + lane,
                                         32 * share);
      }
    }
  }
}

// Fragments of one block of tokens a blockIdx.y, for x that does not fit in shared memory.
template <int kTokenBlocks>
__global__ void lay_out_x_kernel(const MatmulArgs args) {
  const std::int64_t words = 4 * 2 * args.num_chunks * 32 * kTokenBlocks;
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kTokenBlocks * 8;
  std::uint32_t* fragments = args.x_fragments + blockIdx.y * words;
  for (int m = blockIdx.x; m < kTokenBlocks * 8; m += gridDim.x) {
    lay_out_row<kTokenBlocks, false>(args, m_begin, m, fragments, threadIdx.x, blockDim.x);
  }
}

// kBits: of both halves, or 0 to read each half's at run time. kGroup: of both halves, or 0.
// kSharedX: x is laid out in shared memory; else it comes from args.x_fragments.
template <class T, int kTokenBlocks, bool kOneRow, int kBits, int kGroup, bool kBulk, bool kSharedX>
__global__ void __launch_bounds__(512)
    stream_kernel(const __grid_constant__ MatmulArgs args, int num_stages) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int C = static_cast<int>(args.num_chunks);
  const TileFormat& format = args.format;
  const ChunkShape shape = chunk_shape(format);
  const std::uint32_t stage_bytes = (shape.bytes[0] + shape.bytes[1]) * (kStageChunks / 2);
  const int stages_per_tile = (C + kStageChunks - 1) / kStageChunks;
  const int last_chunks = C - (stages_per_tile - 1) * kStageChunks;
  const std::uint32_t last_bytes =
      (shape.bytes[0] + shape.bytes[1]) * (last_chunks / 2) + shape.bytes[0] * (last_chunks % 2);
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kTokenBlocks * 8;

  std::uint8_t* ring_data = shared + static_cast<std::size_t>(warp) * num_stages * stage_bytes;
  std::uint8_t* after_rings =
      shared + static_cast<std::size_t>(num_warps) * num_stages * stage_bytes;
  auto* barriers = reinterpret_cast<std::uint64_t*>(after_rings) + warp * num_stages;
  auto* x_shared = reinterpret_cast<std::uint32_t*>(after_rings +
                                                    (num_warps * num_stages * 8 + 127) / 128 * 128);
  const Ring<kBulk> ring{shared_address(ring_data), shared_address(barriers), stage_bytes,
                         num_stages};

  if constexpr (kBulk) launch_dependents();
  ring.init(lane);

  const int num_tiles = static_cast<int>(args.num_tiles);
  int tile = blockIdx.x + warp * gridDim.x;
  const int step = gridDim.x * num_warps;
  const int mine = tile < num_tiles ? (num_tiles - tile + step - 1) / step : 0;
  int to_produce = mine * stages_per_tile;
  int produced_slot = 0, produced_stage = 0;
  const std::uint8_t* from = args.weights + tile * args.tile_bytes;
  const auto produce = [&] {
    if (to_produce > 0) {
      --to_produce;
      const bool last = produced_stage + 1 == stages_per_tile;
      ring.fill(produced_slot, from, last ? last_bytes : stage_bytes, lane);
      if (++produced_slot == num_stages) produced_slot = 0;
      if (last) {
        produced_stage = 0;
        from += last_bytes + (step - 1) * args.tile_bytes;
      } else {
        ++produced_stage;
        from += stage_bytes;
      }
    }
    ring.commit();
  };
  for (int i = 0; i < num_stages; ++i) produce();

  // Weights do not depend on the kernel before; x does.
  if constexpr (kBulk) wait_for_previous_grid();
  constexpr int kFragmentLanes = kOneRow ? 4 : 32 * kTokenBlocks;
  const uint4* fragments;
  if constexpr (kSharedX) {
    lay_out_x<kTokenBlocks, kOneRow>(args, m_begin, x_shared);
    __syncthreads();
    fragments = reinterpret_cast<const uint4*>(x_shared);
  } else {
    fragments = reinterpret_cast<const uint4*>(args.x_fragments) +
                blockIdx.y * (static_cast<std::int64_t>(2) * C * kFragmentLanes);
  }
  const int plane = C * kFragmentLanes;
  const uint4* my_fragments = fragments + (kOneRow ? t : lane);

  int slot = 0;
  std::uint32_t round = 0;
  for (; tile < num_tiles; tile += step) {
    float acc[kTokenBlocks][4] = {};
    Scales<T> scales[2][2] = {};
    const uint4* x = my_fragments;
    for (int s = 0; s < stages_per_tile; ++s) {
      ring.wait(slot, round);
      const std::uint8_t* chunk = ring_data + slot * stage_bytes;
      const int count = s + 1 == stages_per_tile ? last_chunks : kStageChunks;
      const auto sum = [&](const std::uint32_t(&a)[2][4][2]) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
#pragma unroll
          for (int b = 0; b < kTokenBlocks; ++b) {
            const uint4 v = x[p * plane + b * 32];
            mma_m16n8k16<T>(acc[b], a[0][2 * p][0], a[1][2 * p][0], a[0][2 * p][1], a[1][2 * p][1],
                            v.x, v.y);
            mma_m16n8k16<T>(acc[b], a[0][2 * p + 1][0], a[1][2 * p + 1][0], a[0][2 * p + 1][1],
                            a[1][2 * p + 1][1], v.z, v.w);
          }
        }
        x += kFragmentLanes;
      };
      if constexpr (kGroup != 0) {
        constexpr TileFormat kFormat = kEvenFormat<kBits, kGroup>;
        const auto pair = [&](const std::uint8_t* even_chunk, bool both) {
          std::uint32_t a[2][4][2];
          decode_known_chunk<T, kBits, kGroup, 0>(even_chunk, lane, scales, a);
          sum(a);
          if (both) {
            decode_known_chunk<T, kBits, kGroup, 1>(even_chunk + kFormat.chunk_bytes(0), lane,
                                                    scales, a);
            sum(a);
          }
        };
        if (count == kStageChunks) {
#pragma unroll
          for (int d = 0; d < kStageChunks; d += 2) pair(chunk + kFormat.offset(d), true);
        } else {
          for (int d = 0; d < count; d += 2) pair(chunk + kFormat.offset(d), d + 1 < count);
        }
      } else {
        const auto work = [&](int parity) {
          std::uint32_t a[2][4][2];
          decode_chunk<T, kBits>(format, shape, parity, chunk, lane, scales, a);
          chunk += shape.bytes[parity];
          sum(a);
        };
        for (int d = 0; d < count; d += 2) {
          work(0);
          if (d + 1 < count) work(1);
        }
      }
      __syncwarp();
      produce();
      if (++slot == num_stages) slot = 0, ++round;
    }
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
      if constexpr (kOneRow) {
        if (t == 0) finish<T>(args.epilogue, tile, g, m_begin, acc[b][0], acc[b][2]);
      } else {
        const std::int64_t m = m_begin + b * 8 + t * 2;
        if (m < args.M) finish<T>(args.epilogue, tile, g, m, acc[b][0], acc[b][2]);
        if (m + 1 < args.M) finish<T>(args.epilogue, tile, g, m + 1, acc[b][1], acc[b][3]);
      }
    }
  }
}

}  // namespace qmlp::cuda
