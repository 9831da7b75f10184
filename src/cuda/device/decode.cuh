#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "cuda/device/on_host.h"
#endif

#include <cstdint>

#include "cuda/layout.h"

// A chunk's codes to MMA operands: pairs of exactly rounded weights, rn(scale * code + bias).
namespace qmlp::cuda {

struct Bf16 {};
struct F16 {};

template <class T>
__device__ __forceinline__ std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
#ifdef __CUDACC__
  std::uint32_t d;
  if constexpr (sizeof(T*) && __is_same(T, Bf16)) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
#else
  return on_host::fma2<__is_same(T, Bf16)>(a, b, c);
#endif
}

// Scale and bias of a lane's row, in both halves of a word. bf16 scales carry 2^133: a code n in
// the low byte of a bf16's bits is the value n * 2^-133, so one multiply-add is the whole decoding
// (the packer keeps |scale| below 2^-5 by a power of two of the whole half).
template <class T>
struct Scales {
  std::uint32_t scale, bias;
};
template <class T>
__device__ __forceinline__ Scales<T> unpack_scales(std::uint32_t word) {
  Scales<T> s;
#ifdef __CUDACC__
  // A pair of halves, which multiply-adds read in place; __byte_perm would be an instruction.
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "mov.b32 %0, {low, low};\nmov.b32 %1, {high, high};\n}"
      : "=r"(s.scale), "=r"(s.bias)
      : "r"(word));
#else
  s = {__byte_perm(word, 0, 0x1010), __byte_perm(word, 0, 0x3232)};
#endif
  return s;
}

// The scale for a field that sits kShift bits above the lowest position.
template <class T, int kShift>
__device__ __forceinline__ std::uint32_t shifted_scale(std::uint32_t scale) {
  if constexpr (kShift == 0 || __is_same(T, F16)) {
    return scale;
  } else {  // times 2^-kShift, exact
    constexpr std::uint32_t kPower = static_cast<std::uint32_t>(127 - kShift) << 7;
#ifdef __CUDACC__
    std::uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(d)
        : "r"(scale), "r"(kPower | kPower << 16), "r"(0x80008000u));
    return d;
#else
    return fma2<T>(scale, kPower | kPower << 16, 0x80008000u);
#endif
  }
}

// (word & mask) | magic in one instruction.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t word, std::uint32_t mask,
                                                std::uint32_t other) {
#ifdef __CUDACC__
  std::uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "r"(mask), "r"(other));
  return d;
#else
  return (word & mask) | other;
#endif
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

// A lane's words of one half of a chunk, main ones first; a short rest's bytes in the low bytes of
// both halves of the last one.
template <int kBits>
constexpr int kHalfWords = kBits == kDenseBits ? 8
                           : kBits == 8        ? 4
                           : kBits >= 5        ? 3
                           : kBits >= 3        ? 2
                                               : 1;

template <int kBits>
__device__ __forceinline__ void load_half(const std::uint8_t* codes, int lane,
                                          std::uint32_t (&words)[kHalfWords<kBits>]) {
  if constexpr (kBits == kDenseBits) {
    const uint4* from = reinterpret_cast<const uint4*>(codes) + lane * 2;
    const uint4 a = from[0], b = from[1];
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
  } else if constexpr (main_words(kBits) == 4) {
    const uint4 w = reinterpret_cast<const uint4*>(codes)[lane];
    words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
  } else if constexpr (main_words(kBits) == 2) {
    const uint2 w = reinterpret_cast<const uint2*>(codes)[lane];
    words[0] = w.x, words[1] = w.y;
  } else {
    words[0] = reinterpret_cast<const std::uint32_t*>(codes)[lane];
  }
  if constexpr (rest_bits(kBits) == 2) {
    words[2] = reinterpret_cast<const std::uint32_t*>(codes + rest_offset(kBits))[lane];
  } else if constexpr (rest_bits(kBits) == 1) {
    words[kHalfWords<kBits> - 1] = __byte_perm(
        reinterpret_cast<const std::uint16_t*>(codes + rest_offset(kBits))[lane], 0, 0x4140);
  }
}

// Pair kPair (layout.h's i) of a half, its fields where code_field puts them.
template <class T, int kBits, int kPair>
__device__ __forceinline__ std::uint32_t decode_pair(
    const std::uint32_t (&words)[kHalfWords<kBits>], Scales<T> s) {
  const auto mask = [](std::uint32_t half) { return half | half << 16; };
  constexpr auto kField = code_field(kBits, kPair, 0);
  if constexpr (kBits == 3 && kPair == 7) {
    return weight_pair<T, 5>(and_or(words[0] >> 10, mask(0x20), words[1] & mask(0xC0)),
                             shifted_scale<T, 5>(s.scale), s.bias);
  } else if constexpr (kBits == 5 && kPair == 7) {
    const std::uint32_t high = and_or(words[1] >> 11, mask(0x10), words[2] & mask(0xE0));
    return weight_pair<T, 3>(and_or(words[0] >> 12, mask(0x08), high), shifted_scale<T, 3>(s.scale),
                             s.bias);
  } else if constexpr (kBits == 6 && kPair == 6) {
    return weight_pair<T, 2>(and_or(words[0] >> 4, mask(0x3C), words[1] & mask(0xC0)),
                             shifted_scale<T, 2>(s.scale), s.bias);
  } else if constexpr (kBits == 6 && kPair == 7) {
    return weight_pair<T, 0>(and_or(words[2] >> 4, mask(0x3C), words[1] >> 8 & mask(0x03)), s.scale,
                             s.bias);
  } else {
    // One shift brings several fields below bit 8, where a scale's power of two reads them.
    constexpr int kWordShift = kBits == 3   ? kField.bit / 6 * 6
                               : kBits == 5 ? kField.bit
                                            : kField.bit / 8 * 8;
    constexpr int kShift = kField.bit - kWordShift;
    static_assert(kShift + kBits <= 8);
    const std::uint32_t field =
        words[kField.word] >> kWordShift & mask(((1u << kBits) - 1) << kShift);
    return weight_pair<T, kShift>(field, shifted_scale<T, kShift>(s.scale), s.bias);
  }
}

// Step kStep of a half: out[0] holds k = 16 kStep + 2t, +1 and out[1] k = 16 kStep + 2t + 8, +9 of
// row g.
template <class T, int kBits, int kStep>
__device__ __forceinline__ void decode_step(const std::uint32_t (&words)[kHalfWords<kBits>],
                                            Scales<T> s, std::uint32_t (&out)[2]) {
  if constexpr (kBits == kDenseBits) {
    out[0] = words[2 * kStep], out[1] = words[2 * kStep + 1];
  } else {
    out[0] = decode_pair<T, kBits, 2 * kStep>(words, s);
    out[1] = decode_pair<T, kBits, 2 * kStep + 1>(words, s);
  }
}

// One half of a chunk with its width read at run time; every lane of a warp takes the same branch.
template <class T, int kBits>
__device__ __forceinline__ void decode_half(const std::uint8_t* codes, int lane, Scales<T> first,
                                            Scales<T> second, std::uint32_t (&out)[4][2]) {
  std::uint32_t words[kHalfWords<kBits>];
  load_half<kBits>(codes, lane, words);
  decode_step<T, kBits, 0>(words, first, out[0]);
  decode_step<T, kBits, 1>(words, first, out[1]);
  decode_step<T, kBits, 2>(words, second, out[2]);
  decode_step<T, kBits, 3>(words, second, out[3]);
}
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

// A tile's format where it is known only at run time (kBits 0): the halves differ.
struct MixedShape {
  int bits[2];
  std::uint32_t second_codes, scales[2], chunk_bytes;
};
__device__ __forceinline__ MixedShape mixed_shape(const TileFormat& format) {
  MixedShape shape;
  shape.second_codes = format.codes_offset(1);
  shape.chunk_bytes = format.chunk_bytes();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shape.bits[h] = format.half[h].bits;
    shape.scales[h] = format.scales_offset(h);
  }
  return shape;
}

template <int kBits, int kGroup>
constexpr TileFormat kEvenFormat = {{{kBits, kGroup}, {kBits, kGroup}}};

template <int kBits, int kGroup>
__device__ __forceinline__ std::uint32_t chunk_bytes(const MixedShape& shape) {
  return kBits == 0 ? shape.chunk_bytes : kEvenFormat<kBits, kGroup>.chunk_bytes();
}

// A chunk in registers, between its load from shared memory and its decoding: apart, so that the
// latency of the one and the instructions of the other hide behind sums. With kBits 0 the load
// decodes.
template <class T, int kBits, int kGroup>
struct RawChunk {
  std::uint32_t words[2][kHalfWords<kBits>];
  std::uint32_t scales[2][kChunkK / kGroup];  // (scale, bias) of the lane's row

  __device__ __forceinline__ void load(const MixedShape&, const std::uint8_t* chunk, int lane) {
    constexpr TileFormat kFormat = kEvenFormat<kBits, kGroup>;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_half<kBits>(chunk + kFormat.codes_offset(h), lane, words[h]);
      if constexpr (kBits != kDenseBits) {
#pragma unroll
        for (int set = 0; set < kChunkK / kGroup; ++set) {
          scales[h][set] = reinterpret_cast<const std::uint32_t*>(chunk + kFormat.scales_offset(h) +
                                                                  set * kScaleSetBytes)[lane / 4];
        }
      }
    }
  }
  // Step kStep of both halves to a[half][at].
  template <int kStep, int kSteps>
  __device__ __forceinline__ void decode(std::uint32_t (&a)[2][kSteps][2], int at) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr int kSet = kStep * 16 / kGroup;
      decode_step<T, kBits, kStep>(words[h], unpack_scales<T>(scales[h][kSet]), a[h][at]);
    }
  }
};
template <class T, int kGroup>
struct RawChunk<T, 0, kGroup> {
  std::uint32_t words[2][4][2];

  __device__ __forceinline__ void load(const MixedShape& shape, const std::uint8_t* chunk,
                                       int lane) {
    constexpr int kSets = kChunkK / kGroup;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Scales<T> first = {}, second = {};
      if (shape.bits[h] != kDenseBits) {
        const auto* sets =
            reinterpret_cast<const std::uint32_t*>(chunk + shape.scales[h]) + lane / 4;
        first = unpack_scales<T>(sets[0]);
        second = unpack_scales<T>(sets[(kSets - 1) * kScaleSetBytes / 4]);
      }
      decode_half_any<T>(shape.bits[h], chunk + h * shape.second_codes, lane, first, second,
                         words[h]);
    }
  }
  template <int kStep, int kSteps>
  __device__ __forceinline__ void decode(std::uint32_t (&a)[2][kSteps][2], int at) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[h][at][0] = words[h][kStep][0], a[h][at][1] = words[h][kStep][1];
    }
  }
};

}  // namespace qmlp::cuda

#ifndef __CUDACC__
#undef __device__
#undef __forceinline__
#endif
