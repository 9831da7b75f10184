#pragma once

#include "cuda/choice.h"
#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/kernels/ring.cuh"
#include "cuda/kernels/segments.cuh"

// Few rows of x: every warp streams whole tiles of weights, or one segment of K of each, through
// its own ring of shared memory and sums them with mma.m16n8k16, one chain an output and segment.
// Weights are operand A, so tokens are columns.
namespace qmlp::cuda {

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

// Whether rows of x can be copied by 16 bytes.
__device__ __forceinline__ bool x_is_aligned(const MatmulArgs& args) {
  return (reinterpret_cast<std::uintptr_t>(args.x) & 15) == 0 && args.x_stride % 8 == 0 &&
         args.K % 8 == 0;
}

// Fragments of one block of tokens a blockIdx.y, for x that does not fit in shared memory: two
// planes (steps 0 and 1, steps 2 and 3 of a chunk) of [chunk][token block][lane] 16-byte vectors.
template <int kTokenBlocks>
__global__ void lay_out_x_kernel(const MatmulArgs args) {
  constexpr int kLanes = 32 * kTokenBlocks;
  const int C = static_cast<int>(args.num_chunks);
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kTokenBlocks * 8;
  std::uint32_t* fragments = args.scratch + blockIdx.y * (8ll * C * kLanes);
  for (int m = blockIdx.x; m < kTokenBlocks * 8; m += gridDim.x) {
    const bool exists = m_begin + m < args.M;
    const auto* row = static_cast<const std::uint16_t*>(args.x) + (m_begin + m) * args.x_stride;
    for (int v = threadIdx.x; v < C * 8; v += blockDim.x) {
      const uint4 value = exists ? load_eight(row, v, args.K) : make_uint4(0, 0, 0, 0);
      // Words k = 8 v, 8 v + 1 and the next three pairs, one lane each.
      const int c = v / 8, r = v % 8, j = r / 2, lane = m / 8 * 32 + m % 8 * 4;
      std::uint32_t* to = fragments +
                          ((j / 2 * static_cast<std::int64_t>(C) + c) * kLanes + lane) * 4 +
                          j % 2 * 2 + r % 2;
      to[0] = value.x, to[4] = value.y, to[8] = value.z, to[12] = value.w;
    }
  }
}

// a / b for 0 <= a < 2^20 and b > 0. Exact: (a + 1/2) / b is 1 / (2 b) or more from any integer,
// and the error is below 2^-22 of it.
__device__ __forceinline__ int small_quotient(int a, int b) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(b)));
  return static_cast<int>((static_cast<float>(a) + 0.5f) * inverse);
}

// Rows of x in global memory, `stride` elements apart, and in shared memory.
struct XRows {
  const std::uint16_t* from;
  std::int64_t stride;
  std::uint32_t to, row_bytes;
  int rows, vectors;  // of 16 bytes, in a row
};

// A thread's share of them: where its next vector is. By rows: each is `row_warps` warps'; else
// thread follows thread through all rows.
template <bool kByRows>
struct XShare {
  const std::uint16_t* from;
  std::uint32_t to;
  int row, column;
  int rows_on, columns_on;  // from one of the thread's vectors to its next

  __device__ __forceinline__ XShare(const XRows& x, int row_warps) {
    const int thread = threadIdx.x, warp = thread / 32;
    if constexpr (kByRows) {
      row = small_quotient(warp, row_warps);
      column = (warp - row * row_warps) * 32 + thread % 32;
      columns_on = row_warps * 32, rows_on = 0;
    } else {
      row = small_quotient(thread, x.vectors), column = thread - row * x.vectors;
      const int threads = blockDim.x;
      rows_on = small_quotient(threads, x.vectors), columns_on = threads - rows_on * x.vectors;
    }
    from = x.from + row * x.stride + column * 8;
    to = x.to + row * x.row_bytes + column * 16;
  }
  __device__ __forceinline__ bool exists(const XRows& x) const {
    return kByRows ? row < x.rows && column < x.vectors : row < x.rows;
  }
  __device__ __forceinline__ void next(const XRows& x) {
    from += columns_on * 8 + rows_on * x.stride;
    to += columns_on * 16 + rows_on * x.row_bytes;
    column += columns_on, row += rows_on;
    if (kByRows || column < x.vectors) return;
    column -= x.vectors, ++row;
    from += x.stride - x.vectors * 8;
    to += x.row_bytes - x.vectors * 16;
  }
};

// Copies such a share, kLoads vectors at most, all under way at once; `meanwhile` runs between
// loads and stores. Addresses are ready when the kernel before ends.
template <int kLoads, bool kByRows, class Meanwhile>
__device__ __forceinline__ void copy_rows(const XRows& x, int row_warps, Meanwhile meanwhile) {
  XShare<kByRows> share(x, row_warps);
  uint4 values[kLoads];
  const std::uint16_t* from[kLoads];
  std::uint32_t to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    from[i] = kept(share.exists(x) ? share.from : nullptr);
    to[i] = share.to;
    share.next(x);
  }
  wait_for_previous_grid_here();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (from[i] != nullptr) values[i] = load_global_16(from[i]);
  }
  meanwhile();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (from[i] != nullptr) store_shared_16(to[i], values[i]);
  }
}

// Rows m_begin .. + rows of x into shared memory, zero past K, once the kernel before has ended:
// weights do not depend on it, x does. For every thread of a CTA. `meanwhile` runs, once, when x is
// asked for: its bytes are few and all wait for them.
template <bool kBulk, class Meanwhile>
__device__ __forceinline__ void share_x(const MatmulArgs& args, std::int64_t m_begin, int rows,
                                        std::uint32_t row_bytes, std::uint8_t* x_shared,
                                        std::uint64_t* x_barrier, Meanwhile meanwhile) {
  const int C = static_cast<int>(args.num_chunks);
  const auto* const x = static_cast<const std::uint16_t*>(args.x) + m_begin * args.x_stride;
  if (kBulk && x_is_aligned(args)) {
    const int tail = static_cast<int>(C * kChunkK - args.K);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * tail; i += blockDim.x) {
      *reinterpret_cast<std::uint16_t*>(x_shared + i / tail * row_bytes + (args.K + i % tail) * 2) =
          0;
    }
    const int threads = blockDim.x, vectors = static_cast<int>(args.K / 8);
    const int row_warps = small_quotient(threads / 32, rows);
    const XRows all = {x, args.x_stride, shared_address(x_shared), row_bytes, rows, vectors};
    // Loads all at once come soonest, up to eight a thread; whole warps to a row where that
    // suffices: fewer instructions before the wait.
    if (vectors <= 4 * 32 * row_warps) {
      copy_rows<4, true>(all, row_warps, meanwhile);
    } else if (vectors <= 8 * 32 * row_warps) {
      copy_rows<8, true>(all, row_warps, meanwhile);
    } else if (rows * vectors <= 8 * threads) {
      copy_rows<8, false>(all, 0, meanwhile);
    } else {  // a copy a row
      if (threadIdx.x == 0) {
        barrier_init(shared_address(x_barrier), 1);
        barrier_init_fence();
      }
      __syncthreads();
      wait_for_previous_grid();
      if (threadIdx.x < 32) {
        const auto bytes = static_cast<std::uint32_t>(args.K * 2);
        if (threadIdx.x == 0) barrier_expect(shared_address(x_barrier), bytes * rows);
        __syncwarp();
        for (int row = threadIdx.x; row < rows; row += 32) {
          bulk_copy(all.to + row * row_bytes, x + row * args.x_stride, bytes,
                    shared_address(x_barrier));
        }
      }
      meanwhile();
      barrier_wait(shared_address(x_barrier), 0);
      return;
    }
  } else {
    if constexpr (kBulk) wait_for_previous_grid();
    meanwhile();
#pragma unroll 1
    for (int m = 0; m < rows; ++m) {
      for (int v = threadIdx.x; v < C * 8; v += blockDim.x) {
        *reinterpret_cast<uint4*>(x_shared + m * row_bytes + v * 16) =
            load_eight(x + m * args.x_stride, v, args.K);
      }
    }
  }
  __syncthreads();
}

// Where a lane finds x for load_matrices, one address a block of 8 tokens. Rows that do not exist
// read the last one that does; their columns are not stored.
template <int kTokenBlocks>
__device__ __forceinline__ void x_addresses(const std::uint8_t* x_shared, std::uint32_t row_bytes,
                                            int rows, int lane,
                                            std::uint32_t (&addresses)[kTokenBlocks]) {
#pragma unroll
  for (int b = 0; b < kTokenBlocks; ++b) {
    const int row = b * 8 + lane % 8;
    addresses[b] =
        kept(shared_address(x_shared) + (row < rows ? row : rows - 1) * row_bytes + lane / 8 * 16);
  }
}

template <class T, int kTokenBlocks>
__device__ __forceinline__ void store_tile(const EpilogueArgs& epilogue, std::int64_t tile,
                                           int lane, std::int64_t m_begin, std::int64_t M,
                                           float (&acc)[kTokenBlocks * 4]) {
  if (word_stores_suffice(epilogue)) {
    store_words<T, kTokenBlocks>(epilogue, tile, lane, m_begin, M, acc);
  } else {
    store_elements<T, kTokenBlocks>(epilogue, tile, lane, m_begin, M, acc);
  }
}

// kBits: of both halves, or 0 to read each half's at run time. kSharedX: rows of x are in shared
// memory; else fragments come from args.scratch.
template <class T, int kTokenBlocks, int kBits, int kGroup, bool kBulk, bool kSharedX>
__global__ void __launch_bounds__(512)
    stream_kernel(const __grid_constant__ MatmulArgs args, int num_stages, int first_stages,
                  int fitting_chunks) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ __align__(8) std::uint64_t x_barrier[1];
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int C = static_cast<int>(args.num_chunks);
  const MixedShape shape = kBits == 0 ? mixed_shape(args.format) : MixedShape{};
  const std::uint32_t bytes_a_chunk = chunk_bytes<kBits, kGroup>(shape);
  // A team of warps takes a tile, a segment of K each.
  const int segments = args.segments, team = part_of(warp, segments);
  const int segment = warp - team * segments;
  const Segment chunks = segment_of(segment, segments, C);
  const int first_chunk = chunks.first;
  // Whole stages always fit where rings are as deep as there is room for, dense weights apart;
  // there their size is a constant.
  constexpr bool kWholeStages = kBulk && kBits != 0 && kBits != kDenseBits;
  const int stage_chunks = kWholeStages ? kStreamStageChunks : fitting_chunks;
  const TileStages stages = tile_stages(bytes_a_chunk, stage_chunks, chunks.count);
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kTokenBlocks * 8;

  std::uint8_t* ring_data = shared + static_cast<std::size_t>(warp) * num_stages * stages.bytes;
  std::uint8_t* after_rings =
      shared + static_cast<std::size_t>(num_warps) * num_stages * stages.bytes;
  auto* barriers = reinterpret_cast<std::uint64_t*>(after_rings) + warp * num_stages;
  std::uint8_t* x_shared = after_rings + (num_warps * num_stages * 8 + 127) / 128 * 128;
  const Ring<kBulk> ring{kept(shared_address(ring_data)), kept(shared_address(barriers)),
                         stages.bytes, num_stages};

  if constexpr (kBulk) launch_dependents();
  ring.init(lane);

  const int num_tiles = static_cast<int>(args.num_tiles);
  int tile = blockIdx.x + team * gridDim.x;
  const int step = gridDim.x * part_of(num_warps, segments);
  // A segment without a chunk has nothing to fill.
  int tile_to_fill = stages.count > 0 ? tile : num_tiles, left_in_tile = stages.count;
  const std::uint8_t* from = args.weights + tile * args.tile_bytes +
                             first_chunk * static_cast<std::int64_t>(bytes_a_chunk);
  const std::int64_t to_next_tile =
      step * args.tile_bytes - (stages.count - 1) * static_cast<std::int64_t>(stages.bytes);
  // The next stage into the ring.
  const auto produce = [&](std::uint32_t to, std::uint32_t barrier) {
    if (tile_to_fill < num_tiles) {
      const bool last = --left_in_tile == 0;
      ring.fill(to, barrier, from, last ? stages.last_bytes : stages.bytes, lane);
      if (last) left_in_tile = stages.count, tile_to_fill += step;
      from += last ? to_next_tile : static_cast<std::int64_t>(stages.bytes);
    }
    ring.commit();
  };
  const auto produce_slots = [&](int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) produce(ring.stage(i), ring.barrier(i));
  };
  produce_slots(0, first_stages);
  const auto produce_others = [&] { produce_slots(first_stages, num_stages); };

  const std::uint32_t row_bytes = x_row_bytes(C);
  const int rows =
      static_cast<int>(args.M - m_begin < kTokenBlocks * 8 ? args.M - m_begin : kTokenBlocks * 8);
  if constexpr (kSharedX) {
    share_x<kBulk>(args, m_begin, rows, row_bytes, x_shared, x_barrier, produce_others);
  } else {
    if constexpr (kBulk) wait_for_previous_grid();
    produce_others();
  }
  std::uint32_t x_rows[kTokenBlocks];
  x_addresses(x_shared, row_bytes, rows, lane, x_rows);
  constexpr int kFragmentLanes = 32 * kTokenBlocks;
  const int plane = C * kFragmentLanes;
  const uint4* const fragments =
      reinterpret_cast<const uint4*>(args.scratch) + blockIdx.y * (2ll * C * kFragmentLanes) + lane;
  const auto load_x = [&](int c, int p, std::uint32_t(&v)[kTokenBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kTokenBlocks; ++b) {
      if constexpr (kSharedX) {
        load_matrices(v[b], x_rows[b] + c * (kChunkK * 2) + p * 64);
      } else {
        const uint4 four = fragments[p * plane + b * 32 + c * kFragmentLanes];
        v[b][0] = four.x, v[b][1] = four.y, v[b][2] = four.z, v[b][3] = four.w;
      }
    }
  };

  // Sums of segments, [2][warp][token block][lane], in turns.
  auto* const partials =
      reinterpret_cast<float4*>(x_shared + (kSharedX ? rows * row_bytes : 0)) + lane;
  int turn = 0;
  std::uint32_t in_ring = 0;  // where the stage begins
  std::uint32_t barrier = ring.barriers, parity = 0;
  const int kept_lane = static_cast<int>(kept(lane));
  for (; tile < num_tiles; tile += step) {
    float acc[kTokenBlocks * 4] = {};
    int c = first_chunk;
    for (int left = stages.count; left > 0; --left) {
      ring.wait(barrier, parity);
      const std::uint32_t stage = ring.data + in_ring;
      const auto* chunk = static_cast<const std::uint8_t*>(__cvta_shared_to_generic(stage));
      const int in_stage = left > 1 ? stage_chunks : stages.last_chunks;
      RawChunk<T, kBits, kGroup> raw[2];
      std::uint32_t x[2][2][kTokenBlocks][4];
      const auto fetch = [&](int d) {
        raw[d % 2].load(shape, chunk + d * bytes_a_chunk, kept_lane);
        load_x(c + d, 0, x[d % 2][0]);
        load_x(c + d, 1, x[d % 2][1]);
      };
      const auto sums = [&](int d, bool more) {
        std::uint32_t a[2][4][2];
        const RawChunk<T, kBits, kGroup>& r = raw[d % 2];
        r.template decode<0>(a, 0);
        r.template decode<1>(a, 1);
        r.template decode<2>(a, 2);
        r.template decode<3>(a, 3);
        if (more) fetch(d + 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int b = 0; b < kTokenBlocks; ++b) {
            const std::uint32_t(&v)[4] = x[d % 2][j / 2][b];
            mma_m16n8k16<T>(acc + 4 * b, a[0][j][0], a[1][j][0], a[0][j][1], a[1][j][1],
                            v[j % 2 * 2], v[j % 2 * 2 + 1]);
          }
        }
      };
      fetch(0);
      if (in_stage == kStreamStageChunks) {
#pragma unroll
        for (int d = 0; d < kStreamStageChunks; ++d) sums(d, d + 1 < kStreamStageChunks);
        c += kStreamStageChunks;
      } else {
#pragma unroll 1
        for (int rest = in_stage; rest > 0; rest -= 2) {
          sums(0, rest > 1);
          if (rest > 1) sums(1, rest > 2);
          chunk += 2 * bytes_a_chunk;
          c += 2;
        }
        c -= in_stage & 1;
      }
      __syncwarp();
      produce(stage, barrier);
      in_ring += stages.bytes;
      barrier += 8;
      if (in_ring == ring.bytes()) in_ring = 0, barrier = ring.barriers, parity ^= 1;
    }
    if (segments > 1) {
      turn ^= 1;
      const auto partial = [&](int of, int b) -> float4& {
        return partials[((turn * num_warps + team * segments + of) * kTokenBlocks + b) * 32];
      };
      if (segment != 0) {
#pragma unroll
        for (int b = 0; b < kTokenBlocks; ++b) {
          partial(segment, b) =
              make_float4(acc[4 * b], acc[4 * b + 1], acc[4 * b + 2], acc[4 * b + 3]);
        }
      }
      team_barrier(1 + team, 32 * segments);
      if (segment != 0) continue;
#pragma unroll
      for (int b = 0; b < kTokenBlocks; ++b) {
        const float4 own = make_float4(acc[4 * b], acc[4 * b + 1], acc[4 * b + 2], acc[4 * b + 3]);
        const float4 sum = sum_segments(own, segments, [&](int of) { return partial(of, b); });
        acc[4 * b] = sum.x, acc[4 * b + 1] = sum.y, acc[4 * b + 2] = sum.z, acc[4 * b + 3] = sum.w;
      }
    }
    store_tile<T, kTokenBlocks>(args.epilogue, tile, lane, m_begin, args.M, acc);
  }
}

}  // namespace qmlp::cuda
