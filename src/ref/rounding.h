#pragma once

#include <cstdint>

#include "qmlp/types.h"

// Rounding by integer arithmetic, with nothing assumed of the machine's floating point unit.
namespace qmlp::ref {

__extension__ using Wide = __int128;

// The shape of a binary float type: a finite value is significand * 2^exponent.
struct Format {
  int significand_bits;   // with the leading one: 24, 11, 8
  int least_exponent;     // of the last bit, in the subnormal range: -149, -24, -133
  int greatest_exponent;  // of the last bit: 104, 5, 120
};
Format format_of(DType type) noexcept;

// A float taken apart.
struct Parts {
  enum class Kind : std::uint8_t { zero, finite, infinite, nan };
  Kind kind = Kind::zero;
  bool negative = false;
  std::uint32_t significand = 0;  // below 2^24
  int exponent = 0;               // value = significand * 2^exponent
};
Parts take_apart(float value) noexcept;

// value * 2^exponent rounded once to `type`, nearest and ties to even, subnormals kept, infinite
// past the range. |value| < 2^126. Zero keeps no sign.
float round_exact(Wide value, int exponent, DType type) noexcept;

// Bit patterns of the 16-bit types, from and to floats that hold them exactly.
std::uint16_t to_bits16(float value, DType type) noexcept;
float from_bits16(std::uint16_t bits, DType type) noexcept;

// The float nearest to `value` in `type`, by the two functions above.
float round_to_type(float value, DType type) noexcept;

}  // namespace qmlp::ref
