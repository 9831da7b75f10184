#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qmlp/types.h"
#include "ref/activation.h"
#include "ref/dot.h"

// The library's ops, slow and obvious, on values already widened to f32. Every float argument and
// result is a value of `type`; matrices are row-major and contiguous.
namespace qmlp::ref {

struct Rules {
  DType type = DType::bf16;
  Contract contract;
  Precision precision = Precision::match;
  SigmoidKind sigmoid = SigmoidKind::mlx_cuda;
};

// round(acc), then + bias and residual + y, each rounded; absent when null.
float linear_epilogue(float acc, const float* linear_bias, const float* residual, DType type);

// silu(gate) * up with the roundings of `match`.
float match_epilogue(float gate, float up, DType type, SigmoidKind sigmoid = SigmoidKind::mlx_cuda);
// (acc_gate * sigmoid(acc_gate)) * acc_up in f32, one rounding to `type`.
float wide_epilogue(float acc_gate, float acc_up, DType type);

// out[M, N] = x[M, K] * w[N, K]^T, with an optional linear bias [N] and residual [M, N].
std::vector<float> linear(std::span<const float> x, std::span<const float> w, std::int64_t M,
                          std::int64_t N, std::int64_t K, const Rules& rules,
                          const float* linear_bias = nullptr, const float* residual = nullptr);

struct SwigluResult {
  std::vector<float> gate;  // the raw projection with its linear bias, rounded to `type`
  std::vector<float> out;
};
SwigluResult swiglu(std::span<const float> x, std::span<const float> gate,
                    std::span<const float> up, std::int64_t M, std::int64_t N, std::int64_t K,
                    const Rules& rules, const float* gate_bias = nullptr,
                    const float* up_bias = nullptr);

}  // namespace qmlp::ref
