#pragma once

#include "cuda/device/args.h"
#include "cuda/device/decode.cuh"

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
  return __fmul_rn(rounded<T>(__fmul_rn(gate, sigmoid<T>(gate))), up);
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

}  // namespace qmlp::cuda
