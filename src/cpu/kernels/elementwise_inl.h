// RMS norm, rotary embedding and the small ops of the forward. Each output element is one fixed
// sequence of IEEE f32 operations (docs/forward.md). Needs a simd_*.h,
// model_args.h and element_inl.h before it.

// The element functions with the type known when compiling.
template <int kType>
static inline Vec load_as(const void* base, int64_t index) {
  return load_as(kType, element_at(kType, base, index));
}
template <int kType>
static inline void store_as(void* base, int64_t index, Vec v) {
  store_as(kType, (void*)element_at(kType, base, index), v);
}
// The first `count` < 16 lanes, the others +0.
template <int kType>
static inline Vec load_part(const void* base, int64_t index, int64_t count) {
  return load_some(kType, element_at(kType, base, index), count);
}
template <int kType>
static inline void store_part(void* base, int64_t index, int64_t count, Vec v) {
  store_some(kType, (void*)element_at(kType, base, index), v, count);
}

// Elements of `kType` by number of bytes alone.
template <int kType>
struct ElementOf {
  typedef uint16_t Type;
};
template <>
struct ElementOf<kF32> {
  typedef float Type;
};

// Lanes added as ((0+8)+(4+12)) + ((2+10)+(6+14)) and so on: halves, then quarters.
static inline float sum_lanes(Vec v) {
  float lanes[16];
  store(lanes, v);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

template <int kType>
static void rms_norm_rows(const RmsNormArgs& a, int64_t row_begin, int64_t row_end) {
  const int64_t main = a.cols - a.cols % 16;
  const int64_t rest = a.cols - main;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t x = row * a.x_stride;
    const int64_t out = row * a.out_stride;
    Vec sum = splat(0.0f);
    for (int64_t c = 0; c < main; c += 16) {
      const Vec v = load_as<kType>(a.x, x + c);
      sum = fma(v, v, sum);
    }
    if (rest != 0) {
      const Vec v = load_part<kType>(a.x, x + main, rest);
      sum = fma(v, v, sum);
    }
    const float mean = sum_lanes(sum) / (float)a.cols;
    const Vec scale = splat(1.0f / __builtin_sqrtf(mean + a.eps));
    for (int64_t c = 0; c < main; c += 16) {
      const Vec v = mul(load_as<kType>(a.x, x + c), scale);
      store_as<kType>(a.out, out + c, mul(v, load(a.weight + c)));
    }
    if (rest != 0) {
      const Vec v = mul(load_part<kType>(a.x, x + main, rest), scale);
      const Vec w = load_part<kF32>(a.weight, main, rest);
      store_part<kType>(a.out, out + main, rest, mul(v, w));
    }
  }
}

static void rms_norm(const RmsNormArgs* args, int64_t row_begin, int64_t row_end) {
  switch (args->type) {
    case kF32:
      return rms_norm_rows<kF32>(*args, row_begin, row_end);
    case kF16:
      return rms_norm_rows<kF16>(*args, row_begin, row_end);
    default:
      return rms_norm_rows<kBf16>(*args, row_begin, row_end);
  }
}

// (first, second) turned by the angle: (first c - second s, first s + second c).
static inline void rotate(Vec* first, Vec* second, Vec c, Vec s) {
  const Vec minus_second = sub(splat(-0.0f), *second);
  const Vec turned = fma(*first, c, mul(minus_second, s));
  *second = fma(*first, s, mul(*second, c));
  *first = turned;
}

template <int kType>
static inline void rotate_halves(void* base, int64_t start, int64_t half, const float* cosines,
                                 const float* sines) {
  const int64_t main = half - half % 16;
  const int64_t rest = half - main;
  for (int64_t i = 0; i < main; i += 16) {
    Vec first = load_as<kType>(base, start + i);
    Vec second = load_as<kType>(base, start + half + i);
    rotate(&first, &second, load(cosines + i), load(sines + i));
    store_as<kType>(base, start + i, first);
    store_as<kType>(base, start + half + i, second);
  }
  if (rest != 0) {
    Vec first = load_part<kType>(base, start + main, rest);
    Vec second = load_part<kType>(base, start + half + main, rest);
    rotate(&first, &second, load_part<kF32>(cosines, main, rest),
           load_part<kF32>(sines, main, rest));
    store_part<kType>(base, start + main, rest, first);
    store_part<kType>(base, start + half + main, rest, second);
  }
}

template <int kType>
static inline void rotate_pairs(void* base, int64_t start, int64_t half, const float* cosines,
                                const float* sines) {
  typedef typename ElementOf<kType>::Type Element;
  Element* x = (Element*)base + start;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t count = half - i < 16 ? half - i : 16;
    Element even[16] = {};
    Element odd[16] = {};
    for (int64_t j = 0; j < count; ++j) {
      even[j] = x[2 * (i + j)];
      odd[j] = x[2 * (i + j) + 1];
    }
    Vec first = load_as<kType>(even, 0);
    Vec second = load_as<kType>(odd, 0);
    rotate(&first, &second, load_part<kF32>(cosines, i, count), load_part<kF32>(sines, i, count));
    store_as<kType>(even, 0, first);
    store_as<kType>(odd, 0, second);
    for (int64_t j = 0; j < count; ++j) {
      x[2 * (i + j)] = even[j];
      x[2 * (i + j) + 1] = odd[j];
    }
  }
}

template <int kType>
static void rope_append_rows(const RopeArgs& a, int64_t row_begin, int64_t row_end) {
  typedef typename ElementOf<kType>::Type Element;
  const int64_t half = a.rotary_dim / 2;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t position = a.position + row;
    const float* cosines = a.cosines + position * half;
    const float* sines = a.sines + position * half;
    const int64_t rotated = half == 0 ? 0 : a.num_heads + a.num_kv_heads;
    for (int64_t head = 0; head < rotated; ++head) {
      const bool is_query = head < a.num_heads;
      void* base = is_query ? a.q : a.k;
      const int64_t start = is_query ? (row * a.num_heads + head) * a.head_dim
                                     : (row * a.num_kv_heads + head - a.num_heads) * a.head_dim;
      if (a.interleaved != 0) {
        rotate_pairs<kType>(base, start, half, cosines, sines);
      } else {
        rotate_halves<kType>(base, start, half, cosines, sines);
      }
    }
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      const int64_t start = (row * a.num_kv_heads + head) * a.head_dim;
      const Element* k = (const Element*)a.k + start;
      const Element* v = (const Element*)a.v + start;
      Element* k_out = (Element*)a.k_cache + head * a.k_head_stride +
                       (position / kCacheBlock) * kCacheBlock * a.head_dim + position % kCacheBlock;
      Element* v_out = (Element*)a.v_cache + head * a.v_head_stride + position * a.v_row_stride;
      for (int64_t d = 0; d < a.head_dim; ++d) k_out[d * kCacheBlock] = k[d];
      for (int64_t d = 0; d < a.head_dim; ++d) v_out[d] = v[d];
    }
  }
}

static void rope_append(const RopeArgs* args, int64_t row_begin, int64_t row_end) {
  switch (args->type) {
    case kF32:
      return rope_append_rows<kF32>(*args, row_begin, row_end);
    case kF16:
      return rope_append_rows<kF16>(*args, row_begin, row_end);
    default:
      return rope_append_rows<kBf16>(*args, row_begin, row_end);
  }
}

static inline bool all_finite(Vec v) {
  return !any_outside(bit_and(as_int(v), splat_int(0x7FFFFFFFu)), 0, 0x7F7FFFFFu);
}

template <int kType>
static int64_t find_non_finite_in(const void* data, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t lanes = count - i < 16 ? count - i : 16;
    const Vec v = lanes == 16 ? load_as<kType>(data, i) : load_part<kType>(data, i, lanes);
    if (all_finite(v)) continue;
    float values[16];
    store(values, v);
    for (int64_t j = 0; j < lanes; ++j) {
      if (!(values[j] - values[j] == 0.0f)) return i + j;
    }
  }
  return -1;
}

static int64_t find_non_finite(int type, const void* data, int64_t count) {
  switch (type) {
    case kF32:
      return find_non_finite_in<kF32>(data, count);
    case kF16:
      return find_non_finite_in<kF16>(data, count);
    default:
      return find_non_finite_in<kBf16>(data, count);
  }
}

template <int kType>
static void widen_all(const void* data, float* out, int64_t count) {
  const int64_t main = count - count % 16;
  for (int64_t i = 0; i < main; i += 16) store(out + i, load_as<kType>(data, i));
  if (main != count) {
    store_part<kF32>(out, main, count - main, load_part<kType>(data, main, count - main));
  }
}

static void widen(int type, const void* data, float* out, int64_t count) {
  switch (type) {
    case kF32:
      return widen_all<kF32>(data, out, count);
    case kF16:
      return widen_all<kF16>(data, out, count);
    default:
      return widen_all<kBf16>(data, out, count);
  }
}

template <int kType>
static void scale_all(void* x, int64_t count, float factor) {
  const int64_t main = count - count % 16;
  const Vec f = splat(factor);
  for (int64_t i = 0; i < main; i += 16) store_as<kType>(x, i, mul(load_as<kType>(x, i), f));
  if (main != count) {
    const int64_t rest = count - main;
    store_part<kType>(x, main, rest, mul(load_part<kType>(x, main, rest), f));
  }
}

static void scale(int type, void* x, int64_t count, float factor) {
  switch (type) {
    case kF32:
      return scale_all<kF32>(x, count, factor);
    case kF16:
      return scale_all<kF16>(x, count, factor);
    default:
      return scale_all<kBf16>(x, count, factor);
  }
}

template <int kType>
static void add_scaled_all(void* x, const void* y, int64_t count, float factor) {
  const int64_t main = count - count % 16;
  const Vec f = splat(factor);
  for (int64_t i = 0; i < main; i += 16) {
    const Vec product = round_as(kType, mul(load_as<kType>(y, i), f));
    store_as<kType>(x, i, add(load_as<kType>(x, i), product));
  }
  if (main != count) {
    const int64_t rest = count - main;
    const Vec product = round_as(kType, mul(load_part<kType>(y, main, rest), f));
    store_part<kType>(x, main, rest, add(load_part<kType>(x, main, rest), product));
  }
}

static void add_scaled(int type, void* x, const void* y, int64_t count, float factor) {
  switch (type) {
    case kF32:
      return add_scaled_all<kF32>(x, y, count, factor);
    case kF16:
      return add_scaled_all<kF16>(x, y, count, factor);
    default:
      return add_scaled_all<kBf16>(x, y, count, factor);
  }
}
