#pragma once

#include "cuda/device/packing.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"

namespace qmlp::cuda {

// How one matrix is kept in a tile's half.
struct HalfChoice {
  int bits;        // kDenseBits: as decoded weights
  int group_size;  // the most that a scale set covers
  int prescale;
};

// Whether a choice depends on the scales' values.
bool needs_scale_range(const QuantSpec& spec, DType activation) noexcept;
// A matrix is kept as decoded weights when it is dense, or its scales are not of the activation
// type, or are too large. `range` is of its scales and biases where needs_scale_range says so.
HalfChoice choose_half(const QuantSpec& spec, DType activation, const ScaleRange& range) noexcept;

// Tiles of gate and up (a SwiGLU) or of one matrix (a linear, choices[0] alone).
Result<TileLayout> lay_out_tiles(std::int64_t N, std::int64_t K, const HalfChoice* choices,
                                 bool is_swiglu, DType activation);

}  // namespace qmlp::cuda
