#pragma once

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"

// Few rows of x: every warp streams whole tiles of weights through its own ring of shared memory
// and sums them with mma.m16n8k16, one chain an output. Weights are operand A, so tokens are
// columns.
namespace qmlp::cuda {

constexpr int kStageChunks = 8;  // chunks of one copy; even, so that a stage starts with its scales
constexpr int kMaxStages = 4;

// Where x's fragments are kept: two planes (steps 0 and 1, steps 2 and 3 of a chunk) of
// [chunk][token block][lane] 16-byte vectors, so that a warp's reads have no bank conflicts. A
// single row is kept once for all eight columns: [chunk][t].
struct FragmentPlace {
  std::int64_t word;
};
template <int kTokenBlocks, bool kOneRow>
__device__ __forceinline__ std::int64_t fragment_word(std::int64_t num_chunks, std::int64_t m,
                                                      std::int64_t pair) {
  const std::int64_t c = pair / 32;
  const int r = static_cast<int>(pair % 32), j = r / 8, w = r % 8, t = w % 4;
  const int position = j % 2 * 2 + w / 4;
  const std::int64_t lanes = kOneRow ? 4 : 32 * kTokenBlocks;
  const std::int64_t lane = kOneRow ? t : m / 8 * 32 + m % 8 * 4 + t;
  return ((j / 2 * num_chunks + c) * lanes + lane) * 4 + position;
}

// Elements 2 * pair and 2 * pair + 1 of a row, zero past K.
__device__ __forceinline__ std::uint32_t load_pair(const std::uint16_t* row, std::int64_t pair,
                                                   std::int64_t K) {
  const std::int64_t k = 2 * pair;
  if (k + 1 < K && (reinterpret_cast<std::uintptr_t>(row) & 3) == 0) {
    return *reinterpret_cast<const std::uint32_t*>(row + k);
  }
  const std::uint32_t low = k < K ? row[k] : 0;
  const std::uint32_t high = k + 1 < K ? row[k + 1] : 0;
  return low | high << 16;
}

template <int kTokenBlocks, bool kOneRow>
__device__ __forceinline__ void lay_out_x(const MatmulArgs& args, std::int64_t m_begin,
                                          std::uint32_t* fragments, int thread, int num_threads) {
  const std::int64_t pairs = args.num_chunks * (kChunkK / 2);
  const std::int64_t rows = kOneRow ? 1 : kTokenBlocks * 8;
  for (std::int64_t i = thread; i < rows * pairs; i += num_threads) {
    const std::int64_t m = i / pairs, pair = i % pairs;
    std::uint32_t value = 0;
    if (m_begin + m < args.M) {
      const auto* row = static_cast<const std::uint16_t*>(args.x) + (m_begin + m) * args.x_stride;
      value = load_pair(row, pair, args.K);
    }
    fragments[fragment_word<kTokenBlocks, kOneRow>(args.num_chunks, m, pair)] = value;
  }
}

// Fragments of one block of tokens a blockIdx.x, for x that does not fit in shared memory.
template <int kTokenBlocks>
__global__ void lay_out_x_kernel(const MatmulArgs args) {
  const std::int64_t words = 4 * 2 * args.num_chunks * 32 * kTokenBlocks;
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kTokenBlocks * 8;
  lay_out_x<kTokenBlocks, false>(args, m_begin, args.x_fragments + blockIdx.y * words,
                                 blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// The ring of one warp, filled by sm_90's bulk copies or by sm_80's 16-byte ones.
template <bool kBulk>
struct Ring {
  std::uint32_t data;      // shared address of the first stage
  std::uint32_t barriers;  // kBulk: one for each stage
  std::uint32_t stage_bytes;
  int num_stages;

  __device__ void init(int lane) const {
    if constexpr (kBulk) {
      if (lane == 0) {
        for (int i = 0; i < num_stages; ++i) barrier_init(barriers + 8 * i, 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
  }
  __device__ void fill(int stage, const std::uint8_t* from, std::uint32_t bytes, int lane) const {
    const std::uint32_t to = data + stage * stage_bytes;
    if constexpr (kBulk) {
      if (lane == 0) {
        barrier_expect(barriers + 8 * stage, bytes);
        bulk_copy(to, from, bytes, barriers + 8 * stage);
      }
    } else {
      for (std::uint32_t i = lane * 16; i < bytes; i += 512) copy_16_async(to + i, from + i);
    }
  }
  __device__ void commit() const {
    if constexpr (!kBulk) copy_commit();
  }
  // Waits for the `index`th stage consumed; every lane sees its bytes after.
  __device__ void wait(int stage, std::uint32_t round) const {
    if constexpr (kBulk) {
      barrier_wait(barriers + 8 * stage, round & 1);
    } else {
      copy_wait<kMaxStages - 1>();
      __syncwarp();
    }
  }
};

// kBits: of both halves, or 0 to read each half's at run time. x comes from shared memory, or from
// args.x_fragments when that is not null.
template <class T, int kTokenBlocks, bool kOneRow, int kBits, bool kBulk>
__global__ void __launch_bounds__(512)
    stream_kernel(const __grid_constant__ MatmulArgs args, int num_stages) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const std::int64_t C = args.num_chunks;
  const TileFormat& format = args.format;
  const auto stage_bytes = static_cast<std::uint32_t>(format.offset(kStageChunks));
  const int stages_per_tile = static_cast<int>((C + kStageChunks - 1) / kStageChunks);
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

  std::int64_t tile = blockIdx.x + static_cast<std::int64_t>(warp) * gridDim.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * num_warps;
  const std::int64_t mine = tile < args.num_tiles ? (args.num_tiles - tile + step - 1) / step : 0;
  const std::int64_t total = mine * stages_per_tile;
  std::int64_t produced = 0, produced_tile = tile;
  int produced_stage = 0;  // of its tile
  const auto produce = [&] {
    if (produced < total) {
      const std::int64_t c = static_cast<std::int64_t>(produced_stage) * kStageChunks;
      const std::int64_t begin = format.offset(c);
      const std::int64_t end = format.offset(c + kStageChunks < C ? c + kStageChunks : C);
      ring.fill(static_cast<int>(produced % num_stages),
                args.weights + produced_tile * args.tile_bytes + begin,
                static_cast<std::uint32_t>(end - begin), lane);
      ++produced;
      if (++produced_stage == stages_per_tile) {
        produced_stage = 0;
        produced_tile += step;
      }
    }
    ring.commit();
  };
  for (int i = 0; i < num_stages; ++i) produce();

  // Weights do not depend on the kernel before; x does.
  if constexpr (kBulk) wait_for_previous_grid();
  const std::int64_t fragment_words = 4 * 2 * C * (kOneRow ? 4 : 32 * kTokenBlocks);
  const uint4* fragments;
  if (args.x_fragments == nullptr) {
    lay_out_x<kTokenBlocks, kOneRow>(args, m_begin, x_shared, threadIdx.x, blockDim.x);
    __syncthreads();
    fragments = reinterpret_cast<const uint4*>(x_shared);
  } else {
    fragments = reinterpret_cast<const uint4*>(args.x_fragments + blockIdx.y * fragment_words);
  }
  constexpr int kFragmentLanes = kOneRow ? 4 : 32 * kTokenBlocks;
  const std::int64_t plane = C * kFragmentLanes;

  std::int64_t consumed = 0;
  for (; tile < args.num_tiles; tile += step) {
    float acc[kTokenBlocks][4] = {};
    Scales<T> scales[2][2] = {};
    for (int s = 0; s < stages_per_tile; ++s, ++consumed) {
      const int slot = static_cast<int>(consumed % num_stages);
      ring.wait(slot, static_cast<std::uint32_t>(consumed / num_stages));
      const std::uint8_t* stage = ring_data + static_cast<std::size_t>(slot) * stage_bytes;
      const std::int64_t c_begin = static_cast<std::int64_t>(s) * kStageChunks;
      const int count = static_cast<int>(C - c_begin < kStageChunks ? C - c_begin : kStageChunks);
#pragma unroll 2
      for (int d = 0; d < count; ++d) {
        const std::uint8_t* chunk = stage + format.offset(d);
        std::uint32_t a[2][4][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int sets = format.half[h].scale_sets(d);
          const std::uint8_t* at = chunk + format.scales_offset(h, d);
          if (sets > 0) {
            scales[h][0] = load_scales<T>(at, 0, lane);
            scales[h][1] = sets > 1 ? load_scales<T>(at, 1, lane) : scales[h][0];
          }
          const std::uint8_t* codes = chunk + format.codes_offset(h);
          if constexpr (kBits != 0) {
            decode_half<T, kBits>(codes, lane, scales[h][0], scales[h][1], a[h]);
          } else {
            decode_half_any<T>(format.half[h].bits, codes, lane, scales[h][0], scales[h][1], a[h]);
          }
        }
        const std::int64_t c = c_begin + d;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
#pragma unroll
          for (int b = 0; b < kTokenBlocks; ++b) {
            const uint4 x = kOneRow ? fragments[p * plane + c * 4 + t]
                                    : fragments[p * plane + (c * kTokenBlocks + b) * 32 + lane];
            mma_m16n8k16<T>(acc[b], a[0][2 * p][0], a[1][2 * p][0], a[0][2 * p][1], a[1][2 * p][1],
                            x.x, x.y);
            mma_m16n8k16<T>(acc[b], a[0][2 * p + 1][0], a[1][2 * p + 1][0], a[0][2 * p + 1][1],
                            a[1][2 * p + 1][1], x.z, x.w);
          }
        }
      }
      __syncwarp();
      produce();
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
