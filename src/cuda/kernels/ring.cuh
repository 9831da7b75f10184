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
  std::uint32_t barriers;  // kBulk: one for each stage, 8 bytes each
  std::uint32_t stage_bytes;
  int num_stages;

  __device__ __forceinline__ std::uint32_t bytes() const { return num_stages * stage_bytes; }
  __device__ __forceinline__ std::uint32_t stage(int slot) const {
    return data + slot * stage_bytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(int slot) const { return barriers + 8 * slot; }

  __device__ void init(int lane) const {
    if constexpr (kBulk) {
      if (lane < num_stages) {
        barrier_init(barrier(lane), 1);
        barrier_init_fence();
      }
      __syncwarp();
    }
  }
  __device__ static void fill(std::uint32_t stage, std::uint32_t barrier, const std::uint8_t* from,
                              std::uint32_t bytes, int lane) {
    if constexpr (kBulk) {
      bulk_fill(lane == 0, stage, from, bytes, barrier);
    } else {
      for (std::uint32_t i = lane * 16; i < bytes; i += 512) copy_16_async(stage + i, from + i);
    }
  }
  __device__ static void commit() {
    if constexpr (!kBulk) copy_commit();
  }
  // Waits for a stage's filling, whose number is even or odd; every lane sees its bytes after.
  __device__ static void wait(std::uint32_t barrier, std::uint32_t parity) {
    if constexpr (kBulk) {
      barrier_wait(barrier, parity);
    } else {
      copy_wait<kCopyStages - 1>();
      __syncwarp();
    }
  }
};

}  // namespace qmlp::cuda
