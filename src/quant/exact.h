#pragma once

#include <cstdint>

#include "base/float16.h"
#include "qmlp/tensor.h"
#include "qmlp/types.h"
#include "quant/codes.h"

// The decoded weight of docs/numerics.md section 2, correctly rounded for every scale, code and
// bias. "Round to odd" keeps a discarded part visible in the last bit, so that a later rounding to
// at least two bits fewer is the single correct rounding of the exact value.
namespace qmlp {

// value + other rounded to odd in double. Both finite, the sum below overflow.
QMLP_HOST_DEVICE inline double add_to_odd(double value, double other) noexcept {
  const double sum = value + other;
  const double virtual_other = sum - value;
  const double error = (value - (sum - virtual_other)) + (other - virtual_other);  // exact (TwoSum)
  if (error == 0.0) return sum;
  const auto bits = __builtin_bit_cast(std::uint64_t, sum);
  if ((bits & 1u) != 0) return sum;
  const bool away_from_zero = (error > 0.0) == (sum > 0.0);
  return __builtin_bit_cast(double, away_from_zero ? bits + 1 : bits - 1);
}

// A finite double rounded to odd in f32; magnitudes past f32's range give its largest value.
QMLP_HOST_DEVICE inline float narrow_to_odd(double value) noexcept {
  const auto nearest = static_cast<float>(value);
  const auto widened = static_cast<double>(nearest);
  if (widened == value) return nearest;
  const auto bits = __builtin_bit_cast(std::uint32_t, nearest);
  if ((bits & 1u) != 0) return nearest;
  const double magnitude = value < 0.0 ? -value : value;
  const double nearest_magnitude = widened < 0.0 ? -widened : widened;
  return __builtin_bit_cast(float, magnitude > nearest_magnitude ? bits + 1 : bits - 1);
}

// scale * code + bias, rounded once to `type` and widened. 0 <= code < 256.
QMLP_HOST_DEVICE inline float exact_weight(float scale, int code, float bias, DType type) noexcept {
  const double product = static_cast<double>(scale) * code;  // 24 + 8 bits: exact
  const double offset = bias;
  const double plain = product + offset;
  if (!(plain - plain == 0.0)) return static_cast<float>(plain);  // infinity or NaN
  const double sum = add_to_odd(product, offset);
  if (type == DType::f32) return static_cast<float>(sum);
  return round_to(narrow_to_odd(sum), type);
}

// Element (row, k) of a valid weight, dense or affine, rounded once to `type` and widened.
inline float exact_element(const QuantizedTensorView& w, std::int64_t row, std::int64_t k,
                           DType type) noexcept {
  const QuantSpec& spec = w.spec;
  if (spec.is_dense()) {
    return round_to(load_float(w.codes.data(), spec.scale_dtype, row * w.K + k), type);
  }
  const std::int64_t group = row * (w.K / spec.group_size) + k / spec.group_size;
  const std::byte* codes = w.codes.data() + row * packed_row_bytes(w.K, spec.bits);
  return exact_weight(load_float(w.scales.data(), spec.scale_dtype, group),
                      extract_code(codes, spec.bits, k),
                      load_float(w.biases.data(), spec.scale_dtype, group), type);
}

}  // namespace qmlp
