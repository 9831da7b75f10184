#pragma once

#include <cstdint>
#include <vector>

#include "qmlp/tensor.h"

namespace qmlp::ref {

// scale * code + bias rounded once to `type` (docs/numerics.md section 2), widened.
float decoded_weight(float scale, int code, float bias, DType type) noexcept;

// Code k of a packed row, read bit by bit.
int code_at(const std::byte* row, int bits, std::int64_t k) noexcept;

// Rows [row_begin, row_end) of a valid weight, decoded, rounded to `type` and widened: K floats a
// row.
std::vector<float> decode(const QuantizedTensorView& weight, std::int64_t row_begin,
                          std::int64_t row_end, DType type);
inline std::vector<float> decode(const QuantizedTensorView& weight, DType type) {
  return decode(weight, 0, weight.N, type);
}

// The same rows as exact reals: scale * code + bias in double (31 bits of product, one rounding of
// the sum to 53).
std::vector<double> decode_f64(const QuantizedTensorView& weight, std::int64_t row_begin,
                               std::int64_t row_end);

// A float of a weight's scales, biases or dense values.
float element(const std::byte* data, DType type, std::int64_t index) noexcept;

}  // namespace qmlp::ref
