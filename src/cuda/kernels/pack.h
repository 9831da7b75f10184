#pragma once

#include <cuda_runtime_api.h>

#include "cuda/device/packing.h"
#include "cuda/kernels/launch.h"

// Launchers of pack.cu, for any GPU from compute capability 8.0 on. They return a cudaError_t.
namespace qmlp::cuda {

// Widens *range, in device memory, by `count` bf16 scales and biases.
int launch_scale_range(const void* scales, const void* biases, std::int64_t count,
                       ScaleRange* range, cudaStream_t stream);

// Rows from first_row on, a multiple of a tile's, of matrix `part` into tiles, whole tiles at a
// time: rows beyond the source's are zeros. Sets *non_finite where a decoded weight is not finite.
struct PackRows {
  TileLayout layout;
  std::uint8_t* tiles;
  SourceRows source;  // of these rows alone
  std::int64_t first_row;
  int part;
  std::uint32_t* non_finite;
};
int launch_pack(const PackRows& args, cudaStream_t stream);

// A SwiGLU's matrix `part` as tiles of a linear.
struct PartCopy {
  TileLayout from, to;
  const std::uint8_t* from_tiles;
  std::uint8_t* to_tiles;
  int part;
};
int launch_part(const PartCopy& args, cudaStream_t stream);

// Rows of matrix `part` as its source held them; no alignment is needed. scales may be null when
// dense.
struct UnpackRows {
  TileLayout layout;
  const std::uint8_t* tiles;
  int part;
  int group_size;  // the source's
  std::int64_t first_row, rows;
  std::byte* codes;
  std::byte* scales;
  std::byte* biases;
};
int launch_unpack(const UnpackRows& args, cudaStream_t stream);

// K elements of a row of a linear's weight, in the activation type.
struct DecodeRow {
  TileLayout layout;
  const std::uint8_t* tiles;
  std::int64_t row;
  void* out;
};
int launch_decode_row(const DecodeRow& args, const LaunchTarget& target);

// out = silu(gate) * up with `match` roundings; out may be one of the inputs.
struct ActivationArgs {
  const void* gate;  // [M, N] of the activation type, as all three
  const void* up;
  void* out;
  std::int64_t gate_stride, up_stride, out_stride;
  std::int64_t M, N;
};
int launch_swiglu_activation(Element element, const ActivationArgs& args,
                             const LaunchTarget& target);

}  // namespace qmlp::cuda
