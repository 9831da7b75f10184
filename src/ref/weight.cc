#include "ref/weight.h"

#include <bit>
#include <cstring>

#include "ref/rounding.h"

namespace qmlp::ref {

float decoded_weight(float scale, int code, float bias, DType type) noexcept {
  const Parts s = take_apart(scale);
  const Parts z = take_apart(bias);
  const bool special = s.kind == Parts::Kind::infinite || s.kind == Parts::Kind::nan ||
                       z.kind == Parts::Kind::infinite || z.kind == Parts::Kind::nan;
  if (special) return static_cast<float>(static_cast<double>(scale) * code + bias);
  Wide product = Wide{s.significand} * code;
  Wide offset = z.significand;
  if (s.negative) product = -product;
  if (z.negative) offset = -offset;
  if (product == 0 && offset == 0) return s.negative && z.negative ? -0.0f : 0.0f;
  if (product == 0) return round_exact(offset, z.exponent, type);
  if (offset == 0) return round_exact(product, s.exponent, type);
  // Both below 2^32. Aligned to the lower exponent, the sum is exact within 80 bits of shift;
  // further down, the lower term only breaks a tie, which one unit far below the higher term does
  // as well.
  constexpr int kReach = 80;
  const bool product_above = s.exponent >= z.exponent;
  const Wide high = product_above ? product : offset;
  const Wide low = product_above ? offset : product;
  const int high_exponent = product_above ? s.exponent : z.exponent;
  const int gap = product_above ? s.exponent - z.exponent : z.exponent - s.exponent;
  if (gap <= kReach) return round_exact((high << gap) + low, high_exponent - gap, type);
  return round_exact((high << kReach) + (low > 0 ? 1 : -1), high_exponent - kReach, type);
}

int code_at(const std::byte* row, int bits, std::int64_t k) noexcept {
  int code = 0;
  for (int i = 0; i < bits; ++i) {
    const std::int64_t at = k * bits + i;
    const int bit = std::to_integer<int>(row[at / 8] >> (at % 8)) & 1;
    code |= bit << i;
  }
  return code;
}

float element(const std::byte* data, DType type, std::int64_t index) noexcept {
  if (type == DType::f32) {
    float value;
    std::memcpy(&value, data + index * 4, sizeof(value));
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, data + index * 2, sizeof(bits));
  return from_bits16(bits, type);
}

std::vector<float> decode(const QuantizedTensorView& weight, std::int64_t row_begin,
                          std::int64_t row_end, DType type) {
  const std::int64_t K = weight.K;
  const QuantSpec& spec = weight.spec;
  std::vector<float> out(static_cast<std::size_t>((row_end - row_begin) * K));
  float* at = out.data();
  for (std::int64_t n = row_begin; n < row_end; ++n) {
    if (spec.is_dense()) {
      for (std::int64_t k = 0; k < K; ++k) {
        *at++ = round_to_type(element(weight.codes.data(), spec.scale_dtype, n * K + k), type);
      }
      continue;
    }
    const std::byte* row = weight.codes.data() + n * (K / 8 * spec.bits);
    const std::int64_t groups = K / spec.group_size;
    for (std::int64_t k = 0; k < K; ++k) {
      const std::int64_t group = n * groups + k / spec.group_size;
      const float scale = element(weight.scales.data(), spec.scale_dtype, group);
      const float bias = element(weight.biases.data(), spec.scale_dtype, group);
      *at++ = decoded_weight(scale, code_at(row, spec.bits, k), bias, type);
    }
  }
  return out;
}

std::vector<double> decode_f64(const QuantizedTensorView& weight, std::int64_t row_begin,
                               std::int64_t row_end) {
  const std::int64_t K = weight.K;
  const QuantSpec& spec = weight.spec;
  std::vector<double> out(static_cast<std::size_t>((row_end - row_begin) * K));
  double* at = out.data();
  for (std::int64_t n = row_begin; n < row_end; ++n) {
    const std::byte* row = weight.codes.data() + n * (K / 8 * spec.bits);
    for (std::int64_t k = 0; k < K; ++k) {
      if (spec.is_dense()) {
        *at++ = element(weight.codes.data(), spec.scale_dtype, n * K + k);
        continue;
      }
      const std::int64_t group = n * (K / spec.group_size) + k / spec.group_size;
      const double scale = element(weight.scales.data(), spec.scale_dtype, group);
      const double bias = element(weight.biases.data(), spec.scale_dtype, group);
      *at++ = scale * code_at(row, spec.bits, k) + bias;
    }
  }
  return out;
}

}  // namespace qmlp::ref
