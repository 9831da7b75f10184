#pragma once

#include "cuda/device/args.h"
#include "cuda/device/decode.cuh"
#include "cuda/device/ptx.cuh"

// What follows the dot product (docs/numerics.md section 4).
namespace qmlp::cuda {

template <class T>
__device__ __forceinline__ std::uint16_t to_bits(float v) {
  if constexpr (__is_same(T, Bf16)) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}
template <class T>
__device__ __forceinline__ float from_bits(std::uint16_t bits) {
  if constexpr (__is_same(T, Bf16)) return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
  return __half2float(__ushort_as_half(bits));
}
template <class T>
__device__ __forceinline__ float rounded(float v) {
  return from_bits<T>(to_bits<T>(v));
}
template <class T>
__device__ __forceinline__ float element(const void* p, std::int64_t index) {
  return from_bits<T>(static_cast<const std::uint16_t*>(p)[index]);
}

// Two values of T in a word, the first in its low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack_two(float first, float second) {
  std::uint32_t d;
  if constexpr (__is_same(T, Bf16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(second), "f"(first));
  }
  return d;
}
template <class T>
__device__ __forceinline__ float low_of(std::uint32_t pair) {
  return from_bits<T>(static_cast<std::uint16_t>(pair));
}
template <class T>
__device__ __forceinline__ float high_of(std::uint32_t pair) {
  if constexpr (__is_same(T, Bf16)) return __uint_as_float(pair & 0xFFFF0000u);
  return from_bits<T>(static_cast<std::uint16_t>(pair >> 16));
}

// sigmoid_T: MLX's CUDA functor, e, 1 + e, 1 / (1 + e) and 1 - y each rounded. g is a value of T.
template <class T>
__device__ __forceinline__ float sigmoid(float g) {
  const float magnitude = fabsf(g);
  float e;
  if constexpr (__is_same(T, Bf16)) {
    const float t = __fmul_rn(magnitude, __uint_as_float(0x3FB8AA3Cu));
    asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(t));
    e = rounded<T>(e);
  } else {
    const float t = __fmul_rn(magnitude, __uint_as_float(0x3FB8AA3Bu));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t));
    e = rounded<T>(e);
    // The two inputs where the approximation falls on the wrong side, as the toolkit's hexp has
    // them.
    const std::uint16_t bits = to_bits<T>(magnitude);
    if (bits == 0x1F79u || bits == 0x25CFu) e -= 0x1p-10f;
  }
  const float d = rounded<T>(__fadd_rn(1.0f, e));
  const float y = rounded<T>(__frcp_rn(d));
  return g < 0.0f ? y : rounded<T>(__fsub_rn(1.0f, y));
}

// The pinned exponential, as src/cpu/kernels/math_inl.h has it: x <= 0.
__device__ __forceinline__ float exp_nonpositive(float x) {
  x = -104.0f > x ? -104.0f : x;
  const float shifted = __fmaf_rn(x, 1.44269504f, 12582912.0f);
  const float n = __fsub_rn(shifted, 12582912.0f);
  float r = __fmaf_rn(n, -0.693145752f, x);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float p = 1.98412698e-4f;
  p = __fmaf_rn(p, r, 1.38888889e-3f);
  p = __fmaf_rn(p, r, 8.33333333e-3f);
  p = __fmaf_rn(p, r, 4.16666667e-2f);
  p = __fmaf_rn(p, r, 1.66666667e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  const int i = static_cast<int>(__float_as_uint(shifted) - 0x4B400000u);
  const int half = i >> 1;
  const float first = __uint_as_float(static_cast<std::uint32_t>(half + 127) << 23);
  const float second = __uint_as_float(static_cast<std::uint32_t>(i - half + 127) << 23);
  return __fmul_rn(__fmul_rn(p, first), second);
}
__device__ __forceinline__ float sigmoid_f32(float g) {
  const float e = exp_nonpositive(-fabsf(g));
  const float y = __fdiv_rn(1.0f, __fadd_rn(1.0f, e));
  return g < 0.0f ? __fmul_rn(e, y) : y;
}

template <class T>
__device__ __forceinline__ void store(void* p, std::int64_t index, float v) {
  static_cast<std::uint16_t*>(p)[index] = to_bits<T>(v);
}

template <class T>
__device__ __forceinline__ void finish_linear(const EpilogueArgs& args, std::int64_t m,
                                              std::int64_t n, float acc) {
  float y = acc;
  if (args.linear_bias[0] != nullptr) {
    y = __fadd_rn(rounded<T>(y), element<T>(args.linear_bias[0], n));
  }
  if (args.residual != nullptr) {
    y = __fadd_rn(element<T>(args.residual, m * args.residual_stride + n), rounded<T>(y));
  }
  store<T>(args.out, m * args.out_stride + n, y);
}

// silu(gate) * up with the roundings of `match` but the last; both are values of T.
template <class T>
__device__ __forceinline__ float swiglu_match(float gate, float up) {
  return __fmul_rn(rounded<T>(__fmul_rn(gate, sigmoid<T>(gate))), up);
}

template <class T>
__device__ __forceinline__ float swiglu_value(const EpilogueArgs& args, std::int64_t m,
                                              std::int64_t n, float gate, float up) {
  if (!args.wide) {
    gate = rounded<T>(gate);
    up = rounded<T>(up);
  }
  if (args.linear_bias[0] != nullptr) {
    gate = __fadd_rn(gate, element<T>(args.linear_bias[0], n));
    if (!args.wide) gate = rounded<T>(gate);
  }
  if (args.linear_bias[1] != nullptr) {
    up = __fadd_rn(up, element<T>(args.linear_bias[1], n));
    if (!args.wide) up = rounded<T>(up);
  }
  if (args.gate_tap != nullptr) store<T>(args.gate_tap, m * args.gate_tap_stride + n, gate);
  if (args.wide) return __fmul_rn(__fmul_rn(gate, sigmoid_f32(gate)), up);
  return swiglu_match<T>(gate, up);
}

// The same for two values, packed. In bf16 each operation is one instruction for both: a product or
// sum of two bf16 values rounded once is what `sigmoid` computes in two steps, and its reciprocals
// stay 2^-16 clear of a rounding boundary, so that the approximate one (2^-23) rounds alike.
template <class T>
__device__ __forceinline__ std::uint32_t swiglu_match_pair(std::uint32_t gate, std::uint32_t up) {
  if constexpr (__is_same(T, Bf16)) {
    constexpr std::uint32_t kOne = 0x3F803F80u, kMinusOne = 0xBF80BF80u, kMinusZero = 0x80008000u;
    const auto exponential = [](float magnitude) {
      float e;
      asm("ex2.approx.f32 %0, %1;"
          : "=f"(e)
          : "f"(__fmul_rn(magnitude, __uint_as_float(0x3FB8AA3Cu))));
      return e;
    };
    // A quarter of d, so that no quotient is subnormal before it is scaled back.
    const auto reciprocal = [](float d) {
      float y;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(d, 0.25f)));
      return __fmul_rn(y, 0.25f);
    };
    const std::uint32_t magnitude = gate & 0x7FFF7FFFu;
    const std::uint32_t e =
        pack_two<T>(exponential(low_of<T>(magnitude)), exponential(high_of<T>(magnitude)));
    const std::uint32_t d = fma2<T>(e, kOne, kOne);
    const std::uint32_t y = pack_two<T>(reciprocal(low_of<T>(d)), reciprocal(high_of<T>(d)));
    const std::uint32_t other = fma2<T>(y, kMinusOne, kOne);
    const std::uint32_t negative = (gate >> 15 & 0x00010001u) * 0xFFFFu;
    const std::uint32_t sigmoids = (y & negative) | (other & ~negative);
    return fma2<T>(fma2<T>(gate, sigmoids, kMinusZero), up, kMinusZero);
  } else {
    return pack_two<T>(swiglu_match<T>(low_of<T>(gate), low_of<T>(up)),
                       swiglu_match<T>(high_of<T>(gate), high_of<T>(up)));
  }
}

// One column's sums of the two halves' row `row` of a tile.
template <class T>
__device__ __forceinline__ void finish(const EpilogueArgs& args, std::int64_t tile, int row,
                                       std::int64_t m, float sum0, float sum1) {
  sum0 = __fmul_rn(sum0, args.unscale[0]);
  sum1 = __fmul_rn(sum1, args.unscale[1]);
  if (args.is_swiglu) {
    const std::int64_t n = tile * kHalfRows + row;
    if (n < args.N)
      store<T>(args.out, m * args.out_stride + n, swiglu_value<T>(args, m, n, sum0, sum1));
    return;
  }
  const std::int64_t n = tile * kTileRows + row;
  if (n < args.N) finish_linear<T>(args, m, n, sum0);
  if (n + kHalfRows < args.N) finish_linear<T>(args, m, n + kHalfRows, sum1);
}

// Two neighbouring features of one token, n and n + 1, as one word where both exist.
__device__ __forceinline__ void store_pair(std::uint16_t* row, std::int64_t n, std::int64_t N,
                                           std::uint32_t pair) {
  if (n + 1 < N) {
    *reinterpret_cast<std::uint32_t*>(row + n) = pair;
  } else if (n < N) {
    row[n] = static_cast<std::uint16_t>(pair);
  }
}

// Whether store_words can finish a call: what a SwiGLU or a linear of a model needs.
QMLP_HOST_DEVICE inline bool word_stores_suffice(const EpilogueArgs& args) {
  const auto words = [](const void* p, std::int64_t stride) {
    return (reinterpret_cast<std::uintptr_t>(p) & 3) == 0 && stride % 2 == 0;
  };
  const bool plain =
      !args.is_swiglu || (!args.wide && args.gate_tap == nullptr &&
                          args.linear_bias[0] == nullptr && args.linear_bias[1] == nullptr);
  return plain && words(args.out, args.out_stride) && words(args.residual, args.residual_stride);
}

// A warp's blocks of 8 tokens of a tile, from m on: acc as mma and wgmma leave it, four sums a
// block: rows lane / 4 of both halves, tokens 2 (lane % 4) and the next. All lanes take part.
template <class T, int kBlocks>
__device__ __forceinline__ void store_words(const EpilogueArgs& args, std::int64_t tile, int lane,
                                            std::int64_t m, std::int64_t M,
                                            const float (&acc)[4 * kBlocks]) {
  const int g = lane / 4, t = lane % 4;
  const float scale0 = args.unscale[0], scale1 = args.unscale[1];
  const std::int64_t left = M - m - g;  // tokens from this lane's on
  auto* row = static_cast<std::uint16_t*>(args.out) + (m + g) * args.out_stride;
  const std::int64_t step = 8 * args.out_stride;
  // Transposed, a lane has two neighbouring features of token g.
  if (args.is_swiglu) {
    const std::int64_t n = tile * kHalfRows + 2 * t;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b, row += step) {
      if (m + 8 * b >= M) break;
      const std::uint32_t gate =
          pack_two<T>(__fmul_rn(acc[4 * b], scale0), __fmul_rn(acc[4 * b + 1], scale0));
      const std::uint32_t up =
          pack_two<T>(__fmul_rn(acc[4 * b + 2], scale1), __fmul_rn(acc[4 * b + 3], scale1));
      const std::uint32_t pair = transpose_matrix(swiglu_match_pair<T>(gate, up));
      if (8 * b < left) store_pair(row, n, args.N, pair);
    }
    return;
  }
  const std::int64_t n = tile * kTileRows;
  const bool has_bias = args.linear_bias[0] != nullptr;
  const float bias0 = has_bias && n + g < args.N ? element<T>(args.linear_bias[0], n + g) : 0.0f;
  const float bias1 = has_bias && n + kHalfRows + g < args.N
                          ? element<T>(args.linear_bias[0], n + kHalfRows + g)
                          : 0.0f;
  const auto* residual = static_cast<const std::uint16_t*>(args.residual);
  if (residual != nullptr) residual += (m + g) * args.residual_stride;
  const auto finish_half = [&](float first, float second, float scale, float bias, std::int64_t at,
                               bool exists) {
    std::uint32_t pair = pack_two<T>(__fmul_rn(first, scale), __fmul_rn(second, scale));
    if (has_bias) {
      pair = pack_two<T>(__fadd_rn(low_of<T>(pair), bias), __fadd_rn(high_of<T>(pair), bias));
    }
    pair = transpose_matrix(pair);
    if (!exists) return;
    if (residual != nullptr) {
      const std::uint32_t r = at + 1 < args.N
                                  ? *reinterpret_cast<const std::uint32_t*>(residual + at)
                              : at < args.N ? residual[at]
                                            : 0;
      pair = pack_two<T>(__fadd_rn(low_of<T>(r), low_of<T>(pair)),
                         __fadd_rn(high_of<T>(r), high_of<T>(pair)));
    }
    store_pair(row, at, args.N, pair);
  };
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (m + 8 * b >= M) break;
    const bool exists = 8 * b < left;
    finish_half(acc[4 * b], acc[4 * b + 1], scale0, bias0, n + 2 * t, exists);
    finish_half(acc[4 * b + 2], acc[4 * b + 3], scale1, bias1, n + kHalfRows + 2 * t, exists);
    row += step;
    if (residual != nullptr) residual += 8 * args.residual_stride;
  }
}

// The same for whatever an epilogue can ask for, element by element.
template <class T, int kBlocks>
__device__ __forceinline__ void store_elements(const EpilogueArgs& args, std::int64_t tile,
                                               int lane, std::int64_t m, std::int64_t M,
                                               const float (&acc)[4 * kBlocks]) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const std::int64_t at = m + 8 * b + 2 * t;
    if (at < M) finish<T>(args, tile, g, at, acc[4 * b], acc[4 * b + 2]);
    if (at + 1 < M) finish<T>(args, tile, g, at + 1, acc[4 * b + 1], acc[4 * b + 3]);
  }
}

}  // namespace qmlp::cuda
