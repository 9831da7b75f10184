#pragma once

// Sixteen lanes as one AVX-512 register (F, BW, DQ, VL). Part of one ISA file: internal linkage
// only.
#include <immintrin.h>
#include <stdint.h>

struct Vec {
  __m512 v;
};
struct IntVec {
  __m512i v;
};
static constexpr bool kUnrollCodes = true;
static constexpr int kFewRows = 4;      // most rows of the kernel that keeps weights in registers
static constexpr int kTileRows = 12;    // 12 x 2 accumulators and 2 weights of 32 registers
static constexpr int kTileVectors = 2;  // vectors of 16 output features

static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v.v); }
static inline Vec splat(float value) { return {_mm512_set1_ps(value)}; }
static inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c, rounded once
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
static inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// a > b ? a : b, so b where either is NaN.
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
// condition < 0 ? a : b, lane by lane (false for NaN and -0).
static inline Vec select_negative(Vec condition, Vec a, Vec b) {
  const __mmask16 mask = _mm512_cmp_ps_mask(condition.v, _mm512_setzero_ps(), _CMP_LT_OQ);
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}
// condition == 0 ? a : b, lane by lane.
static inline Vec select_zero(Vec condition, Vec a, Vec b) {
  const __mmask16 mask = _mm512_cmp_ps_mask(condition.v, _mm512_setzero_ps(), _CMP_EQ_OQ);
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}

static inline IntVec load_int(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline IntVec splat_int(uint32_t value) { return {_mm512_set1_epi32((int)value)}; }
static inline IntVec as_int(Vec a) { return {_mm512_castps_si512(a.v)}; }
static inline Vec as_float(IntVec a) { return {_mm512_castsi512_ps(a.v)}; }
static inline IntVec add(IntVec a, IntVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline IntVec sub(IntVec a, IntVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline IntVec bit_and(IntVec a, IntVec b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline IntVec bit_or(IntVec a, IntVec b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kShift>
static inline IntVec shift_right(IntVec a) {  // logical
  return {_mm512_srli_epi32(a.v, kShift)};
}
template <int kShift>
static inline IntVec shift_right_signed(IntVec a) {
  return {_mm512_srai_epi32(a.v, kShift)};
}
template <int kShift>
static inline IntVec shift_left(IntVec a) {
  return {_mm512_slli_epi32(a.v, kShift)};
}
static inline IntVec shift_right_by(IntVec a, int shift) {
  return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(shift))};
}
static inline IntVec shift_left_by(IntVec a, int shift) {
  return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(shift))};
}
static inline Vec to_float(IntVec a) { return {_mm512_cvtepi32_ps(a.v)}; }          // signed
static inline IntVec to_int_truncate(Vec a) { return {_mm512_cvttps_epi32(a.v)}; }  // |a| < 2^31
// The code of kBits bits at bit kShift of `word`, which may go on in `next`, as a float. A permute
// of a table looks at the low four bits of each index alone, so it masks and converts codes of up
// to 4 bits.
template <int kBits, int kShift>
static inline Vec code_to_float(IntVec word, IntVec next) {
  IntVec code = word;
  if constexpr (kShift != 0) code = shift_right<kShift>(code);
  if constexpr (kShift + kBits > 32) code = bit_or(code, shift_left<32 - kShift>(next));
  if constexpr (kBits <= 4) {
    constexpr int kMask = (1 << kBits) - 1;
    const __m512 table =
        _mm512_setr_ps(0 & kMask, 1 & kMask, 2 & kMask, 3 & kMask, 4 & kMask, 5 & kMask, 6 & kMask,
                       7 & kMask, 8 & kMask, 9 & kMask, 10 & kMask, 11 & kMask, 12 & kMask,
                       13 & kMask, 14 & kMask, 15 & kMask);
    return {_mm512_permutexvar_ps(code.v, table)};
  } else {
    if constexpr (kShift + kBits != 32) code = bit_and(code, splat_int((1u << kBits) - 1));
    return to_float(code);
  }
}
// Whether any lane has lo <= value <= hi false, as unsigned integers.
static inline bool any_outside(IntVec a, uint32_t lo, uint32_t hi) {
  return (_mm512_cmplt_epu32_mask(a.v, _mm512_set1_epi32((int)lo)) |
          _mm512_cmpgt_epu32_mask(a.v, _mm512_set1_epi32((int)hi))) != 0;
}

static inline __m256 sum_truncated8(__m256i a, __m256i b, __m256 scale) {
  const __m512d sum = _mm512_add_pd(_mm512_cvtepi32_pd(a), _mm512_cvtepi32_pd(b));
  const __m512d mask = _mm512_castsi512_pd(_mm512_set1_epi64(~((1LL << 29) - 1)));
  return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_and_pd(sum, mask), _mm512_cvtps_pd(scale)));
}
// (a + b) * scale, truncated toward zero to 24 significant bits. a, b signed, |a + b| < 2^33; scale
// a power of two that keeps the result in f32's normal range.
static inline Vec sum_truncated(IntVec a, IntVec b, Vec scale) {
  const __m256 lo = sum_truncated8(_mm512_castsi512_si256(a.v), _mm512_castsi512_si256(b.v),
                                   _mm512_castps512_ps256(scale.v));
  const __m256 hi =
      sum_truncated8(_mm512_extracti64x4_epi64(a.v, 1), _mm512_extracti64x4_epi64(b.v, 1),
                     _mm512_extractf32x8_ps(scale.v, 1));
  return {_mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1)};
}

static inline Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256((const __m256i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static inline void store_bf16(uint16_t* p, Vec v) {
  const __m512i bits = _mm512_castps_si512(v.v);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v.v, v.v, _CMP_UNORD_Q);
  _mm256_storeu_si256((__m256i*)p,
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet)));
}
static inline Vec load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
static inline void store_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v.v, _MM_FROUND_TO_NEAREST_INT));
}
