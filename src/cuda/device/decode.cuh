#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/layout.h"

// A half's codes to MMA operands: pairs of exactly rounded weights, rn(scale * code + bias).
namespace qmlp::cuda {

struct Bf16 {};
struct F16 {};

template <class T>
__device__ __forceinline__ std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  if constexpr (sizeof(T*) && __is_same(T, Bf16)) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// Scale and bias of a lane's row, in both halves of a word. bf16 scales carry 2^133: a code n in
// the low byte of a bf16's bits is the value n * 2^-133, so one multiply-add is the whole decoding
// (the packer keeps |scale| below 2^-5 by a power of two of the whole half).
template <class T>
struct Scales {
  std::uint32_t scale, bias;
};
template <class T>
__device__ __forceinline__ Scales<T> load_scales(const std::uint8_t* sets, int set, int lane) {
  const std::uint32_t word =
      reinterpret_cast<const std::uint32_t*>(sets + set * kScaleSetBytes)[lane / 4];
  return {__byte_perm(word, 0, 0x1010), __byte_perm(word, 0, 0x3232)};
}

// The scale for a field that sits kShift bits above the lowest position.
template <class T, int kShift>
__device__ __forceinline__ std::uint32_t shifted_scale(std::uint32_t scale) {
  if constexpr (kShift == 0 || __is_same(T, F16)) {
    return scale;
  } else {  // times 2^-kShift, exact
    constexpr std::uint32_t kPower = static_cast<std::uint32_t>(127 - kShift) << 7;
    std::uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(d)
        : "r"(scale), "r"(kPower | kPower << 16), "r"(0x80008000u));
    return d;
  }
}

// (word & mask) | magic in one instruction.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t word, std::uint32_t mask,
                                                std::uint32_t other) {
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "r"(mask), "r"(other));
  return d;
}

// A pair whose codes sit in both 16-bit halves of `field`, kShift bits up, nothing else set.
template <class T, int kShift>
__device__ __forceinline__ std::uint32_t weight_pair(std::uint32_t field, std::uint32_t scale,
                                                     std::uint32_t bias) {
  if constexpr (__is_same(T, Bf16)) {
    return fma2<T>(field, scale, bias);
  } else {
    // 0x6400 | n is 1024 + n; times 2^-kShift and less 1024 * 2^-kShift, the code exactly.
    constexpr std::uint32_t kPower = static_cast<std::uint32_t>(15 - kShift) << 10;
    constexpr std::uint32_t kOffset = 0x8000u | static_cast<std::uint32_t>(25 - kShift) << 10;
    const std::uint32_t code =
        fma2<T>(field | 0x64006400u, kPower | kPower << 16, kOffset | kOffset << 16);
    return fma2<T>(code, scale, bias);
  }
}

// One half of one chunk: out[j][0] holds k = 16j + 2t, +1 and out[j][1] k = 16j + 2t + 8, +9 of row
// g. first serves steps 0 and 1, second steps 2 and 3.
template <class T, int kBits>
__device__ __forceinline__ void decode_half(const std::uint8_t* codes, int lane, Scales<T> first,
                                            Scales<T> second, std::uint32_t (&out)[4][2]) {
  constexpr int kLow = low_plane_bits(kBits), kHigh = high_plane_bits(kBits);
  constexpr int kHighOffset = kHalfRows * kChunkK * kLow / 8;
  if constexpr (kBits == kDenseBits) {
    const uint4* words = reinterpret_cast<const uint4*>(codes) + lane * 2;
    const uint4 a = words[0], b = words[1];
    out[0][0] = a.x, out[0][1] = a.y, out[1][0] = a.z, out[1][1] = a.w;
    out[2][0] = b.x, out[2][1] = b.y, out[3][0] = b.z, out[3][1] = b.w;
  } else if constexpr (kBits == 8) {
    const uint4 w = reinterpret_cast<const uint4*>(codes)[lane];
    const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Scales<T> s = j < 2 ? first : second;
      out[j][0] = weight_pair<T, 0>(words[j] & 0x00FF00FFu, s.scale, s.bias);
      out[j][1] = weight_pair<T, 0>(words[j] >> 8 & 0x00FF00FFu, s.scale, s.bias);
    }
  } else if constexpr (kBits == 4) {
    const uint2 w = reinterpret_cast<const uint2*>(codes)[lane];
    const std::uint32_t words[2] = {w.x, w.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Scales<T> s = j < 2 ? first : second;
      const std::uint32_t v = j % 2 == 0 ? words[j / 2] : words[j / 2] >> 8;
      out[j][0] = weight_pair<T, 0>(v & 0x000F000Fu, s.scale, s.bias);
      out[j][1] = weight_pair<T, 4>(v & 0x00F000F0u, shifted_scale<T, 4>(s.scale), s.bias);
    }
  } else if constexpr (kBits == 2) {
    const std::uint32_t w = reinterpret_cast<const std::uint32_t*>(codes)[lane];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const Scales<T> s = j < 2 ? first : second;
      const std::uint32_t v = j == 0 ? w : w >> 8;
      out[j][0] = weight_pair<T, 0>(v & 0x00030003u, s.scale, s.bias);
      out[j][1] = weight_pair<T, 2>(v & 0x000C000Cu, shifted_scale<T, 2>(s.scale), s.bias);
      out[j + 1][0] = weight_pair<T, 4>(v & 0x00300030u, shifted_scale<T, 4>(s.scale), s.bias);
      out[j + 1][1] = weight_pair<T, 6>(v & 0x00C000C0u, shifted_scale<T, 6>(s.scale), s.bias);
    }
  } else if constexpr (kBits == 6) {
    const uint2 w = reinterpret_cast<const uint2*>(codes)[lane];
    const std::uint32_t words[2] = {w.x, w.y};
    const std::uint32_t h = reinterpret_cast<const std::uint32_t*>(codes + kHighOffset)[lane];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Scales<T> s = i < 4 ? first : second;
      const std::uint32_t low = words[i / 4] >> i % 4 * 4;
      // Two high bits to positions 4 and 5.
      const std::uint32_t high = i < 2 ? h << (4 - 2 * i) : h >> (2 * i - 4);
      out[i / 2][i % 2] =
          weight_pair<T, 0>(and_or(high, 0x00300030u, low & 0x000F000Fu), s.scale, s.bias);
    }
  } else {
    static_assert(kHigh == 1, "3 and 5 bits: a plane of one bit");
    const std::uint32_t h =
        __byte_perm(reinterpret_cast<const std::uint16_t*>(codes + kHighOffset)[lane], 0, 0x4140);
    std::uint32_t words[2];
    if constexpr (kLow == 4) {
      const uint2 w = reinterpret_cast<const uint2*>(codes)[lane];
      words[0] = w.x, words[1] = w.y;
    } else {
      words[0] = words[1] = reinterpret_cast<const std::uint32_t*>(codes)[lane];
    }
    constexpr std::uint32_t kMask = (1u << kLow) - 1;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const Scales<T> s = i < 4 ? first : second;
      const std::uint32_t low = kLow == 4 ? words[i / 4] >> i % 4 * 4 : words[0] >> 2 * i;
      const std::uint32_t high = i < kLow ? h << (kLow - i) : h >> (i - kLow);
      out[i / 2][i % 2] = weight_pair<T, 0>(
          and_or(high, (1u << kLow) * 0x00010001u, low & kMask * 0x00010001u), s.scale, s.bias);
    }
  }
}

// The same with the width read at run time; every lane of a warp takes the same branch.
template <class T>
__device__ __forceinline__ void decode_half_any(int bits, const std::uint8_t* codes, int lane,
                                                Scales<T> first, Scales<T> second,
                                                std::uint32_t (&out)[4][2]) {
  switch (bits) {
    case 2:
      return decode_half<T, 2>(codes, lane, first, second, out);
    case 3:
      return decode_half<T, 3>(codes, lane, first, second, out);
    case 4:
      return decode_half<T, 4>(codes, lane, first, second, out);
    case 5:
      return decode_half<T, 5>(codes, lane, first, second, out);
    case 6:
      return decode_half<T, 6>(codes, lane, first, second, out);
    case 8:
      return decode_half<T, 8>(codes, lane, first, second, out);
    default:
      return decode_half<T, kDenseBits>(codes, lane, first, second, out);
  }
}

// A format's positions in even and odd chunks, worked out once a kernel.
struct ChunkShape {
  std::uint32_t bytes[2];
  std::uint32_t second_codes;
  std::uint32_t scales[2][2];  // [parity][half]
  int sets[2][2];
};
__device__ __forceinline__ ChunkShape chunk_shape(const TileFormat& format) {
  ChunkShape shape;
  shape.second_codes = format.codes_offset(1);
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    shape.bytes[parity] = format.chunk_bytes(parity);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shape.scales[parity][h] = format.scales_offset(h, parity);
      shape.sets[parity][h] = format.half[h].scale_sets(parity);
    }
  }
  return shape;
}

// Both halves of a chunk to A fragments a[half][step][pair]; `scales` lives from one chunk to the
// next.
template <class T, int kBits>
__device__ __forceinline__ void decode_chunk(const TileFormat& format, const ChunkShape& shape,
                                             int parity, const std::uint8_t* chunk, int lane,
                                             Scales<T> (&scales)[2][2],
                                             std::uint32_t (&a)[2][4][2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::uint8_t* sets = chunk + shape.scales[parity][h];
    if (shape.sets[parity][h] > 0) {
      scales[h][0] = load_scales<T>(sets, 0, lane);
      scales[h][1] = scales[h][0];
      if (shape.sets[parity][h] > 1) scales[h][1] = load_scales<T>(sets, 1, lane);
    }
    if constexpr (kBits != 0) {
      constexpr int kCodes = kHalfRows * kChunkK * kBits / 8;
      decode_half<T, kBits>(chunk + h * kCodes, lane, scales[h][0], scales[h][1], a[h]);
    } else {
      decode_half_any<T>(format.half[h].bits, chunk + h * shape.second_codes, lane, scales[h][0],
                         scales[h][1], a[h]);
    }
  }
}

// The same where both halves have a width and a group that are known when compiling: no branch, so
// that loads of later chunks can rise above the sums of earlier ones. kParity: of the chunk's
// index.
template <int kBits, int kGroup>
constexpr TileFormat kEvenFormat = {{{kBits, kGroup}, {kBits, kGroup}}};

template <class T, int kBits, int kGroup, int kParity>
__device__ __forceinline__ void decode_known_chunk(const std::uint8_t* chunk, int lane,
                                                   Scales<T> (&scales)[2][2],
                                                   std::uint32_t (&a)[2][4][2]) {
  constexpr HalfFormat kHalf = {kBits, kGroup};
  constexpr int kCodes = kHalf.code_bytes(), kSets = kHalf.scale_sets(kParity);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::uint8_t* sets = chunk + 2 * kCodes + h * kSets * kScaleSetBytes;
    if constexpr (kSets > 0) {
      scales[h][0] = load_scales<T>(sets, 0, lane);
      scales[h][1] = kSets > 1 ? load_scales<T>(sets, kSets - 1, lane) : scales[h][0];
    }
    decode_half<T, kBits>(chunk + h * kCodes, lane, scales[h][0], scales[h][1], a[h]);
  }
}

}  // namespace qmlp::cuda
