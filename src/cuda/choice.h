#pragma once

#include <cstdint>
#include <optional>

#include "cuda/layout.h"
#include "qmlp/plan.h"

// How the kernels are launched, as host code alone. Every choice has the same bits; which is fast
// was measured (docs/decisions/0012-cuda-tuning.md).
namespace qmlp::cuda {

// Of a CTA's shared memory, left to what kernels declare themselves.
constexpr std::size_t kStaticSharedBytes = 2048;

// Bytes from one row of x in shared memory to the next: 16 more than a multiple of 128, so that
// ldmatrix reads eight rows without bank conflicts.
QMLP_HOST_DEVICE constexpr std::uint32_t x_row_bytes(std::int64_t num_chunks) {
  return static_cast<std::uint32_t>(num_chunks) * kChunkK * 2 + 16;
}
constexpr std::size_t shared_x_bytes(std::int64_t num_chunks, std::int64_t rows) {
  return static_cast<std::size_t>(x_row_bytes(num_chunks)) * static_cast<std::size_t>(rows);
}

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

// A chain of sums carried by several warps in turn (kernels/relay.cuh).
constexpr int kRelayMaxWarps = 8;  // what registers allow
constexpr int kRelayMaxLegs = 4;
constexpr int kRelayRows = 8;  // of x
struct RelayChoice {
  int warps, legs;  // of a CTA; of each chain
  int stages, grid;
  std::size_t shared_bytes;
};
// Nothing where shared memory cannot hold it.
std::optional<RelayChoice> choose_relay(const StreamShape& shape,
                                        const DeviceFacts& device) noexcept;
// Whether a relay was measured to be faster than stream_kernel: one or two chains an SM, and long
// ones, of whole stages and one segment.
bool prefers_relay(std::int64_t num_tiles, std::int64_t num_chunks, int segments,
                   const DeviceFacts& device) noexcept;
// Whether the tile kernels are faster than stream_kernel at M = 5 to 8: a SwiGLU whose bytes do not
// quite bind.
bool prefers_tile(std::int64_t num_tiles, const DeviceFacts& device) noexcept;

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
