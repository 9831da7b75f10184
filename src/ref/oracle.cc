#include "ref/oracle.h"

#include <bit>
#include <cmath>
#include <limits>

#include "ref/rounding.h"

namespace qmlp::ref {
namespace {

// From here on a value rounds to infinity: half a step past the greatest finite one.
double overflow_threshold(DType type) {
  const Format format = format_of(type);
  const double steps = std::ldexp(1.0, format.significand_bits) - 0.5;
  return std::ldexp(steps, format.greatest_exponent);
}

double half_subnormal(DType type) { return std::ldexp(0.5, format_of(type).least_exponent); }

template <class Weight>
Bounded sum_of_products(const float* x, const Weight* w, std::int64_t K, double weight_error,
                        double weight_step) {
  double value = 0.0;
  double magnitude = 0.0;
  double total_x = 0.0;
  for (std::int64_t k = 0; k < K; ++k) {
    const double product = static_cast<double>(x[k]) * static_cast<double>(w[k]);
    value += product;
    magnitude += std::fabs(product);
    total_x += std::fabs(x[k]);
  }
  const double sum_bound =
      (static_cast<double>(K) * unit_roundoff(DType::f32) + weight_error) * magnitude;
  const double least = static_cast<double>(K) * half_subnormal(DType::f32);
  return {value, 0.0, sum_bound + weight_step * total_x + least};
}

Bounded rounded(Bounded sum, DType type, const float* linear_bias) {
  const double u = unit_roundoff(type);
  sum.bound = sum.sum_bound + u * (std::fabs(sum.value) + sum.sum_bound) + half_subnormal(type);
  if (linear_bias == nullptr) return sum;
  sum.value += *linear_bias;
  const double last = u * (std::fabs(sum.value) + sum.bound) + half_subnormal(type);
  sum.bound += last;
  // `wide` adds the bias in f32.
  sum.sum_bound += unit_roundoff(DType::f32) * (std::fabs(sum.value) + sum.sum_bound);
  return sum;
}

double silu(double g) {
  return g < 0.0 ? g * std::exp(g) / (1.0 + std::exp(g)) : g / (1.0 + std::exp(-g));
}

}  // namespace

double unit_roundoff(DType type) noexcept {
  return std::ldexp(1.0, -format_of(type).significand_bits);
}

Bounded linear_oracle(const float* x, const float* w, std::int64_t K, DType type,
                      const float* linear_bias) {
  return rounded(sum_of_products(x, w, K, 0.0, 0.0), type, linear_bias);
}

Bounded linear_oracle_exact_weights(const float* x, const double* w, std::int64_t K, DType type) {
  const Bounded sum = sum_of_products(x, w, K, unit_roundoff(type), half_subnormal(type));
  return rounded(sum, type, nullptr);
}

Bounded mlx_cuda_small_m_oracle(const float* x, const float* w, std::int64_t K, DType type,
                                int bits) {
  Bounded sum = sum_of_products(x, w, K, 0.0, 0.0);
  if (bits < 8) {
    // Each of 32 lanes keeps this many partial sums in the type, a chain of FMAs each.
    const std::int64_t partials = 32 * (bits <= 4 ? 16 : 8);
    const auto chain = static_cast<double>(K) / static_cast<double>(partials) + 1.0;
    sum = sum_of_products(x, w, K, chain * unit_roundoff(type), 0.0);
    sum.sum_bound += static_cast<double>(K) * half_subnormal(type);
  }
  return rounded(sum, type, nullptr);
}

Bounded swiglu_oracle(const Bounded& gate, const Bounded& up, DType type, Precision precision) {
  const bool match = precision == Precision::match;
  const double g = gate.value;
  const double u = up.value;
  const double gate_error = match ? gate.bound : gate.sum_bound;
  const double up_error = match ? up.bound : up.sum_bound;
  const double activated = silu(g);
  Bounded result;
  result.value = activated * u;

  constexpr double kSlope = 1.1;  // |silu'| stays below it
  const double activated_error = kSlope * gate_error;
  double bound = (std::fabs(u) + up_error) * activated_error + std::fabs(activated) * up_error;
  const double reach = std::fabs(result.value) + bound;  // of the true product, its inputs moved
  const double up_reach = std::fabs(u) + up_error;
  const double gate_reach = std::fabs(g) + gate_error;
  const double type_unit = unit_roundoff(type);
  const double f32_unit = unit_roundoff(DType::f32);
  if (match && type != DType::f32) {
    // The sigmoid's table is within 4 units (e, 1 + e, its reciprocal, 1 - y); silu and the product
    // round once each. The tenth covers products of these.
    bound += 6.1 * type_unit * reach;
    bound += half_subnormal(type) * (4.0 * gate_reach * up_reach + up_reach + 1.0);
    // MLX's f16 exponential overflows from 11.09 on, so its silu is -0 below.
    if (type == DType::f16 && g - gate_error < -11.0) {
      bound += up_reach * (std::fabs(activated) + activated_error);
    }
  } else {
    // exp within 2 ulp, 1 + e, the quotient, the product with e, then the two products.
    bound += 10.1 * f32_unit * reach;
    bound += half_subnormal(DType::f32) * (4.0 * gate_reach * up_reach + up_reach + 1.0);
    if (!match) bound += type_unit * (std::fabs(result.value) + bound) + half_subnormal(type);
  }
  result.bound = bound;
  result.sum_bound = bound;
  return result;
}

double error_in_bounds(float y, const Bounded& expected, DType type) noexcept {
  constexpr double kMiss = std::numeric_limits<double>::infinity();
  const double threshold = overflow_threshold(type);
  if (std::isnan(expected.value)) return std::isfinite(y) ? kMiss : 0.0;
  if (std::isnan(y)) return kMiss;
  if (std::isinf(y)) {
    const bool same_sign = (y > 0.0f) == (expected.value > 0.0);
    return same_sign && std::fabs(expected.value) + expected.bound >= threshold ? 0.0 : kMiss;
  }
  if (std::isinf(expected.value)) return kMiss;
  const double distance = std::fabs(static_cast<double>(y) - expected.value);
  if (distance == 0.0) return 0.0;
  return expected.bound > 0.0 ? distance / expected.bound : kMiss;
}

std::int64_t ulp_distance(float a, float b, DType type) noexcept {
  if (std::isnan(a) || std::isnan(b)) return -1;
  const auto place = [type](float value) -> std::int64_t {
    if (type == DType::f32) {
      const auto bits = std::bit_cast<std::uint32_t>(value);
      const auto magnitude = static_cast<std::int64_t>(bits & 0x7FFFFFFFu);
      return (bits >> 31) != 0 ? -magnitude : magnitude;
    }
    const std::uint16_t bits = to_bits16(value, type);
    const std::int64_t magnitude = bits & 0x7FFF;
    return (bits >> 15) != 0 ? -magnitude : magnitude;
  };
  const std::int64_t distance = place(a) - place(b);
  return distance < 0 ? -distance : distance;
}

}  // namespace qmlp::ref
