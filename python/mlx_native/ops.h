#pragma once

#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "weights.h"

namespace qmlp_mlx {

using mlx::core::array;
using mlx::core::StreamOrDevice;
using OptionalArray = std::optional<array>;

// out[..., N] = x[..., K] * w^T (+ linear_bias) (+ residual), in MLX's promoted type of x and the
// scales. A bias or residual of a wider type is added by MLX, which promotes the result.
array quantized_linear(const array& x, const PackedWeightPtr& weight,
                       const OptionalArray& linear_bias, const OptionalArray& residual,
                       StreamOrDevice s);
// out[..., intermediate] = silu(x * gate^T) * (x * up^T). With a bias of a wider type in three
// steps, the last of them MLX's.
array fused_swiglu(const array& x, const PackedWeightPtr& gate_up, const OptionalArray& gate_bias,
                   const OptionalArray& up_bias, StreamOrDevice s);
// down(swiglu(x)) (+ down_bias) (+ residual).
array fused_mlp(const array& x, const PackedWeightPtr& gate_up, const PackedWeightPtr& down,
                const OptionalArray& gate_bias, const OptionalArray& up_bias,
                const OptionalArray& down_bias, const OptionalArray& residual, StreamOrDevice s);

// The weight as MLX holds it: codes, scales, biases (a dense one: its floats alone), lazily, all
// rows or those that `ids` names (negative ones count from the end).
std::vector<array> unpack(const PackedWeightPtr& weight, const OptionalArray& ids,
                          StreamOrDevice s);

}  // namespace qmlp_mlx
