// The pinned exponential and what is built on it (docs/numerics.md section 4). IEEE f32 operations
// in a fixed order, so that every instruction set gives the same bits. Needs a simd_*.h before it.

// e^x for x <= 0, within 2 ulp; 0 below -104; NaN stays NaN.
static inline Vec exp_nonpositive(Vec x) {
  x = max(splat(-104.0f), x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = fma(x, splat(1.44269504f), magic);
  const Vec n = sub(shifted, magic);
  Vec r = fma(n, splat(-0.693145752f), x);  // ln 2 in two parts, the first exact times n
  r = fma(n, splat(-1.42860677e-6f), r);
  Vec p = splat(1.98412698e-4f);
  p = fma(p, r, splat(1.38888889e-3f));
  p = fma(p, r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  // 2^n in two factors: the first product is exact, the second rounds once where it is subnormal.
  const IntVec i = sub(as_int(shifted), splat_int(0x4B400000u));
  const IntVec half = shift_right_signed<1>(i);
  const Vec first = as_float(shift_left<23>(add(half, splat_int(127))));
  const Vec second = as_float(shift_left<23>(add(sub(i, half), splat_int(127))));
  return mul(mul(p, first), second);
}

// 1 / (1 + e^-g) without overflow: e^-|g| / (1 + e^-|g|) where g < 0.
static inline Vec sigmoid_f32(Vec g) {
  const Vec magnitude = as_float(bit_and(as_int(g), splat_int(0x7FFFFFFFu)));
  const Vec e = exp_nonpositive(sub(splat(-0.0f), magnitude));
  const Vec y = div(splat(1.0f), add(splat(1.0f), e));
  return select_negative(g, mul(e, y), y);
}
