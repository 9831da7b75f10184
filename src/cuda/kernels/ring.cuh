#pragma once

#include "cuda/device/ptx.cuh"

namespace qmlp::cuda {

constexpr int kStageChunks = 8;  // chunks of one copy; even, so that a stage starts with its scales
constexpr int kMaxStages = 4;

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

}  // namespace qmlp::cuda
