// The `tensor` contract on a CPU: what an sm_90 tensor core sums in one step of 16 terms
// (docs/numerics.md section 3). Needs matmul_inl.h before it.

// The exact value of a nonzero finite f32: significand * 2^exponent, and the exponent of its
// leading digit as the step counts it (that of the 16-bit type's normal range at least).
struct Term {
  long long significand;
  int exponent, top;
};
static inline Term term_of(float value, int least_exponent) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const int field = (int)(bits >> 23 & 255);
  Term term;
  term.significand = (long long)(bits & 0x7FFFFF) | (field != 0 ? 0x800000 : 0);
  term.exponent = (field != 0 ? field : 1) - 150;
  term.top = (field != 0 ? field : 1) - 127;
  if (term.top < least_exponent) term.top = least_exponent;
  if ((bits >> 31) != 0) term.significand = -term.significand;
  return term;
}

// floor toward zero of significand * 2^shift.
static inline __int128 shift_toward_zero(__int128 significand, int shift) {
  if (shift >= 0) return significand << shift;
  if (shift < -100) return 0;
  const __int128 magnitude = (significand < 0 ? -significand : significand) >> -shift;
  return significand < 0 ? -magnitude : magnitude;
}

// One step in integers, for operands or sums outside the range of the vector path. w[i * kLanes]
// are one lane's weights.
static float tensor_step_exact(const float* x, const float* w, float acc, int dtype) {
  const int least = dtype == kF16 ? -14 : -126;
  bool is_nan = acc != acc, plus = false, minus = false;
  bool any = false;
  int top = 0;
  for (int i = 0; i < kTensorStep; ++i) {
    const float a = x[i], b = w[i * kLanes];
    const bool a_inf = a - a != 0.0f, b_inf = b - b != 0.0f;  // infinite or NaN
    if (a != a || b != b || (a_inf && b == 0.0f) || (b_inf && a == 0.0f)) {
      is_nan = true;
    } else if (a_inf || b_inf) {
      ((a < 0.0f) != (b < 0.0f) ? minus : plus) = true;
    } else if (a != 0.0f && b != 0.0f) {
      const int product_top = term_of(a, least).top + term_of(b, least).top;
      if (!any || product_top > top) top = product_top;
      any = true;
    }
  }
  if (acc == acc && acc - acc != 0.0f) {
    (acc < 0.0f ? minus : plus) = true;
  } else if (acc == acc && acc != 0.0f) {
    const int acc_top = term_of(acc, -126).top;
    if (!any || acc_top > top) top = acc_top;
    any = true;
  }
  const uint32_t special = is_nan || (plus && minus) ? 0x7FFFFFFFu
                           : plus                    ? 0x7F800000u
                           : minus                   ? 0xFF800000u
                                                     : 0u;
  float result;
  __builtin_memcpy(&result, &special, 4);
  if (special != 0 || !any) return result;

  const int last = top - 25;
  __int128 total = 0;
  for (int i = 0; i < kTensorStep; ++i) {
    const float a = x[i], b = w[i * kLanes];
    if (a == 0.0f || b == 0.0f) continue;
    const Term p = term_of(a, least), q = term_of(b, least);
    total +=
        shift_toward_zero((__int128)p.significand * q.significand, p.exponent + q.exponent - last);
  }
  if (acc != 0.0f) {
    const Term t = term_of(acc, -126);
    total += shift_toward_zero(t.significand, t.exponent - last);
  }
  if (total == 0) return 0.0f;
  const uint32_t sign = total < 0 ? 0x80000000u : 0u;
  unsigned __int128 magnitude = total < 0 ? -(unsigned __int128)total : (unsigned __int128)total;
  int exponent = last;
  while (magnitude >> 24 != 0) {
    magnitude >>= 1;
    ++exponent;
  }
  while (magnitude >> 23 == 0) {
    magnitude <<= 1;
    --exponent;
  }
  uint32_t bits;
  if (exponent + 23 > 127) {
    bits = 0x7F800000u;
  } else if (exponent + 23 >= -126) {
    bits = (uint32_t)(exponent + 150) << 23 | ((uint32_t)magnitude & 0x7FFFFFu);
  } else {
    const int shift = -149 - exponent;
    bits = shift < 32 ? (uint32_t)magnitude >> shift : 0u;
  }
  if (bits == 0) return 0.0f;
  bits |= sign;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}

// The power of two that a step counts an operand with; 0 for 0.
static inline Vec operand_exponent(int dtype, Vec v) {
  const Vec power = as_float(bit_and(as_int(v), splat_int(0x7F800000u)));
  const Vec least = splat(dtype == kF16 ? 0x1p-14f : 0x1p-126f);
  return select_zero(v, splat(0.0f), max(power, least));
}

// Those of x are kept times 2^40, so that the product with one of w vanishes only where 16 such
// terms stay below f32's least subnormal.
constexpr int kExponentShift = 40;

static inline long long padded_k(const KernelArgs* args) {
  return (args->K + kTensorStep - 1) / kTensorStep * kTensorStep;
}

static void pack_x_tensor(const KernelArgs* args, long long row_begin, long long row_end) {
  const long long stride = padded_k(args);
  for (long long m = row_begin; m < row_end; ++m) {
    const void* row = element_at(args->dtype, args->x, (args->row_begin + m) * args->x_stride);
    bool non_finite = false;
    for (long long k = 0; k < stride; k += kLanes) {
      const long long count = args->K - k < kLanes ? args->K - k : kLanes;
      const Vec v = load_some(args->dtype, element_at(args->dtype, row, k), count);
      store(args->x_tiles + m * stride + k, v);
      store(args->x_exponents + m * stride + k,
            mul(operand_exponent(args->dtype, v), splat(0x1p40f)));
      non_finite |= any_outside(bit_and(as_int(v), splat_int(0x7FFFFFFFu)), 0u, 0x7F7FFFFFu);
    }
    args->row_non_finite[m] = non_finite;
  }
}

// One step for 16 outputs. x, x_exponents: 16 values of one row; w, w_exponents: [16][16].
static Vec tensor_step(const float* x, const float* x_exponents, const float* w,
                       const float* w_exponents, Vec acc, int dtype, bool exact) {
  if (!exact) {
    // 2^(e + 40), infinite past e = 87: the exact path's.
    Vec top = as_float(bit_and(as_int(acc), splat_int(0x7F800000u)));
    top = mul(select_zero(acc, splat(0.0f), max(top, splat(0x1p-126f))), splat(0x1p40f));
#pragma GCC unroll 16
    for (int i = 0; i < kTensorStep; ++i) {
      top = max(mul(splat(x_exponents[i]), load(w_exponents + i * kLanes)), top);
    }
    // For e from -87 to 87 every quantity below is a normal f32, or falls below the cut.
    constexpr uint32_t kLeastTop = 40 + kExponentShift, kMostTop = 214 + kExponentShift;
    const Vec checked = select_zero(top, splat(1.0f), top);
    if (!any_outside(as_int(checked), kLeastTop << 23, kMostTop << 23)) {
      const IntVec top_bits = as_int(top);
      const Vec to_units =  // 2^(25 - e)
          as_float(sub(splat_int((279u + kExponentShift) << 23), top_bits));
      const Vec from_units =  // 2^(e - 25)
          as_float(sub(top_bits, splat_int((25u + kExponentShift) << 23)));
      // Eight products and the accumulator stay below 2^31 in units of 2^(e - 25).
      IntVec first = to_int_truncate(mul(acc, to_units));
      IntVec second = splat_int(0);
#pragma GCC unroll 8
      for (int i = 0; i < kTensorStep / 2; ++i) {
        const Vec p = mul(splat(x[i]), load(w + i * kLanes));
        first = add(first, to_int_truncate(mul(p, to_units)));
      }
#pragma GCC unroll 8
      for (int i = kTensorStep / 2; i < kTensorStep; ++i) {
        const Vec p = mul(splat(x[i]), load(w + i * kLanes));
        second = add(second, to_int_truncate(mul(p, to_units)));
      }
      // Adding +0 makes a zero positive where there was no term and the scale is meaningless.
      return add(sum_truncated(first, second, from_units), splat(0.0f));
    }
  }
  float lanes[kLanes];
  store(lanes, acc);
  for (int n = 0; n < kLanes; ++n) lanes[n] = tensor_step_exact(x, w + n, lanes[n], dtype);
  return load(lanes);
}

// scratch: panels and their exponents, [kUnitBlocks][kPanelK][16] each, then sums
// [segments][row_count][kUnitBlocks][16].
static void compute_tensor(const KernelArgs* args, long long unit_begin, long long unit_end,
                           float* scratch) {
  constexpr long long kPanelStride = (long long)kPanelK * kLanes;
  float* panels = scratch;
  float* exponents = panels + kUnitBlocks * kPanelStride;
  float* c = exponents + kUnitBlocks * kPanelStride;
  constexpr long long kSumStride = (long long)kUnitBlocks * kLanes;
  const long long segment_stride = args->row_count * kSumStride;
  const long long x_stride = padded_k(args);
  const long long num_k_blocks = (args->K + kSegmentBlock - 1) / kSegmentBlock;
  for (long long u = unit_begin; u < unit_end; ++u) {
    const Unit unit = unit_at(args, u);
    for (long long i = 0; i < args->segments * segment_stride; ++i) c[i] = 0.0f;
    int segment = 0;
    for (long long k = 0; k < args->K; k += kPanelK) {
      const long long k_count = args->K - k < kPanelK ? args->K - k : kPanelK;
      const long long steps = (k_count + kTensorStep - 1) / kTensorStep;
      for (int i = 0; i < unit.num_blocks; ++i) {
        float* panel = panels + i * kPanelStride;
        decode_panel(unit.weight[i], unit.block[i], args->dtype, k, k_count, panel);
        for (long long j = k_count; j < steps * kTensorStep; ++j) {
          store(panel + j * kLanes, splat(0.0f));
        }
        for (long long j = 0; j < steps * kTensorStep; ++j) {
          store(exponents + i * kPanelStride + j * kLanes,
                operand_exponent(args->dtype, load(panel + j * kLanes)));
        }
      }
      for (long long j = 0; j < steps; j += kSegmentBlock / kTensorStep) {
        const long long k_block = (k + j * kTensorStep) / kSegmentBlock;
        while (k_block >= (segment + 1) * num_k_blocks / args->segments) ++segment;
        const long long j_end =
            j + kSegmentBlock / kTensorStep < steps ? j + kSegmentBlock / kTensorStep : steps;
        for (int i = 0; i < unit.num_blocks; ++i) {
          for (long long m = 0; m < args->row_count; ++m) {
            const bool exact = args->row_non_finite[m] || unit.weight[i]->non_finite;
            float* sums = c + segment * segment_stride + m * kSumStride + i * kLanes;
            Vec acc = load(sums);
            for (long long s = j; s < j_end; ++s) {
              const long long x_at = m * x_stride + k + s * kTensorStep;
              const long long w_at = i * kPanelStride + s * kTensorStep * kLanes;
              acc = tensor_step(args->x_tiles + x_at, args->x_exponents + x_at, panels + w_at,
                                exponents + w_at, acc, args->dtype, exact);
            }
            store(sums, acc);
          }
        }
      }
    }
    // ((0+1)+(2+3))+((4+5)+(6+7))
    for (int width = 1; width < args->segments; width *= 2) {
      for (int s = 0; s + width < args->segments; s += 2 * width) {
        float* a = c + s * segment_stride;
        const float* b = a + width * segment_stride;
        for (long long i = 0; i < segment_stride; i += kLanes) {
          store(a + i, add(load(a + i), load(b + i)));
        }
      }
    }
    finish_unit(args, &unit, c);
  }
}
