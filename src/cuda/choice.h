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
  int first_stages;  // that are loaded before x is
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

// The instances of the tile kernel: tokens of a block, consumer warpgroups of a CTA, CTAs an SM.
// t128_sequence is t128 but for K of several segments: a warpgroup sums them one after another. The
// others that take segments sum them apart, each as a unit of its own.
enum class TileConfig : std::uint8_t {
  t16,
  t16_pair,
  t32,
  t32_pair,
  t64,
  t128,
  t256,
  t128_sequence
};
constexpr int kNumTileConfigs = 8;
constexpr std::int64_t tiles_of(std::int64_t N, bool is_swiglu) {
  const std::int64_t rows = is_swiglu ? kHalfRows : kTileRows;
  return (N + rows - 1) / rows;
}
constexpr bool splits_k(TileConfig config) {
  return config == TileConfig::t32 || config == TileConfig::t64 || config == TileConfig::t128 ||
         config == TileConfig::t128_sequence;
}
// A tile's TileShape::bits from its halves'.
constexpr int common_bits(int first, int second) {
  return first == second && first != kDenseBits ? first : 0;
}
struct TileShape {
  std::int64_t M, num_tiles, num_chunks;
  int segments;  // of K
  int bits;      // of both halves; 0 where they differ or are dense, which have no pairs of CTAs
};
TileConfig choose_tile(const TileShape& shape, const DeviceFacts& device) noexcept;

// Units of a round, at most `most`, of an instance that sums segments apart: blocks of tokens and
// segment have `units` units each.
int choose_round_units(int tokens, int most, std::int64_t units, std::int64_t blocks,
                       const DeviceFacts& device) noexcept;
// Sums of segments apart lie in scratch memory, f32, in blocks of 8 rows; M may be cut so that they
// stay few.
constexpr std::int64_t partial_row_bytes(std::int64_t num_tiles, int segments) {
  return num_tiles * kTileRows * 4 * segments;
}
constexpr std::int64_t partial_rows(std::int64_t M, std::int64_t num_tiles, int segments) {
  constexpr std::int64_t kMostBytes = 32 << 20, kBlock = 128;
  const std::int64_t blocks = kMostBytes / (partial_row_bytes(num_tiles, segments) * kBlock);
  const std::int64_t rows = (blocks < 1 ? 1 : blocks) * kBlock;
  return M < rows ? M : rows;
}
constexpr std::size_t partial_bytes(std::int64_t M, std::int64_t num_tiles, int segments) {
  if (segments <= 1) return 0;
  const std::int64_t rows = (partial_rows(M, num_tiles, segments) + 7) / 8 * 8;
  return static_cast<std::size_t>(rows * partial_row_bytes(num_tiles, segments));
}

}  // namespace qmlp::cuda
