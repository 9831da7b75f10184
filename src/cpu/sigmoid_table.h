#pragma once

#include "qmlp/types.h"

namespace qmlp::cpu {

// sigmoid_T for every bit pattern of bf16 or f16: MLX-CUDA's table (docs/numerics.md section 4).
// Built on first use; thread safe. Null for f32.
const unsigned short* sigmoid_table(DType dtype) noexcept;

}  // namespace qmlp::cpu
