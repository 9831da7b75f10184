#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "mlx/mlx.h"

// Arithmetic of the small ops, shared by the ops and by whole layers: MLX's roundings in each type.
namespace qmlp_mlx {

// Calls body(T{}) for the three types.
template <class Body>
void for_type(mlx::core::Dtype type, Body body) {
  if (type == mlx::core::float32) {
    body(float{});
  } else if (type == mlx::core::float16) {
    body(mlx::core::float16_t{});
  } else {
    body(mlx::core::bfloat16_t{});
  }
}

// Conversions without branches, so that loops over them become vector code.
template <class T>
float wide(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, mlx::core::bfloat16_t>) {
    return std::bit_cast<float>(std::uint32_t{std::bit_cast<std::uint16_t>(value)} << 16);
  } else {
    const std::uint32_t bits = std::bit_cast<std::uint16_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFF;
    // Exact for subnormals too; infinities and NaN get the rest of their exponent.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t special = magnitude >= 0x7C00 ? 0x7F800000u : 0u;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | special |
                                (bits & 0x8000) << 16);
  }
}
// Rounds to nearest, ties to even.
template <class T>
T rounded(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, mlx::core::bfloat16_t>) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const std::uint32_t quiet = bits >> 16 | 0x40;
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return std::bit_cast<T>(static_cast<std::uint16_t>(is_nan ? quiet : nearest));
  } else {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t magnitude = bits & 0x7FFFFFFF;
    const std::uint32_t rebased = magnitude - (std::uint32_t{112} << 23);
    const std::uint32_t normal = (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13;
    // One unit of 0.5 is that of a subnormal f16.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000;
    const std::uint32_t beyond = magnitude > 0x7F800000 ? 0x7E00u : 0x7C00u;
    std::uint32_t out = magnitude < 0x38800000 ? subnormal : normal;
    out = magnitude >= 0x47800000 ? beyond : out;
    return std::bit_cast<T>(static_cast<std::uint16_t>(out | (bits >> 16 & 0x8000)));
  }
}

// y = x / sqrt(mean(x^2) + eps) * w for each of the rows; y may be x.
template <class T>
void rms_rows(const T* x, const T* w, T* y, std::int64_t rows, std::int64_t width, float eps) {
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * width;
    T* to = y + row * width;
    // Eight chains: a fixed order that does not depend on the number of rows.
    float sums[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      float values[8];
      for (int lane = 0; lane < 8; ++lane) values[lane] = wide(from[i + lane]);
      for (int lane = 0; lane < 8; ++lane) sums[lane] += values[lane] * values[lane];
    }
    for (; i < width; ++i) sums[0] += wide(from[i]) * wide(from[i]);
    const float sum =
        ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    const float r = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
    for (i = 0; i + 8 <= width; i += 8) {
      float values[8];
      for (int lane = 0; lane < 8; ++lane) {
        values[lane] = wide(rounded<T>(wide(from[i + lane]) * r)) * wide(w[i + lane]);
      }
      for (int lane = 0; lane < 8; ++lane) to[i + lane] = rounded<T>(values[lane]);
    }
    for (; i < width; ++i) {
      to[i] = rounded<T>(wide(rounded<T>(wide(from[i]) * r)) * wide(w[i]));
    }
  }
}

// cos and sin of the positions of a pass.
struct Angles {
  std::vector<float> frequencies;
  float scale = 0.0f;
  int offset = -1;
  std::int64_t T = 0;
  std::vector<float> cos, sin;  // [T, frequencies]
};
// The same for all layers, so the last one is kept.
std::shared_ptr<const Angles> angles_of(const float* frequencies, std::size_t half, float scale,
                                        int offset, std::int64_t T);

// A rotation of the pair (a, c): T's roundings, as MLX's ops make them.
template <class T>
void rotate_pair(float a, float c, float cos, float sin, T* first, T* second) {
  const float co = wide(rounded<T>(cos)), si = wide(rounded<T>(sin));
  *first = rounded<T>(wide(rounded<T>(a * co)) - wide(rounded<T>(c * si)));
  *second = rounded<T>(wide(rounded<T>(a * si)) + wide(rounded<T>(c * co)));
}

// The first 2 * half features of a head, stride_d elements apart; `to` is contiguous and may be
// `from`.
template <class T>
void rotate_head(const T* from, std::int64_t stride_d, T* to, const float* cos, const float* sin,
                 std::int64_t half, bool traditional) {
  constexpr std::int64_t kMost = 128;
  if (!traditional && stride_d == 1 && half <= kMost) {
    // Through buffers of its own: nothing overlaps, so this becomes vector code.
    float a[kMost], c[kMost];
    T first[kMost], second[kMost];
    for (std::int64_t i = 0; i < half; ++i) a[i] = wide(from[i]);
    for (std::int64_t i = 0; i < half; ++i) c[i] = wide(from[i + half]);
    for (std::int64_t i = 0; i < half; ++i) {
      rotate_pair(a[i], c[i], cos[i], sin[i], &first[i], &second[i]);
    }
    std::copy_n(first, half, to);
    std::copy_n(second, half, to + half);
    return;
  }
  for (std::int64_t i = 0; i < half; ++i) {
    const std::int64_t first = traditional ? 2 * i : i;
    const std::int64_t second = traditional ? 2 * i + 1 : i + half;
    rotate_pair(wide(from[first * stride_d]), wide(from[second * stride_d]), cos[i], sin[i],
                to + first, to + second);
  }
}

}  // namespace qmlp_mlx
