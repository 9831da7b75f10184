#pragma once

#include <math.h>

#include <cstdint>

#include "heads.h"

// What one thread of the kernels in heads.cu does, for hosts too, where the tests run it.
#ifdef __CUDACC__
#define QMLP_MLX_HOST_DEVICE __host__ __device__
#else
#define QMLP_MLX_HOST_DEVICE
#endif

namespace qmlp_mlx {

// One pair of features in some heads of one row; thread `at` of the row's. Number says how T is
// widened and narrowed. The arithmetic is that of MLX's own kernels, to the bit: a compiler may
// join either product of a sum with it, so which one is written out.
template <class Number>
QMLP_MLX_HOST_DEVICE void heads_item(const HeadsArgs& a, int row, int at) {
  using T = typename Number::Type;
  const int half = a.head_dim / 2;
  const int item = at / half, pair = at - item * half;
  const int rotating = a.num_heads + a.num_kv_heads;
  const int all = a.values != nullptr ? rotating + a.num_kv_heads : rotating;
  int head = a.first_head + item * a.heads_each;
  const int last = head + a.heads_each < all ? head + a.heads_each : all;
  if (head >= last) return;

  const int b = row / a.length;
  const int position = a.offset + row - b * a.length;
  const int pairs = a.rotated / 2;
  const bool turns = pair < pairs;
  const bool apart = turns && a.traditional == 0;
  // Past the rotated features pairs are neighbours.
  const int i1 = apart ? pair : 2 * pair;
  const int i2 = apart ? pair + pairs : i1 + 1;

  float cosine = 1.0f, sine = 0.0f;
  if (turns && head < rotating) {
    float frequency;
    if (a.periods != nullptr) {
      frequency = static_cast<float>(1.0 / a.periods[a.period_stride * pair]);
    } else {
      const float d = static_cast<float>(pair) / static_cast<float>(pairs);
      frequency = exp2f(-d * a.base_log2);
    }
    const float theta = (a.scale * static_cast<float>(position)) * frequency;
    cosine = cosf(theta);
    sine = sinf(theta);
  }
  for (; head < last; ++head) {
    const T* in;
    T* out;
    if (head < a.num_heads) {
      in = static_cast<const T*>(a.q) + (std::int64_t{row} * a.num_heads + head) * a.head_dim;
      const std::int64_t* const s = a.query_strides;
      out = static_cast<T*>(a.queries) + b * s[0] + head * s[1] + (position - a.offset) * s[2];
    } else {
      const bool is_key = head < rotating;
      const int h = head - (is_key ? a.num_heads : rotating);
      in = static_cast<const T*>(is_key ? a.k : a.v) +
           (std::int64_t{row} * a.num_kv_heads + h) * a.head_dim;
      const std::int64_t* const s = is_key ? a.key_strides : a.value_strides;
      out = static_cast<T*>(is_key ? a.keys : a.values) + b * s[0] + h * s[1] + position * s[2];
    }
    const T in1 = in[i1], in2 = in[i2];
    if (turns && head < rotating) {
      const float x1 = Number::wide(in1), x2 = Number::wide(in2);
      out[i1] = Number::narrow(fmaf(x1, cosine, -(x2 * sine)));
      out[i2] = Number::narrow(fmaf(x1, sine, x2 * cosine));
    } else {
      out[i1] = in1;
      out[i2] = in2;
    }
  }
}

// Sixteen bytes of a new room, unit i of room `which`.
template <class Unit>
QMLP_MLX_HOST_DEVICE void carry_item(const CarryArgs& a, int which, std::int64_t i) {
  const std::int64_t row = i / a.width;
  const auto column = static_cast<int>(i - row * a.width);
  const std::int64_t rows = row / a.room;
  const auto position = static_cast<int>(row - rows * a.room);
  const std::int64_t b = rows / a.heads, h = rows - b * a.heads;
  auto* const to = static_cast<Unit*>(a.to[which]);
  if (position < a.kept) {
    const std::int64_t* const s = a.from_strides[which];
    to[i] = static_cast<const Unit*>(a.from[which])[b * s[0] + h * s[1] + position * s[2] + column];
  } else if (position >= a.zeroed) {
    to[i] = Unit{};
  }
}

}  // namespace qmlp_mlx
