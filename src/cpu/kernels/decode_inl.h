// Packed codes to f32 weights. Needs element_inl.h before it.

// How s*q + z is rounded to a 16-bit type in f32. With the scale and bias multiplied by 2^p, one
// FMA gives a = 2^p * v, v = s*q + z; then a - a * (1 - 2^-p) is v rounded to 24 - p bits, ties to
// even: the product a * (1 - 2^-p) is rounded on the grid of 24 bits at a's exponent, which is v's
// grid of 24 - p bits, and the subtraction is exact. Holds while v is normal; the packer keeps
// every block where this is not the exactly rounded weight as decoded floats.
struct Rounding {
  float prescale;  // 2^p
  float keep;      // 1 - 2^-p
};
static inline Rounding rounding_of(int dtype) {
  if (dtype == kBf16) return {65536.0f, 1.0f - 1.0f / 65536.0f};
  if (dtype == kF16) return {8192.0f, 1.0f - 1.0f / 8192.0f};
  return {1.0f, 0.0f};
}

// Scales and biases of a group's 16 rows, prescaled where weights are rounded.
template <bool kRound>
static inline void load_group(const unsigned char* data, int scale_type, Vec prescale, Vec* scale,
                              Vec* bias) {
  *scale = load_as(scale_type, data);
  *bias = load_as(scale_type, data + kLanes * element_bytes(scale_type));
  if constexpr (kRound) {
    *scale = mul(*scale, prescale);
    *bias = mul(*bias, prescale);
  }
}

template <int kBits, int kIndex, bool kRound>
__attribute__((always_inline)) static inline void decode_one(const IntVec* words, Vec scale,
                                                             Vec bias, Vec keep, float* out) {
  constexpr int kBit = kIndex * kBits;
  constexpr int kWord = kBit / 32;
  constexpr int kShift = kBit % 32;
  constexpr int kNext = kShift + kBits > 32 ? kWord + 1 : kWord;
  Vec w = fma(scale, code_to_float<kBits, kShift>(words[kWord], words[kNext]), bias);
  if constexpr (kRound) w = sub(w, mul(w, keep));
  store(out + kIndex * kLanes, w);
  if constexpr (kIndex < 31) {
    decode_one<kBits, kIndex + 1, kRound>(words, scale, bias, keep, out);
  }
}

template <int kBits, bool kRound>
static void decode_groups(const unsigned char* data, int scale_type, int group_size,
                          long long num_groups, Rounding rounding, float* out) {
  const long long scales_bytes = kLanes * element_bytes(scale_type);
  const Vec prescale = splat(rounding.prescale);
  const Vec keep = splat(rounding.keep);
  for (long long g = 0; g < num_groups; ++g) {
    Vec scale, bias;
    load_group<kRound>(data, scale_type, prescale, &scale, &bias);
    data += 2 * scales_bytes;
    for (int k = 0; k < group_size; k += 32) {
      IntVec words[kBits];
      for (int j = 0; j < kBits; ++j) words[j] = load_int((const uint32_t*)data + kLanes * j);
      decode_one<kBits, 0, kRound>(words, scale, bias, keep, out);
      data += 4 * kLanes * kBits;
      out += 32 * kLanes;
    }
  }
}

// The same for any width in one loop, where code size counts for more than speed.
template <bool kRound>
static void decode_groups_looped(int bits, const unsigned char* data, int scale_type,
                                 int group_size, long long num_groups, Rounding rounding,
                                 float* out) {
  const long long scales_bytes = kLanes * element_bytes(scale_type);
  const Vec prescale = splat(rounding.prescale);
  const Vec keep = splat(rounding.keep);
  const IntVec mask = splat_int((1u << bits) - 1);
  for (long long g = 0; g < num_groups; ++g) {
    Vec scale, bias;
    load_group<kRound>(data, scale_type, prescale, &scale, &bias);
    const uint32_t* words = (const uint32_t*)(data + 2 * scales_bytes);
    for (int i = 0; i < group_size; ++i) {
      const int shift = i * bits % 32;
      const uint32_t* word = words + i * bits / 32 * kLanes;
      IntVec code = shift_right_by(load_int(word), shift);
      if (shift + bits > 32)
        code = bit_or(code, shift_left_by(load_int(word + kLanes), 32 - shift));
      Vec w = fma(scale, to_float(bit_and(code, mask)), bias);
      if constexpr (kRound) w = sub(w, mul(w, keep));
      store(out + i * kLanes, w);
    }
    data += 2 * scales_bytes + (long long)group_size / 8 * bits * kLanes;
    out += group_size * kLanes;
  }
}

template <bool kRound>
static void decode_groups_of(int bits, const unsigned char* data, int scale_type, int group_size,
                             long long num_groups, Rounding rounding, float* out) {
  if constexpr (kUnrollCodes) {
#define QMLP_BITS(n) \
  case n:            \
    return decode_groups<n, kRound>(data, scale_type, group_size, num_groups, rounding, out);
    switch (bits) {
      QMLP_BITS(2)
      QMLP_BITS(3)
      QMLP_BITS(4)
      QMLP_BITS(5)
      QMLP_BITS(6)
      QMLP_BITS(8)
    }
#undef QMLP_BITS
  } else {
    decode_groups_looped<kRound>(bits, data, scale_type, group_size, num_groups, rounding, out);
  }
}

// out[k][16] = weights of block `block` for k in [k_begin, k_begin + k_count); k_begin a multiple
// of kPanelK.
static void decode_panel(const BlockMatrix* w, long long block, int dtype, long long k_begin,
                         long long k_count, float* out) {
  const unsigned char* data = w->data + w->block_offsets[block];
  if (w->block_kinds[block] == kDenseBlock) {
    data += k_begin * kLanes * element_bytes(w->dense_type);
    for (long long k = 0; k < k_count; ++k) {
      store(out + k * kLanes,
            load_as(w->dense_type, data + k * kLanes * element_bytes(w->dense_type)));
    }
    return;
  }
  const long long group_bytes = 2 * kLanes * element_bytes(w->scale_type) +
                                (long long)w->group_size / 32 * w->bits * 4 * kLanes;
  data += k_begin / w->group_size * group_bytes;
  const long long num_groups = k_count / w->group_size;
  const Rounding rounding = rounding_of(dtype);
  if (dtype == kF32) {
    decode_groups_of<false>(w->bits, data, w->scale_type, w->group_size, num_groups, rounding, out);
  } else {
    decode_groups_of<true>(w->bits, data, w->scale_type, w->group_size, num_groups, rounding, out);
  }
}
