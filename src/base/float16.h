#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "qmlp/types.h"

// 16-bit float conversions by bit arithmetic: round to nearest even, subnormals kept, NaN quieted.
namespace qmlp {

QMLP_HOST_DEVICE inline float bf16_to_f32(std::uint16_t bits) noexcept {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

QMLP_HOST_DEVICE inline std::uint16_t f32_to_bf16(float value) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

QMLP_HOST_DEVICE inline float f16_to_f32(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) {  // infinity or NaN
    const std::uint32_t payload = (magnitude & 0x3FFu) << 13;
    return __builtin_bit_cast(float,
                              sign | 0x7F800000u | payload | (payload != 0 ? 0x400000u : 0u));
  }
  // Shifted into f32's fields the value is too small by 2^112; the product also normalises
  // subnormals.
  const float scaled = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
  return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, scaled) | sign);
}

QMLP_HOST_DEVICE inline std::uint16_t f32_to_f16(float value) noexcept {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  }
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: on the subnormal grid, rounded by one f32 addition
    const float on_grid = __builtin_bit_cast(float, magnitude) + 0.5f;  // ulp(0.5) is 2^-24
    return static_cast<std::uint16_t>(sign |
                                      (__builtin_bit_cast(std::uint32_t, on_grid) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// One element of a 16- or 32-bit float type.
QMLP_HOST_DEVICE inline float load_float(const void* data, DType dtype,
                                         std::int64_t index) noexcept {
  if (dtype == DType::f32) {
    float value;
    __builtin_memcpy(&value, static_cast<const char*>(data) + 4 * index, 4);
    return value;
  }
  std::uint16_t bits;
  __builtin_memcpy(&bits, static_cast<const char*>(data) + 2 * index, 2);
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
QMLP_HOST_DEVICE inline void store_float(void* data, DType dtype, std::int64_t index,
                                         float value) noexcept {
  if (dtype == DType::f32) {
    __builtin_memcpy(static_cast<char*>(data) + 4 * index, &value, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
  __builtin_memcpy(static_cast<char*>(data) + 2 * index, &bits, 2);
}
// value rounded to dtype, widened again.
QMLP_HOST_DEVICE inline float round_to(float value, DType dtype) noexcept {
  if (dtype == DType::f32) return value;
  return dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(value)) : f16_to_f32(f32_to_f16(value));
}

}  // namespace qmlp
