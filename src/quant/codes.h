#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

// Codes of one packed row: a bit stream, least significant bit first, code k in bits
// [k * bits, (k + 1) * bits). Any 8 codes that start at a multiple of 8 take exactly `bits` bytes.
namespace qmlp {

constexpr bool is_code_width(int bits) noexcept {
  return bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
}

// Bytes of K codes, K a multiple of 8.
QMLP_HOST_DEVICE constexpr std::int64_t packed_row_bytes(std::int64_t K, int bits) noexcept {
  return K / 8 * bits;
}

// Reads only bytes that hold a part of the code.
QMLP_HOST_DEVICE inline int extract_code(const std::byte* row, int bits, std::int64_t k) noexcept {
  const std::int64_t first_bit = k * bits;
  const std::byte* at = row + first_bit / 8;
  const int shift = static_cast<int>(first_bit % 8);
  unsigned value = static_cast<unsigned>(at[0]) >> shift;
  if (shift + bits > 8) value |= static_cast<unsigned>(at[1]) << (8 - shift);
  return static_cast<int>(value & ((1u << bits) - 1u));
}

namespace codes_detail {

template <int Bits>
inline void unpack8(const std::byte* in, std::uint8_t* out) noexcept {
  std::uint64_t word = 0;
  for (int i = 0; i < Bits; ++i) word |= std::to_integer<std::uint64_t>(in[i]) << (8 * i);
  constexpr std::uint64_t kMask = (std::uint64_t{1} << Bits) - 1;
  for (int i = 0; i < 8; ++i) out[i] = static_cast<std::uint8_t>((word >> (Bits * i)) & kMask);
}
template <int Bits>
inline void unpack_all(const std::byte* in, std::int64_t K, std::uint8_t* out) noexcept {
  for (std::int64_t k = 0; k < K; k += 8, in += Bits) unpack8<Bits>(in, out + k);
}

template <int Bits>
inline void pack_all(const std::uint8_t* in, std::int64_t K, std::byte* out) noexcept {
  for (std::int64_t k = 0; k < K; k += 8, out += Bits) {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<std::uint64_t>(in[k + i]) << (Bits * i);
    for (int i = 0; i < Bits; ++i) out[i] = static_cast<std::byte>(word >> (8 * i));
  }
}

}  // namespace codes_detail

// out[0..K) = the row's codes. K is a multiple of 8, bits a width of the format.
inline void unpack_row(const std::byte* row, int bits, std::int64_t K, std::uint8_t* out) noexcept {
  switch (bits) {
    case 2:
      codes_detail::unpack_all<2>(row, K, out);
      break;
    case 3:
      codes_detail::unpack_all<3>(row, K, out);
      break;
    case 4:
      codes_detail::unpack_all<4>(row, K, out);
      break;
    case 5:
      codes_detail::unpack_all<5>(row, K, out);
      break;
    case 6:
      codes_detail::unpack_all<6>(row, K, out);
      break;
    default:
      codes_detail::unpack_all<8>(row, K, out);
      break;
  }
}

// The inverse: codes[0..K), each below 2^bits, to packed_row_bytes(K, bits) bytes.
inline void pack_row(const std::uint8_t* codes, int bits, std::int64_t K, std::byte* row) noexcept {
  switch (bits) {
    case 2:
      codes_detail::pack_all<2>(codes, K, row);
      break;
    case 3:
      codes_detail::pack_all<3>(codes, K, row);
      break;
    case 4:
      codes_detail::pack_all<4>(codes, K, row);
      break;
    case 5:
      codes_detail::pack_all<5>(codes, K, row);
      break;
    case 6:
      codes_detail::pack_all<6>(codes, K, row);
      break;
    default:
      codes_detail::pack_all<8>(codes, K, row);
      break;
  }
}

}  // namespace qmlp
