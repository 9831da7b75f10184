#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/float16.h"
#include "kernels/random.h"
#include "qmlp/tensor.h"
#include "quant/codes.h"

// Made-up weights for the packing tests.
namespace qmlp::test {

constexpr int kWidths[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroups[] = {32, 64, 128};

// What scales and biases are like.
enum class Range {
  usual,     // of a real model
  wide,      // every magnitude that needs no prescale, subnormals, infinities and NaN too
  prescale,  // bf16 scales from 2^-5 on
  huge,      // bf16 scales past what a prescale is allowed
};

struct Weight {
  QuantizedTensorView view;
  std::vector<std::byte> codes, scales, biases;
};

inline std::uint16_t wide_float(Random& random, DType type, bool below_prescale) {
  if (type == DType::f16) return static_cast<std::uint16_t>(random.bits());
  auto bits = static_cast<std::uint16_t>(random.bits());
  if (below_prescale && (bits & 0x7F80) != 0x7F80) {
    // |scale| < 2^-5
    bits = static_cast<std::uint16_t>((bits & 0x8000) | (bits & 0x7FFF) % ((127 - 5) << 7));
  }
  return bits;
}

inline Weight make_weight(std::uint64_t seed, std::int64_t N, std::int64_t K, QuantSpec spec,
                          Range range) {
  Random random(seed);
  Weight w;
  if (spec.is_dense()) {
    w.codes.resize(static_cast<std::size_t>(N * K) * size_of(spec.scale_dtype));
    for (std::int64_t i = 0; i < N * K; ++i) {
      store_float(w.codes.data(), spec.scale_dtype, i, static_cast<float>(random.normal() * 0.05));
    }
    w.view = {w.codes, {}, {}, N, K, spec};
    return w;
  }
  w.codes.resize(static_cast<std::size_t>(N * packed_row_bytes(K, spec.bits)));
  for (std::byte& byte : w.codes) byte = static_cast<std::byte>(random.bits());
  const std::int64_t groups = N * (K / spec.group_size);
  const DType type = spec.scale_dtype;
  w.scales.resize(static_cast<std::size_t>(groups) * size_of(type));
  w.biases.resize(w.scales.size());
  for (std::int64_t i = 0; i < groups; ++i) {
    if (range == Range::wide && type != DType::f32) {
      const std::uint16_t s = wide_float(random, type, true), b = wide_float(random, type, false);
      std::memcpy(w.scales.data() + 2 * i, &s, 2);
      std::memcpy(w.biases.data() + 2 * i, &b, 2);
      continue;
    }
    double scale = random.normal() * 0.005, bias = random.normal() * 0.02;
    if (range == Range::prescale)
      scale = std::ldexp(random.uniform(-1.0, 1.0), static_cast<int>(random.below(20)) - 4);
    if (range == Range::huge) scale = std::ldexp(random.uniform(0.5, 1.0), 21);
    if (range != Range::usual) bias = scale * random.uniform(-300.0, 300.0);
    store_float(w.scales.data(), type, i, static_cast<float>(scale));
    store_float(w.biases.data(), type, i, static_cast<float>(bias));
  }
  w.view = {w.codes, w.scales, w.biases, N, K, spec};
  return w;
}

inline std::string describe(const QuantizedTensorView& w) {
  return std::to_string(w.spec.bits) + " bits, group " + std::to_string(w.spec.group_size) + ", " +
         to_string(w.spec.scale_dtype) + " scales, N " + std::to_string(w.N) + ", K " +
         std::to_string(w.K);
}

}  // namespace qmlp::test
