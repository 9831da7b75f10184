#pragma once

#include <cstdint>

#include "qmlp/types.h"

// The accumulation contracts of docs/numerics.md section 3, one output at a time.
namespace qmlp::ref {

// How a dot product is summed. segments counts for `tensor` alone.
struct Contract {
  Accumulation accumulation = Accumulation::f32;
  int segments = 1;
};

// acc = fma(x_k, w_k, acc) over ascending k, from +0.
float dot_f32(const float* x, const float* w, std::int64_t K) noexcept;

// One step of the sm_90 tensor core in integer arithmetic: 16 products of `type` (f16 or bf16) bit
// patterns and an f32 accumulator's bits, giving the f32 result's bits.
std::uint32_t step16(const std::uint16_t* a, const std::uint16_t* b, std::uint32_t acc,
                     DType type) noexcept;

// tensor/segments. x and w hold values of `type`; segments is 1, 2, 4 or 8.
float dot_tensor(const float* x, const float* w, std::int64_t K, int segments, DType type);

float dot(const float* x, const float* w, std::int64_t K, const Contract& contract, DType type);

}  // namespace qmlp::ref
