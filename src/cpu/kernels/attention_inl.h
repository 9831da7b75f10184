// Causal attention of a few query rows that share a KV head. Lanes are positions while scores are
// formed and features while values are summed, so every sum is one chain whose order depends on the
// key positions alone (docs/forward.md). Needs simd_*.h, math_inl.h and elementwise_inl.h before
// it.

// Vectors beside each query row in the register tile: enough chains to hide the FMA's latency.
static constexpr int attention_vectors(int rows) {
  if (kTileVectors > 1) return 4;
  return rows == 1 ? 4 : (rows == kAttentionRows ? 1 : 2);
}

// scores[r, block * 16 + lane] = scale * (q[r] . k[position]) over kBlocks blocks of the K cache.
template <int kType, int kRows, int kBlocks>
static inline void score_blocks(const float* q, int64_t head_dim, const void* k, int64_t k_start,
                                float scale, float* scores, int64_t score_stride) {
  Vec acc[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) acc[r][b] = splat(0.0f);
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int b = 0; b < kBlocks; ++b) {
      const Vec keys = load_as<kType>(k, k_start + (b * head_dim + d) * kCacheBlock);
      for (int r = 0; r < kRows; ++r) {
        acc[r][b] = fma(splat(q[r * head_dim + d]), keys, acc[r][b]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      store(scores + r * score_stride + b * kCacheBlock, mul(acc[r][b], splat(scale)));
    }
  }
}

// Replaces the scores [first, limit) by e^(score - max), the rest of their blocks by +0, and
// returns their sum.
static inline float exp_scores(float* scores, int64_t first, int64_t limit) {
  const int64_t begin = first - first % kCacheBlock;
  const int64_t main = limit - limit % kCacheBlock;
  for (int64_t i = begin; i < first; ++i) scores[i] = -__builtin_inff();
  Vec top = splat(-__builtin_inff());
  for (int64_t i = begin; i < main; i += kCacheBlock) top = max(load(scores + i), top);
  if (main != limit) {
    for (int64_t i = limit; i < main + kCacheBlock; ++i) scores[i] = -__builtin_inff();
    top = max(load(scores + main), top);
  }
  float lanes[16];
  store(lanes, top);
  float largest = lanes[0];
  for (int i = 1; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  const Vec shift = splat(largest);
  Vec sum = splat(0.0f);
  for (int64_t i = begin; i < main; i += kCacheBlock) {
    const Vec e = exp_nonpositive(sub(load(scores + i), shift));
    store(scores + i, e);
    sum = add(sum, e);
  }
  if (main != limit) {
    store(scores + main, exp_nonpositive(sub(load(scores + main), shift)));
    for (int64_t i = limit; i < main + kCacheBlock; ++i) scores[i] = 0.0f;
    sum = add(sum, load(scores + main));  // every lane is at least +0, so adding +0 changes no bit
  }
  return sum_lanes(sum);
}

// acc[r, c] += weights[r, j] * v[j, c] for j ascending in [begin, end).
template <int kType, int kRows, int kVectors>
static inline void sum_values(const float* weights, int64_t weight_stride, const void* v,
                              int64_t v_start, int64_t v_row_stride, int64_t begin, int64_t end,
                              float* acc, int64_t acc_stride) {
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) sums[r][c] = load(acc + r * acc_stride + c * 16);
  }
  for (int64_t j = begin; j < end; ++j) {
    for (int c = 0; c < kVectors; ++c) {
      const Vec values = load_as<kType>(v, v_start + j * v_row_stride + c * 16);
      for (int r = 0; r < kRows; ++r) {
        sums[r][c] = fma(splat(weights[r * weight_stride + j]), values, sums[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kVectors; ++c) store(acc + r * acc_stride + c * 16, sums[r][c]);
  }
}

template <int kType, int kRows>
static inline void sum_values_all(const float* weights, int64_t weight_stride, const void* v,
                                  int64_t v_start, int64_t v_row_stride, int64_t begin, int64_t end,
                                  float* acc) {
  constexpr int kVectors = attention_vectors(kRows);
  int64_t c = 0;
  for (; c + kVectors * 16 <= v_row_stride; c += kVectors * 16) {
    sum_values<kType, kRows, kVectors>(weights, weight_stride, v, v_start + c, v_row_stride, begin,
                                       end, acc + c, v_row_stride);
  }
  for (; c < v_row_stride; c += 16) {
    sum_values<kType, kRows, 1>(weights, weight_stride, v, v_start + c, v_row_stride, begin, end,
                                acc + c, v_row_stride);
  }
}

template <int kType, int kRows>
static void attention_rows(const AttentionArgs& a, int64_t kv_head, int64_t row_begin,
                           float* scratch) {
  float* scores = scratch;                                // [kRows, score_stride]
  float* acc = scores + kAttentionRows * a.score_stride;  // [kRows, v_row_stride]
  float* q = acc + kAttentionRows * a.v_row_stride;       // [kRows, head_dim]
  int64_t starts[kRows];                                  // of each row's head in q and out
  int64_t firsts[kRows];                                  // the keys that the row may see
  int64_t limits[kRows];
  const int64_t main = a.head_dim - a.head_dim % 16;
  const int64_t rest = a.head_dim - main;
  for (int r = 0; r < kRows; ++r) {
    const int64_t query = (row_begin + r) / a.heads_per_kv;
    const int64_t head = kv_head * a.heads_per_kv + (row_begin + r) % a.heads_per_kv;
    starts[r] = (query * a.num_heads + head) * a.head_dim;
    limits[r] = a.position + query + 1;
    firsts[r] = a.window > 0 && limits[r] > a.window ? limits[r] - a.window : 0;
    float* row = q + r * a.head_dim;
    for (int64_t d = 0; d < main; d += 16) store(row + d, load_as<kType>(a.q, starts[r] + d));
    if (rest != 0) {
      store_part<kF32>(row, main, rest, load_part<kType>(a.q, starts[r] + main, rest));
    }
  }

  const int64_t blocks = (limits[kRows - 1] + kCacheBlock - 1) / kCacheBlock;
  const int64_t block_elements = a.head_dim * kCacheBlock;
  const int64_t k_start = kv_head * a.k_head_stride;
  constexpr int kBlocks = attention_vectors(kRows);
  int64_t b = firsts[0] / kCacheBlock;
  for (; b + kBlocks <= blocks; b += kBlocks) {
    score_blocks<kType, kRows, kBlocks>(q, a.head_dim, a.k_cache, k_start + b * block_elements,
                                        a.scale, scores + b * kCacheBlock, a.score_stride);
  }
  for (; b < blocks; ++b) {
    score_blocks<kType, kRows, 1>(q, a.head_dim, a.k_cache, k_start + b * block_elements, a.scale,
                                  scores + b * kCacheBlock, a.score_stride);
  }

  float sums[kRows];
  for (int r = 0; r < kRows; ++r) {
    sums[r] = exp_scores(scores + r * a.score_stride, firsts[r], limits[r]);
  }

  // Rows of later queries see other keys: each adds those before the common ones, all share the
  // common ones, then each adds the rest. A product with a masked key's +0 would not do: it turns
  // -0 into +0 and an infinite value into NaN.
  const int64_t v_start = kv_head * a.v_head_stride;
  const int64_t common = firsts[kRows - 1];
  const int64_t common_end = limits[0] > common ? limits[0] : common;
  const auto sum_row = [&](int r, int64_t begin, int64_t end) {
    if (begin >= end) return;
    sum_values_all<kType, 1>(scores + r * a.score_stride, a.score_stride, a.v_cache, v_start,
                             a.v_row_stride, begin, end, acc + r * a.v_row_stride);
  };
  for (int64_t i = 0; i < kRows * a.v_row_stride; i += 16) store(acc + i, splat(0.0f));
  for (int r = 0; r < kRows; ++r) {
    sum_row(r, firsts[r], limits[r] < common ? limits[r] : common);
  }
  if (common < common_end) {
    sum_values_all<kType, kRows>(scores, a.score_stride, a.v_cache, v_start, a.v_row_stride, common,
                                 common_end, acc);
  }
  for (int r = 1; r < kRows; ++r) sum_row(r, common_end, limits[r]);
  for (int r = 0; r < kRows; ++r) {
    const float* row = acc + r * a.v_row_stride;
    const Vec total = splat(sums[r]);
    for (int64_t d = 0; d < main; d += 16) {
      store_as<kType>(a.out, starts[r] + d, div(load(row + d), total));
    }
    if (rest != 0) {
      store_part<kType>(a.out, starts[r] + main, rest, div(load(row + main), total));
    }
  }
}

template <int kType>
static void attention_typed(const AttentionArgs& a, int64_t kv_head, int64_t row_begin,
                            int64_t row_end, float* scratch) {
  switch (row_end - row_begin) {
    case 1:
      return attention_rows<kType, 1>(a, kv_head, row_begin, scratch);
    case 2:
      return attention_rows<kType, 2>(a, kv_head, row_begin, scratch);
    case 3:
      return attention_rows<kType, 3>(a, kv_head, row_begin, scratch);
    case 4:
      return attention_rows<kType, 4>(a, kv_head, row_begin, scratch);
    default:
      return;
  }
}

static void attention(const AttentionArgs* args, int64_t kv_head, int64_t row_begin,
                      int64_t row_end, float* scratch) {
  switch (args->type) {
    case kF32:
      return attention_typed<kF32>(*args, kv_head, row_begin, row_end, scratch);
    case kF16:
      return attention_typed<kF16>(*args, kv_head, row_begin, row_end, scratch);
    default:
      return attention_typed<kBf16>(*args, kv_head, row_begin, row_end, scratch);
  }
}
