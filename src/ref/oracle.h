#pragma once

#include <cstdint>
#include <span>

#include "qmlp/types.h"

// Float64 results with the error that a kernel of the contract may have (docs/numerics.md section
// 5).
namespace qmlp::ref {

struct Bounded {
  double value = 0.0;
  double bound = 0.0;      // |kernel - value| <= bound
  double sum_bound = 0.0;  // the part of it that the f32 sum may have, before rounding to the type
};

// Half a unit in the last place of 1: 2^-24, 2^-11, 2^-8.
double unit_roundoff(DType type) noexcept;

// x . w summed in f32 by either contract, with a linear bias where not null, rounded to `type`; w
// is the contract's own weight.
Bounded linear_oracle(const float* x, const float* w, std::int64_t K, DType type,
                      const float* linear_bias = nullptr);
// The same when w is exact, while the kernel rounds each weight to `type`.
Bounded linear_oracle_exact_weights(const float* x, const double* w, std::int64_t K, DType type);

// What MLX on CUDA may give for fewer than 8 rows, where its mat-vec sums in `type` below 8 bits.
Bounded mlx_cuda_small_m_oracle(const float* x, const float* w, std::int64_t K, DType type,
                                int bits);

// silu(gate) * up from the two projections' values and bounds, with the roundings of `precision`.
Bounded swiglu_oracle(const Bounded& gate, const Bounded& up, DType type, Precision precision);

// How far y lies from the value, in units of the bound: 1 or less passes. Two infinities of one
// sign agree; a NaN never does; an infinite y passes where the value may leave the type's range.
double error_in_bounds(float y, const Bounded& expected, DType type) noexcept;

// Steps between two values of `type` along the type's own grid; -1 if either is NaN.
std::int64_t ulp_distance(float a, float b, DType type) noexcept;

}  // namespace qmlp::ref
