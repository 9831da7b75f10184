#pragma once

#include <stdint.h>

#include "cpu/kernels/kernel_args.h"

namespace qmlp::cpu {

// Arguments of the ops around the linear layers: plain structs, since every ISA file includes them.
// Strides count elements. Bits: docs/forward.md.

// Positions per block of the K cache, and the unit to which value rows are padded.
enum { kCacheBlock = 16 };
// Query rows that one attention call takes at most.
enum { kAttentionRows = 4 };

// out[r, c] = x[r, c] / sqrt(mean(x[r]^2) + eps) * weight[c]
struct RmsNormArgs {
  int type;
  const void* x;
  const float* weight;
  void* out;
  int64_t cols;
  int64_t x_stride;
  int64_t out_stride;
  float eps;
};

// Rotates the first rotary_dim features of q and k rows in place and appends k and v to the cache.
struct RopeArgs {
  int type;
  int interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  void* q;          // [M, num_heads * head_dim]
  void* k;          // [M, num_kv_heads * head_dim]
  const void* v;    // [M, num_kv_heads * head_dim]
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;    // even; 0: nothing is rotated
  const float* cosines;  // [position, rotary_dim / 2]
  const float* sines;
  int64_t position;  // of row 0
  void* k_cache;     // [num_kv_heads, blocks, head_dim, kCacheBlock]
  void* v_cache;     // [num_kv_heads, positions, v_row_stride]
  int64_t k_head_stride;
  int64_t v_head_stride;
  int64_t v_row_stride;
};

// Causal attention of query rows against the cache.
struct AttentionArgs {
  int type;
  const void* q;  // [M, num_heads * head_dim], rotated
  void* out;      // the same shape
  const void* k_cache;
  const void* v_cache;
  int64_t num_heads;
  int64_t heads_per_kv;
  int64_t head_dim;
  int64_t k_head_stride;
  int64_t v_head_stride;
  int64_t v_row_stride;
  int64_t score_stride;  // floats of a scratch row, a multiple of kCacheBlock
  int64_t position;      // of query row 0
  int64_t window;        // a query sees this many keys, its own included; 0: all before it
  float scale;
};

// One instruction set's versions. Row ranges are [begin, end).
struct ModelKernels {
  void (*rms_norm)(const RmsNormArgs* args, int64_t row_begin, int64_t row_end);
  void (*rope_append)(const RopeArgs* args, int64_t row_begin, int64_t row_end);
  // Rows index (query, head of the group), query-major, of one KV head; at most kAttentionRows.
  // scratch: kAttentionRows * (score_stride + head_dim + v_row_stride) floats.
  void (*attention)(const AttentionArgs* args, int64_t kv_head, int64_t row_begin, int64_t row_end,
                    float* scratch);
  // The index of the first infinite or NaN element, or -1.
  int64_t (*find_non_finite)(int type, const void* data, int64_t count);
  void (*widen)(int type, const void* data, float* out, int64_t count);
  // x = rn_T(x * factor)
  void (*scale)(int type, void* x, int64_t count, float factor);
  // x = rn_T(x + rn_T(y * factor))
  void (*add_scaled)(int type, void* x, const void* y, int64_t count, float factor);
};

const ModelKernels* model_kernels_portable();
const ModelKernels* model_kernels_avx2();
const ModelKernels* model_kernels_avx512();

}  // namespace qmlp::cpu
