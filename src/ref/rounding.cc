#include "ref/rounding.h"

#include <bit>
#include <cmath>
#include <limits>

namespace qmlp::ref {
namespace {

int bit_width(Wide magnitude) {
  const auto high = static_cast<std::uint64_t>(magnitude >> 64);
  const auto low = static_cast<std::uint64_t>(magnitude);
  return high != 0 ? 64 + std::bit_width(high) : std::bit_width(low);
}

}  // namespace

Format format_of(DType type) noexcept {
  switch (type) {
    case DType::f32:
      return {24, -149, 104};
    case DType::f16:
      return {11, -24, 5};
    case DType::bf16:
      break;
  }
  return {8, -133, 120};
}

Parts take_apart(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto exponent = static_cast<int>((bits >> 23) & 0xFFu);
  const std::uint32_t fraction = bits & 0x7FFFFFu;
  Parts parts;
  parts.negative = (bits >> 31) != 0;
  if (exponent == 255) {
    parts.kind = fraction != 0 ? Parts::Kind::nan : Parts::Kind::infinite;
  } else if (exponent != 0) {
    parts = {Parts::Kind::finite, parts.negative, fraction | 0x800000u, exponent - 150};
  } else if (fraction != 0) {
    parts = {Parts::Kind::finite, parts.negative, fraction, -149};
  }
  return parts;
}

float round_exact(Wide value, int exponent, DType type) noexcept {
  if (value == 0) return 0.0f;
  const bool negative = value < 0;
  Wide magnitude = negative ? -value : value;
  const Format format = format_of(type);
  // The last bit that the result keeps: by precision, but never below the subnormal grid.
  int last = exponent + bit_width(magnitude) - format.significand_bits;
  if (last < format.least_exponent) last = format.least_exponent;
  const int dropped = last - exponent;
  if (dropped > 127) return negative ? -0.0f : 0.0f;  // below half of the least subnormal
  if (dropped > 0) {
    const Wide half = Wide{1} << (dropped - 1);
    const Wide rest = magnitude & ((half << 1) - 1);
    magnitude >>= dropped;
    if (rest > half || (rest == half && (magnitude & 1) != 0)) ++magnitude;
    exponent = last;
  }
  if (magnitude == 0) return negative ? -0.0f : 0.0f;
  const int top = exponent + bit_width(magnitude) - 1;
  const float sign = negative ? -1.0f : 1.0f;
  if (top > format.greatest_exponent + format.significand_bits - 1) {
    return sign * std::numeric_limits<float>::infinity();
  }
  return sign * std::ldexp(static_cast<float>(static_cast<std::int64_t>(magnitude)), exponent);
}

std::uint16_t to_bits16(float value, DType type) noexcept {
  const Parts parts = take_apart(value);
  const int fraction_bits = format_of(type).significand_bits - 1;
  const std::uint32_t exponent_mask = type == DType::f16 ? 31u : 255u;
  const std::uint32_t sign = parts.negative ? 0x8000u : 0u;
  switch (parts.kind) {
    case Parts::Kind::zero:
      return static_cast<std::uint16_t>(sign);
    case Parts::Kind::infinite:
      return static_cast<std::uint16_t>(sign | exponent_mask << fraction_bits);
    case Parts::Kind::nan:
      return static_cast<std::uint16_t>(sign | exponent_mask << fraction_bits |
                                        1u << (fraction_bits - 1));
    case Parts::Kind::finite:
      break;
  }
  // Shifted so that the last bit is the type's own; exact for a value of the type.
  const int last = parts.exponent + std::bit_width(parts.significand) - 1 - fraction_bits;
  const int least = format_of(type).least_exponent;
  const int grid = last < least ? least : last;
  const int shift = parts.exponent - grid;
  const std::uint32_t significand =
      shift >= 0 ? parts.significand << shift : parts.significand >> -shift;
  // A normal number's leading one adds 1 to the exponent field.
  const auto field = static_cast<std::uint32_t>(grid - least);
  return static_cast<std::uint16_t>(sign | ((field << fraction_bits) + significand));
}

float from_bits16(std::uint16_t bits, DType type) noexcept {
  const int fraction_bits = format_of(type).significand_bits - 1;
  const int exponent_mask = type == DType::f16 ? 31 : 255;
  const int field = (bits >> fraction_bits) & exponent_mask;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const float sign = (bits & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (field == exponent_mask) {
    return fraction != 0 ? std::numeric_limits<float>::quiet_NaN()
                         : sign * std::numeric_limits<float>::infinity();
  }
  const int least = format_of(type).least_exponent;
  const int significand = field == 0 ? fraction : fraction + (1 << fraction_bits);
  const int exponent = field == 0 ? least : least + field - 1;
  return sign * std::ldexp(static_cast<float>(significand), exponent);
}

float round_to_type(float value, DType type) noexcept {
  const Parts parts = take_apart(value);
  if (type == DType::f32 || parts.kind != Parts::Kind::finite) return value;
  const Wide magnitude = parts.significand;
  return round_exact(parts.negative ? -magnitude : magnitude, parts.exponent, type);
}

}  // namespace qmlp::ref
