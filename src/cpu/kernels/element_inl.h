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
  // Bytes, which alias elements of every type.
  alignas(64) unsigned char zeros[4 * kLanes] = {};
  __builtin_memcpy(zeros, p, (size_t)(count * element_bytes(dtype)));
  return load_as(dtype, zeros);
}
static inline void store_some(int dtype, void* p, Vec v, long long count) {
  if (count >= kLanes) {
    store_as(dtype, p, v);
    return;
  }
  alignas(64) unsigned char whole[4 * kLanes];
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
