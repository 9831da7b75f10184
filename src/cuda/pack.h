#pragma once

#include <cstdint>
#include <vector>

#include "cuda/layout.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"

namespace qmlp::cuda {

// A weight as the CUDA kernels read it, in host memory.
struct HostTiles {
  std::vector<std::uint8_t> bytes;
  TileFormat format;
  std::int64_t num_tiles = 0;
  std::int64_t num_chunks = 0;
  std::int64_t tile_bytes = 0;
  float unscale[2] = {1.0f, 1.0f};
  std::int64_t exact_tiles = 0;  // all of them when a half had to be decoded
};

// Packs one matrix (a linear) or gate and up (a SwiGLU) for 16-bit activations. A half is kept as
// decoded weights when it is dense or its scales are not of the activation type.
Result<HostTiles> pack_tiles(const QuantizedTensorView* weights, int num_weights, DType activation);

}  // namespace qmlp::cuda
