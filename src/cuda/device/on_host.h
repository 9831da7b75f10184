#pragma once

#include <cstdint>

#include "base/float16.h"
#include "quant/exact.h"

// What decode.cuh needs of CUDA where a CPU's compiler reads it, as tests do that have no GPU. The
// two words in front of its functions are undefined again at its end.
#define __device__
#define __forceinline__ inline

namespace qmlp::cuda {

struct [[gnu::may_alias]] alignas(8) uint2 {
  std::uint32_t x, y;
};
struct [[gnu::may_alias]] alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};

// Byte i of the result is the byte of high:low that nibble i of the selector names, 0 to 7.
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(high) << 32 | low;
  std::uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t from = selector >> 4 * i & 7;
    d |= static_cast<std::uint32_t>(bytes >> 8 * from & 0xFF) << 8 * i;
  }
  return d;
}

namespace on_host {

// a * b + c of 16-bit floats, rounded once to nearest even: fma.rn's value, subnormals kept and any
// NaN 0x7FFF.
template <bool kBf16>
std::uint16_t fma(std::uint16_t a, std::uint16_t b, std::uint16_t c) {
  const auto widen = [](std::uint16_t v) -> double {
    return kBf16 ? bf16_to_f32(v) : f16_to_f32(v);
  };
  const double product = widen(a) * widen(b);  // 11 + 11 bits: exact
  const double addend = widen(c), plain = product + addend;
  if (plain != plain) return 0x7FFF;
  const bool infinite = plain - plain != 0.0;
  const float value =
      infinite ? static_cast<float>(plain) : narrow_to_odd(add_to_odd(product, addend));
  return kBf16 ? f32_to_bf16(value) : f32_to_f16(value);
}
// The same of both halves of words.
template <bool kBf16>
std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto half = [&](int shift) -> std::uint32_t {
    return fma<kBf16>(static_cast<std::uint16_t>(a >> shift),
                      static_cast<std::uint16_t>(b >> shift),
                      static_cast<std::uint16_t>(c >> shift));
  };
  return half(0) | half(16) << 16;
}

}  // namespace on_host
}  // namespace qmlp::cuda
