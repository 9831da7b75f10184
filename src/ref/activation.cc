#include "ref/activation.h"

#include <bit>
#include <cmath>
#include <limits>

#include "ref/rounding.h"

namespace qmlp::ref {
namespace {

constexpr std::uint16_t kNanPattern = 0x7FFF;

// MLX-CUDA: e = exp(a), d = 1 + e, y = 1 / d and 1 - y, each rounded to the type. The exponential
// is 2^t of t = a * log2(e) in f32, with a log2(e) that differs between the types by one bit.
float cuda_sigmoid(float x, DType type) {
  const float log2_e = std::bit_cast<float>(type == DType::bf16 ? 0x3FB8AA3Cu : 0x3FB8AA3Bu);
  const float t = std::fabs(x) * log2_e;
  const float e = round_to_type(static_cast<float>(std::exp2(static_cast<double>(t))), type);
  const float d = round_to_type(1.0f + e, type);
  const float y = round_to_type(1.0f / d, type);
  return x < 0.0f ? y : round_to_type(1.0f - y, type);
}

// MLX's CPU exponential in f32: a degree 6 polynomial in FMAs, times 2^i.
float mlx_cpu_exp(float a) {
  if (std::isnan(a)) return a;
  if (a > 88.0f) return std::numeric_limits<float>::infinity();
  if (a < -88.0f) return 0.0f;
  const float t = a * 1.442695f;
  const auto i = static_cast<float>(std::floor(static_cast<double>(t) + 0.5));
  const float f = t - i;
  float p = 1.535336188319500e-4f;
  p = std::fma(p, f, 1.339887440266574e-3f);
  p = std::fma(p, f, 9.618437357674640e-3f);
  p = std::fma(p, f, 5.550332471162809e-2f);
  p = std::fma(p, f, 2.402264791363012e-1f);
  p = std::fma(p, f, 6.931472028550421e-1f);
  p = std::fma(p, f, 1.0f);
  const auto exponent = static_cast<std::int32_t>(i);
  return p * std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

float cpu_sigmoid(float x, DType type) {
  const float e = round_to_type(mlx_cpu_exp(std::fabs(x)), type);
  const float y = 1.0f / (1.0f + e);
  return round_to_type(x < 0.0f ? y : 1.0f - y, type);
}

std::vector<std::uint16_t> make_table(DType type, SigmoidKind kind) {
  std::vector<std::uint16_t> table(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const float x = from_bits16(static_cast<std::uint16_t>(i), type);
    if (std::isnan(x)) {
      table[i] = kNanPattern;
      continue;
    }
    const float y = kind == SigmoidKind::mlx_cuda ? cuda_sigmoid(x, type) : cpu_sigmoid(x, type);
    table[i] = to_bits16(y, type);
  }
  return table;
}

}  // namespace

const std::vector<std::uint16_t>& sigmoid_table(DType type, SigmoidKind kind) {
  if (kind == SigmoidKind::mlx_cpu) {
    static const std::vector<std::uint16_t> cpu_bf16 = make_table(DType::bf16, kind);
    static const std::vector<std::uint16_t> cpu_f16 = make_table(DType::f16, kind);
    return type == DType::bf16 ? cpu_bf16 : cpu_f16;
  }
  static const std::vector<std::uint16_t> cuda_bf16 = make_table(DType::bf16, kind);
  static const std::vector<std::uint16_t> cuda_f16 = make_table(DType::f16, kind);
  return type == DType::bf16 ? cuda_bf16 : cuda_f16;
}

float exp_nonpositive(float x) noexcept {
  if (-104.0f > x) x = -104.0f;          // below it e^x is 0 in f32
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
  const float shifted = std::fma(x, 1.44269504f, kMagic);
  const float n = shifted - kMagic;  // x / ln 2 to the nearest integer
  float r = std::fma(n, -0.693145752f, x);
  r = std::fma(n, -1.42860677e-6f, r);
  constexpr float kCoefficients[] = {1.98412698e-4f, 1.38888889e-3f, 8.33333333e-3f, 4.16666667e-2f,
                                     1.66666667e-1f, 0.5f,           1.0f,           1.0f};
  float p = kCoefficients[0];
  for (int i = 1; i < 8; ++i) p = std::fma(p, r, kCoefficients[i]);
  if (std::isnan(p)) return p;
  // 2^n in two factors, the lower half first: only the second product can round.
  const int exponent = static_cast<int>(n);
  const int half = exponent >= 0 ? exponent / 2 : -((-exponent + 1) / 2);
  return p * std::ldexp(1.0f, half) * std::ldexp(1.0f, exponent - half);
}

float sigmoid_f32(float x) noexcept {
  const float e = exp_nonpositive(-std::fabs(x));
  const float y = 1.0f / (1.0f + e);
  return x < 0.0f ? e * y : y;
}

float mlx_cpu_sigmoid_f32(float x) noexcept {
  const float y = 1.0f / (1.0f + mlx_cpu_exp(std::fabs(x)));
  return x < 0.0f ? y : 1.0f - y;
}

float sigmoid(float x, DType type, SigmoidKind kind) {
  if (type == DType::f32) {
    return kind == SigmoidKind::mlx_cuda ? sigmoid_f32(x) : mlx_cpu_sigmoid_f32(x);
  }
  return from_bits16(sigmoid_table(type, kind)[to_bits16(x, type)], type);
}

}  // namespace qmlp::ref
