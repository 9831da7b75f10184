#pragma once

#include <cstdint>

#include "cuda/layout.h"

// What one launch gets by value.
namespace qmlp::cuda {

struct EpilogueArgs {
  void* out;  // [M, N] of the activation type
  std::int64_t out_stride;
  std::int64_t N;
  const void* linear_bias[2];  // [N], or null
  const void* residual;        // [M, N], or null
  std::int64_t residual_stride;
  void* gate_tap;  // [M, N], or null
  std::int64_t gate_tap_stride;
  float unscale[2];  // powers of two that undo the packed halves' own
  int is_swiglu;
  int wide;
};

struct MatmulArgs {
  const std::uint8_t* weights;  // tiles, each tile_bytes long
  std::int64_t tile_bytes;
  TileFormat format;
  std::int64_t num_tiles;
  std::int64_t num_chunks;
  const void* x;  // [M, K] of the activation type
  std::int64_t x_stride;
  std::int64_t M, K;
  int segments;            // of K, each a chain of sums of its own
  std::uint32_t* scratch;  // x in fragment order, or sums of segments; or null
  EpilogueArgs epilogue;
};

}  // namespace qmlp::cuda
