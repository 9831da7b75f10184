#pragma once

#include <cstdint>
#include <vector>

#include "qmlp/types.h"

// The pinned activations of docs/numerics.md section 4, one value at a time.
namespace qmlp::ref {

// Whose sigmoid a 16-bit type uses. MLX on CUDA rounds four times to the type, MLX on a CPU twice.
enum class SigmoidKind : std::uint8_t { mlx_cuda, mlx_cpu };

// Entry i is the sigmoid of the f16 or bf16 bit pattern i. Built on first use, then shared.
const std::vector<std::uint16_t>& sigmoid_table(DType type, SigmoidKind kind);

// e^x of x <= 0 in IEEE f32 operations of one fixed order.
float exp_nonpositive(float x) noexcept;
// 1 / (1 + e^-x) from it: what T = f32 uses, and `wide` in every type.
float sigmoid_f32(float x) noexcept;

// MLX's f32 sigmoid on a CPU, which its own f32 vectors were made with.
float mlx_cpu_sigmoid_f32(float x) noexcept;

// The sigmoid of a value of `type` as `match` takes it.
float sigmoid(float x, DType type, SigmoidKind kind = SigmoidKind::mlx_cuda);

}  // namespace qmlp::ref
