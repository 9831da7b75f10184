#pragma once

// Sixteen lanes as two AVX2 registers. Part of one ISA file: internal linkage only.
#include <immintrin.h>
#include <stdint.h>

struct Vec {
  __m256 lo, hi;
};
struct IntVec {
  __m256i lo, hi;
};
static constexpr bool kUnrollCodes = true;
static constexpr int kFewRows = 4;      // most rows of the kernel that keeps weights in registers
static constexpr int kTileRows = 6;     // 6 x 2 accumulators, 2 weights, 1 activation: 15 registers
static constexpr int kTileVectors = 1;  // vectors of 16 output features

static inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
static inline Vec splat(float value) {
  const __m256 v = _mm256_set1_ps(value);
  return {v, v};
}
static inline Vec fma(Vec a, Vec b, Vec c) {  // a * b + c, rounded once
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline Vec div(Vec a, Vec b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
// a > b ? a : b, so b where either is NaN.
static inline Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
// condition < 0 ? a : b, lane by lane (false for NaN and -0).
static inline Vec select_negative(Vec condition, Vec a, Vec b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(condition.lo, zero, _CMP_LT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(condition.hi, zero, _CMP_LT_OQ))};
}
// condition == 0 ? a : b, lane by lane.
static inline Vec select_zero(Vec condition, Vec a, Vec b) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(condition.lo, zero, _CMP_EQ_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(condition.hi, zero, _CMP_EQ_OQ))};
}

static inline IntVec load_int(const uint32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
static inline IntVec splat_int(uint32_t value) {
  const __m256i v = _mm256_set1_epi32((int)value);
  return {v, v};
}
static inline IntVec as_int(Vec a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
static inline Vec as_float(IntVec a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
static inline IntVec add(IntVec a, IntVec b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
static inline IntVec sub(IntVec a, IntVec b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
static inline IntVec bit_and(IntVec a, IntVec b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
static inline IntVec bit_or(IntVec a, IntVec b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int kShift>
static inline IntVec shift_right(IntVec a) {  // logical
  return {_mm256_srli_epi32(a.lo, kShift), _mm256_srli_epi32(a.hi, kShift)};
}
template <int kShift>
static inline IntVec shift_right_signed(IntVec a) {
  return {_mm256_srai_epi32(a.lo, kShift), _mm256_srai_epi32(a.hi, kShift)};
}
template <int kShift>
static inline IntVec shift_left(IntVec a) {
  return {_mm256_slli_epi32(a.lo, kShift), _mm256_slli_epi32(a.hi, kShift)};
}
static inline IntVec shift_right_by(IntVec a, int shift) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  return {_mm256_srl_epi32(a.lo, count), _mm256_srl_epi32(a.hi, count)};
}
static inline IntVec shift_left_by(IntVec a, int shift) {
  const __m128i count = _mm_cvtsi32_si128(shift);
  return {_mm256_sll_epi32(a.lo, count), _mm256_sll_epi32(a.hi, count)};
}
static inline Vec to_float(IntVec a) {  // signed
  return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)};
}
static inline IntVec to_int_truncate(Vec a) {  // |a| < 2^31
  return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)};
}
// The code of kBits bits at bit kShift of `word`, which may go on in `next`, as a float.
template <int kBits, int kShift>
static inline Vec code_to_float(IntVec word, IntVec next) {
  IntVec code = word;
  if constexpr (kShift != 0) code = shift_right<kShift>(code);
  if constexpr (kShift + kBits > 32) code = bit_or(code, shift_left<32 - kShift>(next));
  if constexpr (kShift + kBits != 32) code = bit_and(code, splat_int((1u << kBits) - 1));
  return to_float(code);
}
// Whether any lane has lo <= value <= hi false, as unsigned integers.
static inline bool any_outside(IntVec a, uint32_t lo, uint32_t hi) {
  const __m256i low = _mm256_set1_epi32((int)lo), high = _mm256_set1_epi32((int)hi);
  const __m256i inside_lo =
      _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_max_epu32(a.lo, low), a.lo),
                       _mm256_cmpeq_epi32(_mm256_min_epu32(a.lo, high), a.lo));
  const __m256i inside_hi =
      _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_max_epu32(a.hi, low), a.hi),
                       _mm256_cmpeq_epi32(_mm256_min_epu32(a.hi, high), a.hi));
  return _mm256_movemask_epi8(_mm256_and_si256(inside_lo, inside_hi)) != -1;
}

static inline __m128 sum_truncated4(__m128i a, __m128i b, __m128 scale) {
  const __m256d sum = _mm256_add_pd(_mm256_cvtepi32_pd(a), _mm256_cvtepi32_pd(b));
  const __m256d mask = _mm256_castsi256_pd(_mm256_set1_epi64x(~((1LL << 29) - 1)));
  return _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_and_pd(sum, mask), _mm256_cvtps_pd(scale)));
}
// (a + b) * scale, truncated toward zero to 24 significant bits. a, b signed, |a + b| < 2^33; scale
// a power of two that keeps the result in f32's normal range.
static inline Vec sum_truncated(IntVec a, IntVec b, Vec scale) {
  const __m128 v0 = sum_truncated4(_mm256_castsi256_si128(a.lo), _mm256_castsi256_si128(b.lo),
                                   _mm256_castps256_ps128(scale.lo));
  const __m128 v1 =
      sum_truncated4(_mm256_extracti128_si256(a.lo, 1), _mm256_extracti128_si256(b.lo, 1),
                     _mm256_extractf128_ps(scale.lo, 1));
  const __m128 v2 = sum_truncated4(_mm256_castsi256_si128(a.hi), _mm256_castsi256_si128(b.hi),
                                   _mm256_castps256_ps128(scale.hi));
  const __m128 v3 =
      sum_truncated4(_mm256_extracti128_si256(a.hi, 1), _mm256_extracti128_si256(b.hi, 1),
                     _mm256_extractf128_ps(scale.hi, 1));
  return {_mm256_set_m128(v1, v0), _mm256_set_m128(v3, v2)};
}

static inline Vec load_bf16(const uint16_t* p) {
  const __m128i a = _mm_loadu_si128((const __m128i*)p);
  const __m128i b = _mm_loadu_si128((const __m128i*)(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
}
static inline __m256i bf16_of8(__m256 v) {  // in the low halves of eight 32-bit lanes
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
static inline void store_bf16(uint16_t* p, Vec v) {
  const __m256i packed = _mm256_packus_epi32(bf16_of8(v.lo), bf16_of8(v.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline Vec load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void store_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}
