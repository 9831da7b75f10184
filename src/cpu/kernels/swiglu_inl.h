// What follows the two projections of a SwiGLU. Needs math_inl.h and element_inl.h before it.

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
