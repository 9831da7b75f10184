#pragma once

#include <cstdint>

#include "mlx/mlx.h"

// The small ops between a layer's matrices. MLX's CPU code runs each as a graph of many tiny ops,
// which at one token costs more than the work; here each is one task with the same roundings.
namespace qmlp_mlx {

// mx.fast.rms_norm with a weight of x's type.
mlx::core::array rms_norm(const mlx::core::array& x, const mlx::core::array& weight, float eps,
                          mlx::core::StreamOrDevice s);
// mx.fast.rope with a scalar offset and the default frequencies, for x [B, heads, T, D].
// inv_freqs [dims / 2] are those that MLX computes.
mlx::core::array rope(const mlx::core::array& x, const mlx::core::array& inv_freqs, int dims,
                      bool traditional, float base, float scale, int offset,
                      mlx::core::StreamOrDevice s);

// mx.dequantize of the affine mode, for codes [..., K * bits / 32] of uint32 and scales and biases
// [..., K / group_size] of one floating type: few rows, such as those of an embedding.
mlx::core::array dequantize_rows(const mlx::core::array& codes, const mlx::core::array& scales,
                                 const mlx::core::array& biases, int bits, int group_size,
                                 mlx::core::StreamOrDevice s);

}  // namespace qmlp_mlx
