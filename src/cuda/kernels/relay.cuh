#pragma once

#include "cuda/choice.h"
#include "cuda/kernels/stream.cuh"

// Few tiles of a long K: the chain of sums binds, not the bytes. A relay of warps, `legs` of them,
// carries a chain: each decodes its stages of the tile's stream ahead of time, and the running sums
// go from hand to hand through shared memory, so that the chain waits for little but its own
// products. Sums, their order and so every bit are those of stream_kernel.
namespace qmlp::cuda {

template <class T, int kBits, int kGroup>
__global__ void __launch_bounds__(kRelayMaxWarps * 32)
    relay_kernel(const __grid_constant__ MatmulArgs args, int num_stages, int legs) {
  constexpr int kChunks = kStreamStageChunks;
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ __align__(8) std::uint64_t x_barrier[1];
  const int num_warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int C = static_cast<int>(args.num_chunks);
  const MixedShape shape = kBits == 0 ? mixed_shape(args.format) : MixedShape{};
  const std::uint32_t bytes_a_chunk = chunk_bytes<kBits, kGroup>(shape);
  // A team takes a tile, a chain of it each segment of K, a stage of a chain each leg in turn.
  const int segments = args.segments, chain = warp / legs, leg = warp % legs;
  const int team = chain / segments, segment = chain % segments;
  const int first_chunk = segment * C / segments;
  const TileStages stages =
      tile_stages(bytes_a_chunk, kChunks, (segment + 1) * C / segments - first_chunk);
  const std::int64_t m_begin = static_cast<std::int64_t>(blockIdx.y) * kRelayRows;

  std::uint8_t* ring_data = shared + static_cast<std::size_t>(warp) * num_stages * stages.bytes;
  std::uint8_t* after_rings =
      shared + static_cast<std::size_t>(num_warps) * num_stages * stages.bytes;
  auto* barriers = reinterpret_cast<std::uint64_t*>(after_rings) + warp * num_stages;
  std::uint8_t* x_shared = after_rings + (num_warps * num_stages * 8 + 127) / 128 * 128;
  const Ring<true> ring{shared_address(ring_data), shared_address(barriers), stages.bytes,
                        num_stages};

  launch_dependents();
  ring.init(lane);

  const int num_tiles = static_cast<int>(args.num_tiles);
  const int step = gridDim.x * (num_warps / (legs * segments));
  const int first_tile = blockIdx.x + team * gridDim.x;
  // A place in the chain's sequence of stages, which runs on from tile to tile.
  struct Place {
    int tile, stage;
  };
  const auto advance = [&](Place& at, int by) {
    at.stage += by;
    while (at.stage >= stages.count) at.stage -= stages.count, at.tile += step;
  };
  Place to_fill{first_tile, 0};
  advance(to_fill, leg);
  int filled_slot = 0;
  const auto produce = [&] {
    if (to_fill.tile >= num_tiles) return;
    const bool last = to_fill.stage + 1 == stages.count;
    ring.fill(ring.stage(filled_slot), ring.barrier(filled_slot),
              args.weights + to_fill.tile * args.tile_bytes +
                  first_chunk * static_cast<std::int64_t>(bytes_a_chunk) +
                  to_fill.stage * static_cast<std::int64_t>(stages.bytes),
              last ? stages.last_bytes : stages.bytes, lane);
    if (++filled_slot == num_stages) filled_slot = 0;
    advance(to_fill, legs);
  };
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) produce();

  const std::uint32_t row_bytes = x_row_bytes(C);
  const int rows = static_cast<int>(args.M - m_begin < kRelayRows ? args.M - m_begin : kRelayRows);
  share_x<true>(args, m_begin, rows, row_bytes, x_shared, x_barrier, [] {});
  std::uint32_t x_row[1];
  x_addresses(x_shared, row_bytes, rows, lane, x_row);

  // The chains' running sums, [chain][lane], then those of segments, [2][chain][lane].
  const int num_chains = num_warps / legs;
  auto* const sums = reinterpret_cast<float4*>(x_shared + rows * row_bytes) + lane;
  float4* const baton = sums + chain * 32;
  const auto partial = [&](int turn, int of) -> float4& {
    return sums[(num_chains * (1 + turn) + team * segments + of) * 32];
  };
  // Barriers by warp: the leg's sums have come. Then one a team, for its segments.
  const int from_before = 1 + warp, to_next = 1 + chain * legs + (leg + 1 == legs ? 0 : leg + 1);
  const int of_team = 1 + num_warps + team;

  int slot = 0;
  std::uint32_t round = 0;
  Place at{first_tile, 0};
  advance(at, leg);
  bool is_first = leg == 0;  // of the chain's whole sequence
  while (at.tile < num_tiles) {
    ring.wait(ring.barrier(slot), round & 1);
    const std::uint8_t* chunk = ring_data + slot * stages.bytes;
    const bool last = at.stage + 1 == stages.count;
    const int in_stage = last ? stages.last_chunks : kChunks;
    std::uint32_t a[kChunks][2][4][2];
    const auto decode = [&](int d) {
      RawChunk<T, kBits, kGroup> raw;
      raw.load(shape, chunk + d * bytes_a_chunk, lane);
      raw.template decode<0>(a[d], 0);
      raw.template decode<1>(a[d], 1);
      raw.template decode<2>(a[d], 2);
      raw.template decode<3>(a[d], 3);
    };
#pragma unroll
    for (int d = 0; d < kChunks; ++d) {
      if (d < in_stage) decode(d);
    }
    __syncwarp();
    produce();
    if (++slot == num_stages) slot = 0, ++round;

    std::uint32_t x[2][2][4];
    const std::uint32_t x_stage = x_row[0] + (first_chunk + at.stage * kChunks) * (kChunkK * 2);
    const auto load_x = [&](int d) {
      load_matrices(x[d % 2][0], x_stage + d * (kChunkK * 2));
      load_matrices(x[d % 2][1], x_stage + d * (kChunkK * 2) + 64);
    };
    const auto products = [&](float(&acc)[4], int d) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t(&v)[4] = x[d % 2][j / 2];
        mma_m16n8k16<T>(acc, a[d][0][j][0], a[d][1][j][0], a[d][0][j][1], a[d][1][j][1],
                        v[j % 2 * 2], v[j % 2 * 2 + 1]);
      }
    };
    load_x(0);
    if (in_stage > 1) load_x(1);
    if (!is_first) team_barrier(from_before, 64);
    is_first = false;
    float acc[4] = {};
    if (at.stage != 0) {
      const float4 four = *baton;
      acc[0] = four.x, acc[1] = four.y, acc[2] = four.z, acc[3] = four.w;
    }
    if (in_stage == kChunks) {
#pragma unroll
      for (int d = 0; d < kChunks; ++d) {
        products(acc, d);
        if (d + 2 < kChunks) load_x(d + 2);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kChunks - 1; ++d) {
        if (d < in_stage) products(acc, d);
        if (d + 2 < in_stage) load_x(d + 2);
      }
    }
    float4 total = make_float4(acc[0], acc[1], acc[2], acc[3]);
    if (!last) *baton = total;
    Place next = at;
    advance(next, 1);
    const bool more = next.tile < num_tiles;
    // Segments' sums are read before another leg may come to the same place.
    const bool segmented = last && segments > 1;
    if (more && !segmented) team_barrier_arrive(to_next, 64);
    if (segmented) {
      const int turn = (at.tile - first_tile) / step & 1;
      if (segment != 0) partial(turn, segment) = total;
      team_barrier(of_team, 32 * segments);
      if (segment == 0) {
        total = sum_segments(total, segments, [&](int of) { return partial(turn, of); });
      }
      if (more) team_barrier_arrive(to_next, 64);
    }
    if (last && segment == 0) {
      float outputs[4] = {total.x, total.y, total.z, total.w};
      store_tile<T, 1>(args.epilogue, at.tile, lane, m_begin, args.M, outputs);
    }
    advance(at, legs);
  }
}

}  // namespace qmlp::cuda
