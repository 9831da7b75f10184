#pragma once

#include <cstdint>

namespace qmlp_mlx {

// The kernel between a layer's projections and its attention: q and k are rotated, k and v go to
// the cache. One kernel where MLX has two for the rotation and two or four for the cache.
//
// Strides are in elements, of [batch, head, position]; a row of head_dim elements has no gaps.
struct HeadsArgs {
  // The projections' outputs [batch, length, heads, head_dim], contiguous.
  const void* q;
  const void* k;
  const void* v;
  void* queries;  // may be q
  void* keys;     // position `offset` on is written
  void* values;   // null: v stays where it is
  std::int64_t query_strides[3];
  std::int64_t key_strides[3];
  std::int64_t value_strides[3];
  const float* periods;  // null: powers of the base
  std::int64_t period_stride;
  float scale;      // of positions
  float base_log2;  // of the base
  std::int32_t length, num_heads, num_kv_heads, head_dim;
  std::int32_t rotated;      // features of a head that are rotated, from the first on
  std::int32_t traditional;  // pairs are neighbours, not half of `rotated` apart
  std::int32_t offset;       // the position of the first row
  std::int32_t first_head;   // num_heads: q needs nothing
  std::int32_t heads_each;   // heads of one thread
};

// What a new room for keys or values takes over from the one before it: rows before `kept`; from
// `zeroed` on it gets zeros, since MLX's attention reads whole rooms behind a mask, where a NaN
// would come through. In units of 16 bytes.
struct CarryArgs {
  const void* from[2];
  void* to[2];
  std::int64_t from_strides[2][3];
  std::int32_t batch, heads, room, width;
  std::int32_t kept, zeroed;
};

// CUfunctions for the current device, null in a build without CUDA.
void* heads_function(bool bf16);
void* carry_function();

constexpr unsigned kHeadsBlock = 128;
constexpr unsigned kCarryBlock = 256;

}  // namespace qmlp_mlx
