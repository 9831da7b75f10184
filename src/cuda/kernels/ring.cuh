#pragma once

#include "cuda/device/ptx.cuh"

namespace qmlp::cuda {

constexpr int kCopyStages = 4;  // of a ring without bulk copies

// How a tile's stream is cut into stages of `stage_chunks` chunks, one copy each.
struct TileStages {
  std::uint32_t bytes;       // of a whole stage
  std::uint32_t last_bytes;  // of a tile's last one
  int count, last_chunks;
};
__device__ __forceinline__ TileStages tile_stages(std::uint32_t chunk_bytes, int stage_chunks,
                                                  int num_chunks) {
  TileStages stages;
  stages.bytes = chunk_bytes * stage_chunks;
  stages.count = (num_chunks + stage_chunks - 1) / stage_chunks;
  stages.last_chunks = num_chunks - (stages.count - 1) * stage_chunks;
  stages.last_bytes = chunk_bytes * stages.last_chunks;
  return stages;
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
      if (lane < num_stages) {
        barrier_init(barriers + 8 * lane, 1);
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
  // Waits for a stage's `round`th filling; every lane sees its bytes after.
  __device__ void wait(int stage, std::uint32_t round) const {
    if constexpr (kBulk) {
      barrier_wait(barriers + 8 * stage, round & 1);
    } else {
      copy_wait<kCopyStages - 1>();
      __syncwarp();
    }
  }
};

}  // namespace qmlp::cuda
