#pragma once

// Sixteen lanes in plain C++, for any machine. Part of one ISA file: internal linkage only.
#include <stdint.h>
#include <string.h>

// The compiler's generic vectors: whatever SIMD the target has.
typedef float FloatLanes __attribute__((vector_size(64)));
typedef uint32_t IntLanes __attribute__((vector_size(64)));
typedef int32_t SignedLanes __attribute__((vector_size(64)));

struct Vec {  // 16 floats
  FloatLanes lane;
};
struct IntVec {  // 16 32-bit integers, wrapping
  IntLanes lane;
};
static constexpr bool kUnrollCodes = false;
static constexpr int kTileRows = 6;     // rows of x that one register tile covers
static constexpr int kTileVectors = 1;  // vectors of 16 output features beside it

#define QMLP_LANES for (int i = 0; i < 16; ++i)

static inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline Vec load(const float* p) {
  Vec v;
  memcpy(&v.lane, p, sizeof(v.lane));
  return v;
}
static inline void store(float* p, Vec v) { memcpy(p, &v.lane, sizeof(v.lane)); }
static inline Vec splat(float value) {
  return {value - FloatLanes{}};  // keeps -0, which adding +0 would lose
}
// a * b + c, rounded once. Not inlined: 16 calls of fmaf each time would swell every loop.
__attribute__((noinline)) static Vec fma(Vec a, Vec b, Vec c) {
  QMLP_LANES c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
static inline Vec add(Vec a, Vec b) { return {a.lane + b.lane}; }
static inline Vec sub(Vec a, Vec b) { return {a.lane - b.lane}; }
static inline Vec mul(Vec a, Vec b) { return {a.lane * b.lane}; }
static inline Vec div(Vec a, Vec b) { return {a.lane / b.lane}; }
// a > b ? a : b, so b where either is NaN.
static inline Vec max(Vec a, Vec b) { return {a.lane > b.lane ? a.lane : b.lane}; }
// condition < 0 ? a : b, lane by lane (false for NaN and -0).
static inline Vec select_negative(Vec condition, Vec a, Vec b) {
  return {condition.lane < 0.0f ? a.lane : b.lane};
}
// condition == 0 ? a : b, lane by lane.
static inline Vec select_zero(Vec condition, Vec a, Vec b) {
  return {condition.lane == 0.0f ? a.lane : b.lane};
}

static inline IntVec load_int(const uint32_t* p) {
  IntVec v;
  memcpy(&v.lane, p, sizeof(v.lane));
  return v;
}
static inline IntVec splat_int(uint32_t value) { return {IntLanes{} + value}; }
static inline IntVec as_int(Vec a) {
  IntVec v;
  memcpy(&v, &a, sizeof(v));
  return v;
}
static inline Vec as_float(IntVec a) {
  Vec v;
  memcpy(&v, &a, sizeof(v));
  return v;
}
static inline IntVec add(IntVec a, IntVec b) { return {a.lane + b.lane}; }
static inline IntVec sub(IntVec a, IntVec b) { return {a.lane - b.lane}; }
static inline IntVec bit_and(IntVec a, IntVec b) { return {a.lane & b.lane}; }
static inline IntVec bit_or(IntVec a, IntVec b) { return {a.lane | b.lane}; }
template <int kShift>
static inline IntVec shift_right(IntVec a) {  // logical
  return {a.lane >> kShift};
}
template <int kShift>
static inline IntVec shift_right_signed(IntVec a) {
  return {(IntLanes)((SignedLanes)a.lane >> kShift)};
}
template <int kShift>
static inline IntVec shift_left(IntVec a) {
  return {a.lane << kShift};
}
static inline IntVec shift_right_by(IntVec a, int shift) { return {a.lane >> shift}; }
static inline IntVec shift_left_by(IntVec a, int shift) { return {a.lane << shift}; }
static inline Vec to_float(IntVec a) {  // signed
  return {__builtin_convertvector((SignedLanes)a.lane, FloatLanes)};
}
static inline IntVec to_int_truncate(Vec a) {  // |a| < 2^31
  return {(IntLanes) __builtin_convertvector(a.lane, SignedLanes)};
}
// Whether any lane has lo <= value <= hi false, as unsigned integers.
static inline bool any_outside(IntVec a, uint32_t lo, uint32_t hi) {
  bool outside = false;
  QMLP_LANES outside |= a.lane[i] < lo || a.lane[i] > hi;
  return outside;
}

// (a + b) * scale, truncated toward zero to 24 significant bits. a, b signed, |a + b| < 2^33; scale
// a power of two that keeps the result in f32's normal range.
static inline Vec sum_truncated(IntVec a, IntVec b, Vec scale) {
  Vec v = splat(0.0f);
  QMLP_LANES {
    const double sum = (double)(int32_t)a.lane[i] + (double)(int32_t)b.lane[i];
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    bits &= ~((uint64_t{1} << 29) - 1);
    double cut;
    memcpy(&cut, &bits, 8);
    v.lane[i] = (float)(cut * (double)scale.lane[i]);
  }
  return v;
}

static inline Vec load_bf16(const uint16_t* p) {
  Vec v = splat(0.0f);
  QMLP_LANES v.lane[i] = bits_to_float((uint32_t)p[i] << 16);
  return v;
}
static inline void store_bf16(uint16_t* p, Vec v) {
  QMLP_LANES {
    const uint32_t bits = float_to_bits(v.lane[i]);
    p[i] = (bits & 0x7FFFFFFFu) > 0x7F800000u
               ? (uint16_t)((bits >> 16) | 0x40u)
               : (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
}
static inline Vec load_f16(const uint16_t* p) {
  Vec v = splat(0.0f);
  QMLP_LANES {
    const uint32_t sign = (uint32_t)(p[i] & 0x8000u) << 16;
    const uint32_t magnitude = p[i] & 0x7FFFu;
    if (magnitude >= 0x7C00u) {
      const uint32_t payload = (magnitude & 0x3FFu) << 13;
      v.lane[i] = bits_to_float(sign | 0x7F800000u | payload | (payload != 0 ? 0x400000u : 0u));
    } else {
      const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
      v.lane[i] = bits_to_float(float_to_bits(scaled) | sign);
    }
  }
  return v;
}
static inline void store_f16(uint16_t* p, Vec v) {
  QMLP_LANES {
    const uint32_t bits = float_to_bits(v.lane[i]);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
      p[i] = (uint16_t)(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    } else if (magnitude >= 0x477FF000u) {
      p[i] = (uint16_t)(sign | 0x7C00u);
    } else if (magnitude < 0x38800000u) {
      const float on_grid = bits_to_float(magnitude) + 0.5f;  // ulp(0.5) is f16's least subnormal
      p[i] = (uint16_t)(sign | (float_to_bits(on_grid) - 0x3F000000u));
    } else {
      const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
      p[i] = (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
    }
  }
}
#undef QMLP_LANES
