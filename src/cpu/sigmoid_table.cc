#include "cpu/sigmoid_table.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/float16.h"

namespace qmlp::cpu {
namespace {

// 2^t in IEEE double operations alone, so that every machine builds the same table.
double exp2_of(double t) noexcept {
  const double n = std::nearbyint(t);
  const double r = (t - n) * 0.69314718055994530942;
  double term = 1.0, sum = 1.0;
  for (int i = 1; i <= 18; ++i) {
    term *= r / i;
    sum += term;
  }
  return std::ldexp(sum, static_cast<int>(n));
}

// e, 1 + e, 1 / (1 + e) and 1 - y, each rounded to T: the four roundings of MLX's CUDA functor.
std::uint16_t sigmoid_of(std::uint16_t bits, DType dtype) noexcept {
  const float x = dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  if (x != x) return 0x7FFF;
  const auto log2e = std::bit_cast<float>(dtype == DType::bf16 ? 0x3FB8AA3Cu : 0x3FB8AA3Bu);
  const float t = std::fabs(x) * log2e;
  const float e = round_to(t > 200.0f ? INFINITY : static_cast<float>(exp2_of(t)), dtype);
  const float d = round_to(1.0f + e, dtype);
  const float y = round_to(1.0f / d, dtype);
  const float result = x < 0.0f ? y : 1.0f - y;
  return dtype == DType::bf16 ? f32_to_bf16(result) : f32_to_f16(result);
}

using Table = std::array<std::uint16_t, 65536>;

struct Tables {
  Table bf16, f16;
  Tables() noexcept {
    for (std::uint32_t i = 0; i < 65536; ++i) {
      bf16[i] = sigmoid_of(static_cast<std::uint16_t>(i), DType::bf16);
      f16[i] = sigmoid_of(static_cast<std::uint16_t>(i), DType::f16);
    }
  }
};

}  // namespace

const unsigned short* sigmoid_table(DType dtype) noexcept {
  static const Tables tables;
  if (dtype == DType::f32) return nullptr;
  return dtype == DType::bf16 ? tables.bf16.data() : tables.f16.data();
}

}  // namespace qmlp::cpu
