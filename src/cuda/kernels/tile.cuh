#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/device/epilogue.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/kernels/ring.cuh"
#include "cuda/kernels/segments.cuh"
#include "cuda/rounds.h"

// More rows of x, sm_90a. A persistent CTA has kGroups consumer warpgroups and two producer warps.
// One copies x, kTokens rows by 64 k, by TMA into a ring that all share; the other streams tiles of
// weights, one for each consumer warp, through rings of their own. A consumer warpgroup takes a
// unit, 64 rows of MMA operand A: its warps decode a tile each into registers and multiply with
// wgmma, whose chain of 16-wide steps has the bits of mma.sync's.
namespace qmlp::cuda {

constexpr int kUnitTiles = 4;  // one tile a warp
constexpr int kStep = 8;       // chunks of the main loop's body, whose positions are constants
constexpr int kMaxWeightStages = 4;

// Chunks of one copy of weights: up to 5 KiB, since larger copies come faster and rings are many.
QMLP_HOST_DEVICE constexpr int tile_stage_chunks(int bits, int group_size) {
  if (bits == 0) return 2;
  const TileFormat format = {{{bits, group_size}, {bits, group_size}}};
  return format.chunk_bytes() <= 608 ? 8 : format.chunk_bytes() <= 1216 ? 4 : 2;
}

// x in shared memory, (tokens, kChunkK) a chunk, K-major: chunks that come and go together, and
// chunks of the ring, which divide kStep.
QMLP_HOST_DEVICE constexpr int tile_x_chunk_bytes(int tokens) { return tokens * kChunkK * 2; }
QMLP_HOST_DEVICE constexpr int tile_x_chunks(int tokens) { return tokens <= 64 ? 2 : 1; }
QMLP_HOST_DEVICE constexpr int tile_x_ring(int tokens) { return tokens <= 128 ? 8 : 4; }

struct TileArgs {
  MatmulArgs matmul;
  int weight_stages;
};

// How K of several segments is summed: each segment of a unit as a unit of its own, whose sums
// combine_kernel adds; or a unit's segments one after another by the same warpgroup.
enum class TileSplit : std::uint8_t { none, apart, sequence };
struct SplitTileArgs : TileArgs {
  float4* partials;   // apart: [tile][block of 8 tokens][segment][lane]
  int pieces;         // apart: rounds that the units of a block and segment are cut into
  int waiting_bytes;  // sequence: of shared memory, for sums that wait for later ones
};

// A sequence's waiting sums take the place of half the ring of x.
QMLP_HOST_DEVICE constexpr int split_x_ring(TileSplit split, int tokens) {
  return split == TileSplit::sequence ? 4 : tile_x_ring(tokens);
}

// Steps of 16 k whose fragments are held at once, twice: fewer where registers are short.
QMLP_HOST_DEVICE constexpr int tile_part_steps(int tokens, int groups, int ctas, int bits) {
  return groups * ctas > 2 && (tokens * ctas >= 64 || (ctas > 1 && bits > 4)) ? 2 : 4;
}
// Registers of a thread: what the threads of `ctas` CTAs an SM get at launch, shared out anew.
QMLP_HOST_DEVICE constexpr int producer_registers(int groups, int ctas) {
  return groups > 2 ? 32 : ctas > 1 ? 24 : 40;
}
QMLP_HOST_DEVICE constexpr int consumer_registers(int groups, int ctas) {
  return groups > 2 ? 112 : ctas > 1 ? 104 : 232;
}

struct ThisGrid {
  __device__ __forceinline__ static unsigned index() { return blockIdx.x; }
  __device__ __forceinline__ static unsigned size() { return gridDim.x; }
};

// kCtas: that share an SM. kWords: the epilogue is one that store_words can finish.
template <class T, int kTokens, int kGroups, int kCtas, int kBits, int kGroup, bool kWords,
          TileSplit kSplit, class Args>
__device__ __forceinline__ void tile_body(const Args& args, const CUtensorMap& x_map) {
  constexpr int kWarps = 4 * kGroups;  // consumers
  constexpr int kStageChunks = tile_stage_chunks(kBits, kGroup);
  constexpr int kXChunks = tile_x_chunks(kTokens), kXRing = split_x_ring(kSplit, kTokens);
  constexpr int kXSlots = kXRing / kXChunks;
  constexpr int kXChunkBytes = tile_x_chunk_bytes(kTokens);
  extern __shared__ __align__(128) std::uint8_t shared[];
  __shared__ __align__(8) std::uint64_t barriers[2 * kXSlots + 2 * kWarps * kMaxWeightStages];
  const MatmulArgs& matmul = args.matmul;
  const MixedShape shape = kBits == 0 ? mixed_shape(matmul.format) : MixedShape{};
  const std::uint32_t bytes_a_chunk = chunk_bytes<kBits, kGroup>(shape);
  const std::uint32_t x_base = (shared_address(shared) + 1023) & ~1023u;
  const std::uint32_t full = shared_address(barriers), empty = full + 8 * kXSlots;
  // A warp's weights: full and empty barriers of its stages, and their bytes.
  const auto weights_full = [&](int consumer) {
    return empty + 8 * (kXSlots + consumer * 2 * kMaxWeightStages);
  };
  constexpr int kFullToEmpty = 8 * kMaxWeightStages;
  // Arrivals that give a stage back: one lane's for its warp, or every lane's where that is not
  // worth saving.
  constexpr int kReleases = kWords ? 1 : 32;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  using CtaRounds =
      std::conditional_t<kSplit == TileSplit::apart, PieceRounds, UnitRounds<kGroups>>;
  // The token block and the segments, one after another, of a round. C counts the chunks of one.
  int C = static_cast<int>(matmul.num_chunks);
  const int num_chunks = C;
  const int segments = kSplit == TileSplit::sequence ? matmul.segments : 1;
  const auto block_of = [&](const CtaRounds& round) {
    return kSplit == TileSplit::apart ? round.block / matmul.segments : round.block;
  };
  const auto segment = [&](const CtaRounds& round, int s) -> Segment {
    if constexpr (kSplit == TileSplit::none) return {0, num_chunks};
    return segment_of(kSplit == TileSplit::apart ? round.block % matmul.segments : s,
                      matmul.segments, num_chunks);
  };
  TileStages stages = tile_stages(bytes_a_chunk, kStageChunks, C);
  // Shared memory: the ring of x, a sequence's waiting sums, the rings of weights.
  const std::uint32_t waiting_offset = kXRing * kXChunkBytes;
  const auto ring_offset = [&](int consumer) {
    std::uint32_t offset = waiting_offset + consumer * args.weight_stages * stages.bytes;
    if constexpr (kSplit == TileSplit::sequence) offset += args.waiting_bytes;
    return offset;
  };

  // Every warp does a few: they come one after another within a warp.
  if (warp == 0 && lane < kXSlots) {
    barrier_init(full + 8 * lane, 1);
    barrier_init(empty + 8 * lane, kWarps);
  } else if (group > 0 && lane < 2 * args.weight_stages) {
    barrier_init(weights_full(warp - 4) + lane / 2 * 8 + lane % 2 * kFullToEmpty,
                 lane % 2 == 0 ? 1 : kReleases);
  }
  barrier_init_fence();
  __syncthreads();
  launch_dependents();

  const auto rounds = [&](int units, int blocks) {
    if constexpr (kSplit == TileSplit::apart) {
      return CtaRounds::of_share(units, args.pieces, blocks * matmul.segments, blockIdx.x,
                                 gridDim.x);
    } else {
      return CtaRounds::of_cta(units, blocks, ThisGrid{});
    }
  };
  const CtaRounds first = rounds(static_cast<int>((matmul.num_tiles + kUnitTiles - 1) / kUnitTiles),
                                 static_cast<int>((matmul.M + kTokens - 1) / kTokens));

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(producer_registers(kGroups, kCtas)));
    int slot = 0;
    std::uint32_t phase = 1;
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&x_map);
      wait_for_previous_grid();
      for (CtaRounds round = first; !round.done(); round.next()) {
        for (int s = 0; s < segments; ++s) {
          const Segment of = segment(round, s);
          // Up to a multiple of kStep: slots past the end are passed on empty.
          for (int c = 0; c < of.count || c % kStep != 0; c += kXChunks) {
            barrier_wait(empty + 8 * slot, phase);
            if (c < of.count) {
              barrier_expect(full + 8 * slot, kXChunks * kXChunkBytes);
#pragma unroll
              for (int i = 0; i < kXChunks; ++i) {  // a chunk past x's end comes as zeros
                tensor_copy_2d(x_base + (slot * kXChunks + i) * kXChunkBytes, &x_map,
                               (of.first + c + i) * kChunkK, block_of(round) * kTokens,
                               full + 8 * slot);
              }
            } else {
              barrier_arrive(full + 8 * slot);
            }
            if (++slot == kXSlots) slot = 0, phase ^= 1;
          }
        }
      }
    } else if (!kWords && threadIdx.x == 32) {
      static_assert(kWords || kSplit == TileSplit::none);
      // As below, but one lane feeds all consumers in turn: racecheck counts the copies of several
      // lanes, which the machine begins one after another, as the first one's.
      int slots[kGroups] = {};
      std::uint32_t phases[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) phases[g] = 1;
      const int last_tile = static_cast<int>(matmul.num_tiles) - 1;
      for (CtaRounds round = first; !round.done(); round.next()) {
        for (int s = 0; s < stages.count; ++s) {
          const std::uint32_t bytes = s + 1 < stages.count ? stages.bytes : stages.last_bytes;
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if (g >= round.size()) continue;
#pragma unroll 1
            for (int w = 4 * g; w < 4 * g + 4; ++w) {
              const int tile = round.unit * kUnitTiles + w;
              const std::uint32_t barrier = weights_full(w) + 8 * slots[g];
              barrier_wait(barrier + kFullToEmpty, phases[g]);
              barrier_expect(barrier, bytes);
              bulk_copy(x_base + ring_offset(w) + slots[g] * stages.bytes,
                        matmul.weights + (tile < last_tile ? tile : last_tile) * matmul.tile_bytes +
                            s * static_cast<std::int64_t>(stages.bytes),
                        bytes, barrier);
            }
            if (++slots[g] == args.weight_stages) slots[g] = 0, phases[g] ^= 1;
          }
        }
      }
    } else if (kWords && warp == 1 && lane < kWarps) {
      // Lane l feeds consumer l. Weights do not depend on the kernel before.
      const std::uint32_t data = x_base + ring_offset(lane), barrier = weights_full(lane);
      const int last_tile = static_cast<int>(matmul.num_tiles) - 1;
      for (CtaRounds round = first; !round.done(); round.next()) {
        if (round.size() <= lane / 4) continue;
        // Past the last tile the last one comes again.
        const int tile = round.unit * kUnitTiles + lane;
        const std::uint8_t* from =
            matmul.weights + (tile < last_tile ? tile : last_tile) * matmul.tile_bytes;
        for (int i = 0; i < segments; ++i) {
          const Segment of = segment(round, i);
          if constexpr (kSplit != TileSplit::none) {
            stages = tile_stages(bytes_a_chunk, kStageChunks, of.count);
          }
          if constexpr (kSplit == TileSplit::apart) {
            from += of.first * static_cast<std::int64_t>(bytes_a_chunk);
          }
          for (int s = 0; s < stages.count; ++s) {
            const std::uint32_t bytes = s + 1 < stages.count ? stages.bytes : stages.last_bytes;
            barrier_wait(barrier + 8 * slot + kFullToEmpty, phase);
            barrier_expect(barrier + 8 * slot, bytes);
            bulk_copy(data + slot * stages.bytes, from, bytes, barrier + 8 * slot);
            from += kSplit == TileSplit::sequence ? bytes : stages.bytes;
            if (++slot == args.weight_stages) slot = 0, phase ^= 1;
          }
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(consumer_registers(kGroups, kCtas)));
  const int consumer = warp - 4, unit_of_round = group - 1;
  const std::uint8_t* const ring =
      shared + (x_base - shared_address(shared)) + ring_offset(consumer);
  const std::uint32_t weights_barrier = weights_full(consumer);

  const std::uint32_t x_descriptor = swizzled_descriptor(x_base);
  int weight_slot = 0;
  std::uint32_t weight_phase = 0;
  std::uint32_t step_phase = 0;  // of the x ring at a step's start; a ring of kStep flips a step
  const std::uint8_t* stage = ring;
  std::uint8_t* const own_sums = shared + (x_base - shared_address(shared)) + waiting_offset;
  constexpr int kSums = kTokens / 2, kWaitingSums = kSplit == TileSplit::sequence ? kSums : 1;
  // numerics.md's tree, as a binary counter meets its carries: sums of one segment wait in
  // registers, those of two in shared memory, those of four in local memory.
  [[maybe_unused]] float waiting[kWaitingSums];
  [[maybe_unused]] volatile float waiting_longest[kWaitingSums];
  const auto join_segment = [&](float(&acc)[kSums], int s) {
    auto* const waiting_longer = reinterpret_cast<float4*>(own_sums) + consumer * kSums * 8 + lane;
    if (s % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) waiting[i] = acc[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) acc[i] = __fadd_rn(waiting[i], acc[i]);
    if (s + 1 == segments && s < 2) return;
    if (s / 2 % 2 == 0) {
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        waiting_longer[i * 32] =
            make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const float4 sum = add(waiting_longer[i * 32], make_float4(acc[4 * i], acc[4 * i + 1],
                                                                 acc[4 * i + 2], acc[4 * i + 3]));
      acc[4 * i] = sum.x, acc[4 * i + 1] = sum.y, acc[4 * i + 2] = sum.z, acc[4 * i + 3] = sum.w;
    }
    if (s == 7) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) acc[i] = __fadd_rn(waiting_longest[i], acc[i]);
    } else if (s + 1 < segments) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) waiting_longest[i] = acc[i];
    }
  };
  bool decodes_next = false;  // a sequence: the next segment's first chunk during the last products
  // Slot and phase of chunk d of a step.
  const auto x_slot = [](int d) { return d % kXRing / kXChunks; };
  const auto wait_x = [&](int d) {
    barrier_wait(full + 8 * x_slot(d), kXRing == kStep ? step_phase : d / kXRing & 1);
  };
  const auto release_x = [&](int d) {
    if (lane == 0) barrier_arrive(empty + 8 * x_slot(d));
  };
  for (CtaRounds round = first; !round.done(); round.next()) {
    if (round.size() <= unit_of_round) {  // no unit for this warpgroup
      for (int s = 0; s < segments; ++s) {
        const int count = segment(round, s).count;
        for (int c = 0; c < count; c += kStep) {
#pragma unroll 1
          for (int d = 0; d < kStep; d += kXChunks) {
            wait_x(d);
            release_x(d);
          }
          step_phase ^= 1;
        }
      }
      continue;
    }
    float acc[kTokens / 2];
    // Two sets of A fragments of a part of a chunk: one is decoded while the tensor cores still
    // read the other.
    constexpr int kSteps = tile_part_steps(kTokens, kGroups, kCtas, kBits), kParts = 4 / kSteps;
    static_assert(kParts == 1 || (kBits != 0 && kBits != kDenseBits),
                  "fragments that are loaded, not computed, must not be held by parts");
    std::uint32_t fragments[2][2][kSteps][2];
    RawChunk<T, kBits, kGroup> raw;
    // Decodes part p of chunk d of a step; last: of the tile.
    const auto decode = [&](int d, int p, bool last) {
      if (p == 0) {
        if (d % kStageChunks == 0) {
          barrier_wait(weights_barrier + 8 * weight_slot, weight_phase);
          stage = ring + weight_slot * stages.bytes;
        }
        raw.load(shape, stage + d % kStageChunks * bytes_a_chunk, lane);
      }
      std::uint32_t(&a)[2][kSteps][2] = fragments[(d * kParts + p) % 2];
      if constexpr (kSteps == 4) {
        raw.template decode<0>(a, 0);
        raw.template decode<1>(a, 1);
        raw.template decode<2>(a, 2);
        raw.template decode<3>(a, 3);
      } else if (p == 0) {
        raw.template decode<0>(a, 0);
        raw.template decode<1>(a, 1);
      } else {
        raw.template decode<2>(a, 0);
        raw.template decode<3>(a, 1);
      }
      if (p == kParts - 1 && (d % kStageChunks == kStageChunks - 1 || last)) {
        if constexpr (kReleases == 1) __syncwarp();
        if (kReleases > 1 || lane == 0) {
          barrier_arrive(weights_barrier + 8 * weight_slot + kFullToEmpty);
        }
        if (++weight_slot == args.weight_stages) weight_slot = 0, weight_phase ^= 1;
      }
    };
    // The sums of a part run while the next one is decoded; x is given back after that.
    const auto step = [&](int c, auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      const int count = kWhole ? kStep : C - c;
#pragma unroll
      for (int d = 0; d < kStep; ++d) {
        if (!kWhole && d >= count) {
          if (d % kXChunks == 0) {
            if (d - kXChunks < count) {
              wgmma_wait<0>();
              release_x(d - 1);
            }
            wait_x(d);
            release_x(d);
          }
          continue;
        }
        if (d % kXChunks == 0) wait_x(d);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const std::uint32_t x = x_descriptor + d % kXRing * (kXChunkBytes / 16) + p * kSteps * 2;
          const std::uint32_t(&a)[2][kSteps][2] = fragments[(d * kParts + p) % 2];
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < kSteps; ++j) {
            wgmma<T, kTokens>(acc, a[0][j][0], a[1][j][0], a[0][j][1], a[1][j][1], x + 2 * j,
                              d > 0 || p > 0 || j > 0 ? 1 : c);
          }
          wgmma_commit();
          if (d > 0 || p > 0 || c > 0) {
            wgmma_wait<1>();
            if (p == 0 && d % kXChunks == 0) release_x(d == 0 ? kStep - 1 : d - 1);
          }
          if (p + 1 < kParts) {
            decode(d, p + 1, !kWhole && d + 1 == count);
          } else if (d + 1 < count || (kWhole && (c + kStep < C || decodes_next))) {
            decode((d + 1) % kStep, 0, (!kWhole || d + 1 == kStep) && c + d + 2 == C);
          }
        }
      }
      step_phase ^= 1;
    };
#pragma unroll 1
    for (int s = 0; s < segments; ++s) {
      const bool is_decoded = decodes_next;
      if constexpr (kSplit != TileSplit::none) C = segment(round, s).count;
      decodes_next = s + 1 < segments && C % kStep == 0;
      if (!is_decoded) decode(0, 0, C == 1);
      int c = 0;
      for (; c + kStep <= C; c += kStep) step(c, std::true_type{});
      if (c < C) step(c, std::false_type{});
      wgmma_wait<0>();
      if (C % kStep == 0 || C % kStep > kStep - kXChunks) release_x(kStep - 1);
      if constexpr (kSplit == TileSplit::sequence) join_segment(acc, s);
    }
    wait_for_previous_grid();  // the residual and out itself may depend on it
    const int tile = (round.unit + unit_of_round) * kUnitTiles + consumer % 4;
    if (tile >= matmul.num_tiles) continue;
    const std::int64_t m = static_cast<std::int64_t>(block_of(round)) * kTokens;
    if constexpr (kSplit == TileSplit::apart) {
      const std::int64_t stride = 32 * matmul.segments, all = (matmul.M + 7) / 8;
      float4* const to =
          args.partials + (tile * all + m / 8) * stride + round.block % matmul.segments * 32 + lane;
#pragma unroll
      for (int b = 0; b < kTokens / 8; ++b) {
        if (m + 8 * b >= matmul.M) break;
        to[b * stride] = make_float4(acc[4 * b], acc[4 * b + 1], acc[4 * b + 2], acc[4 * b + 3]);
      }
    } else if constexpr (kWords) {
      store_words<T, kTokens / 8>(matmul.epilogue, tile, lane, m, matmul.M, acc);
    } else {
      store_elements<T, kTokens / 8>(matmul.epilogue, tile, lane, m, matmul.M, acc);
    }
  }
}

template <class T, int kTokens, int kGroups, int kCtas, int kBits, int kGroup, bool kWords>
__global__ void __launch_bounds__(128 * (kGroups + 1), kCtas)
    tile_kernel(const __grid_constant__ TileArgs args, const __grid_constant__ CUtensorMap x_map) {
  tile_body<T, kTokens, kGroups, kCtas, kBits, kGroup, kWords, TileSplit::none>(args, x_map);
}

template <class T, int kTokens, int kGroups, int kBits, int kGroup, TileSplit kSplit>
__global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    split_tile_kernel(const __grid_constant__ SplitTileArgs args,
                      const __grid_constant__ CUtensorMap x_map) {
  tile_body<T, kTokens, kGroups, 1, kBits, kGroup, true, kSplit>(args, x_map);
}

}  // namespace qmlp::cuda
