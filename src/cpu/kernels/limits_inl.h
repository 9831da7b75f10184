// Loops at the machine's limits over the vectors of one simd_*.h. Part of one ISA file: internal
// linkage only. The file defines kChains, as many independent chains as hide the latency of a
// multiply-add without spilling registers.

static void multiply_add(int64_t iterations, float* sink) {
  const Vec scale = splat(*sink * 0.0f + 0.999999f);  // unknown to the compiler
  const Vec offset = splat(*sink * 0.0f + 1e-6f);
  float start[16 * kChains];  // all different, or the compiler merges equal halves
  for (int i = 0; i < 16 * kChains; ++i) start[i] = *sink + (float)i;
  Vec chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = load(start + 16 * i);
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], scale, offset);
  }
  Vec sum = chain[0];
  for (int i = 1; i < kChains; ++i) sum = add(sum, chain[i]);
  float lanes[16];
  store(lanes, sum);
  float total = 0.0f;
  for (int i = 0; i < 16; ++i) total += lanes[i];
  *sink = total;
}

static void read_all(const void* data, int64_t bytes, uint32_t* sink) {
  const uint32_t* words = (const uint32_t*)data;
  IntVec sum[4] = {splat_int(0), splat_int(0), splat_int(0), splat_int(0)};
  for (int64_t i = 0; i < bytes / 4; i += 64) {
    for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], load_int(words + i + 16 * j));
  }
  float lanes[16];
  store(lanes, as_float(add(add(sum[0], sum[1]), add(sum[2], sum[3]))));
  uint32_t total = 0;
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, &lanes[i], 4);
    total += bits;
  }
  *sink = total;
}

static const LimitKernels kLimits = {multiply_add, int64_t{2} * 16 * kChains, read_all};
