#pragma once

#include <cstdint>

#include "cuda/layout.h"
#include "qmlp/plan.h"

// How the kernels are launched, as host code alone. Every choice has the same bits; which is fast
// was measured (docs/decisions/0012-cuda-tuning.md).
namespace qmlp::cuda {

// Of a CTA's shared memory, left to what kernels declare themselves.
constexpr std::size_t kStaticSharedBytes = 2048;

constexpr int kStreamStageChunks = 8;  // most chunks of one copy of weights of a stream kernel

struct StreamShape {
  TileFormat format;
  std::int64_t num_tiles, num_chunks;
  int segments;         // of K; a team of as many warps takes a tile
  int token_blocks;     // of 8
  std::size_t x_bytes;  // of x in shared memory
  int fixed_stages;     // where the ring's depth is not free, or 0
};
struct StreamChoice {
  int warps, stages, grid;
  int stage_chunks;  // kStreamStageChunks, or fewer where that many do not fit
  std::size_t shared_bytes;
};
StreamChoice choose_stream(const StreamShape& shape, const DeviceFacts& device) noexcept;

// The instances of the tile kernel: tokens of a block, consumer warpgroups of a CTA, CTAs an SM.
enum class TileConfig : std::uint8_t { t16, t16_pair, t32, t32_pair, t64, t128, t256 };
constexpr int kNumTileConfigs = 7;
constexpr std::int64_t tiles_of(std::int64_t N, bool is_swiglu) {
  const std::int64_t rows = is_swiglu ? kHalfRows : kTileRows;
  return (N + rows - 1) / rows;
}
TileConfig choose_tile(std::int64_t M, std::int64_t num_tiles, std::int64_t num_chunks,
                       const DeviceFacts& device) noexcept;

}  // namespace qmlp::cuda
