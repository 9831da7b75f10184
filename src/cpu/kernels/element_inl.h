// Rounding, loads and stores of the activation type. Needs a simd_*.h before it.

static inline Vec load_as(int dtype, const void* p) {
  if (dtype == kF32) return load((const float*)p);
  return dtype == kBf16 ? load_bf16((const uint16_t*)p) : load_f16((const uint16_t*)p);
}
static inline void store_as(int dtype, void* p, Vec v) {
  if (dtype == kF32) {
    store((float*)p, v);
  } else if (dtype == kBf16) {
    store_bf16((uint16_t*)p, v);
  } else {
    store_f16((uint16_t*)p, v);
  }
}
static inline long long element_bytes(int dtype) { return dtype == kF32 ? 4 : 2; }
static inline const void* element_at(int dtype, const void* p, long long index) {
  return (const char*)p + index * element_bytes(dtype);
}

// The first `count` of 16 elements; the rest read as zero and are not written.
static inline Vec load_some(int dtype, const void* p, long long count) {
  if (count >= kLanes) return load_as(dtype, p);
  float zeros[kLanes] = {};
  __builtin_memcpy(zeros, p, (size_t)(count * element_bytes(dtype)));
  return load_as(dtype, zeros);
}
static inline void store_some(int dtype, void* p, Vec v, long long count) {
  if (count >= kLanes) {
    store_as(dtype, p, v);
    return;
  }
  float whole[kLanes];
  store_as(dtype, whole, v);
  __builtin_memcpy(p, whole, (size_t)(count * element_bytes(dtype)));
}
// v rounded to dtype, widened.
static inline Vec round_as(int dtype, Vec v) {
  if (dtype == kF32) return v;
  uint16_t bits[kLanes];
  store_as(dtype, bits, v);
  return load_as(dtype, bits);
}

// sigmoid_T of a 16-bit type: the pinned table.
static inline Vec sigmoid_by_table(int dtype, const unsigned short* table, Vec g) {
  uint16_t bits[kLanes];
  store_as(dtype, bits, g);
  for (int i = 0; i < kLanes; ++i) bits[i] = table[bits[i]];
  return load_as(dtype, bits);
}

// silu(g) * u with `match` roundings; g and u are already of dtype.
static inline Vec swiglu_match(int dtype, const unsigned short* table, Vec g, Vec u) {
  const Vec p = dtype == kF32 ? sigmoid_f32(g) : sigmoid_by_table(dtype, table, g);
  return mul(round_as(dtype, mul(g, p)), u);
}

static void swiglu_elements(int dtype, const unsigned short* table, const void* gate,
                            const void* up, void* out, long long n) {
  for (long long i = 0; i < n; i += kLanes) {
    const long long count = n - i < kLanes ? n - i : kLanes;
    const Vec g = load_some(dtype, element_at(dtype, gate, i), count);
    const Vec u = load_some(dtype, element_at(dtype, up, i), count);
    store_some(dtype, (void*)element_at(dtype, out, i), swiglu_match(dtype, table, g, u), count);
  }
}
