#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/float16.h"
#include "cuda/pack.h"
#include "quant/codes.h"
#include "quant/exact.h"

// Weights packed code by code and bit by bit from the definitions in cuda/layout.h: what the
// packing that GPUs run is held to, byte for byte.
namespace qmlp::test {

struct HostTiles {
  cuda::TileLayout layout = {};
  std::vector<std::uint8_t> bytes;
  float unscale[2] = {1.0f, 1.0f};
};

inline cuda::HalfChoice host_choice(const QuantizedTensorView& w, DType activation) {
  const cuda::HalfChoice dense = {cuda::kDenseBits, cuda::kChunkK, 0};
  if (w.spec.is_dense() || w.spec.scale_dtype != activation) return dense;
  const cuda::HalfChoice coded = {w.spec.bits, std::min(w.spec.group_size, cuda::kChunkK), 0};
  if (activation != DType::bf16) return coded;
  float most = 0.0f, least = 1.0f;  // least: of those that are not 0
  for (std::int64_t i = 0; i < w.N * (w.K / w.spec.group_size); ++i) {
    const float s = std::fabs(load_float(w.scales.data(), DType::bf16, i));
    const float b = std::fabs(load_float(w.biases.data(), DType::bf16, i));
    if (s - s == 0.0f) most = std::max(most, s);
    if (s != 0.0f) least = std::min(least, s);
    if (b != 0.0f) least = std::min(least, b);
  }
  int prescale = 0;
  for (; most >= 0x1p-5f; most *= 0.5f) ++prescale;
  if (prescale > 24 || (prescale != 0 && least < 0x1p-90f)) return dense;
  return {coded.bits, coded.group_size, prescale};
}

inline HostTiles pack_tiles(const QuantizedTensorView* weights, int num_weights, DType activation) {
  using namespace cuda;
  const bool swiglu = num_weights == 2;
  const HalfChoice choices[2] = {host_choice(weights[0], activation),
                                 host_choice(weights[swiglu ? 1 : 0], activation)};
  HostTiles tiles;
  auto layout = lay_out_tiles(weights[0].N, weights[0].K, choices, swiglu, activation);
  if (!layout) std::abort();
  tiles.layout = *layout;
  tiles.bytes.assign(static_cast<std::size_t>(layout->bytes()), 0);
  for (int h = 0; h < 2; ++h) tiles.unscale[h] = std::ldexp(1.0f, choices[h].prescale);
  const TileFormat& format = layout->format;

  const auto put = [](std::uint8_t* codes, int bits, int lane, int i, int e, int code) {
    for (int f = 0; f < kCodeFields; ++f) {
      const CodeField field = code_field(bits, i, f);
      for (int b = 0; b < field.bits; ++b) {
        const int at = word_half(bits, lane, field.word, e).byte * 8 + field.bit + b;
        codes[at / 8] =
            static_cast<std::uint8_t>(codes[at / 8] | (code >> (field.from + b) & 1) << at % 8);
      }
    }
  };
  // Infinities and NaNs as they are.
  const auto scaled = [&](std::uint16_t bits, int exponent) {
    if (activation != DType::bf16 || (bits & 0x7F80) == 0x7F80) return bits;
    return f32_to_bf16(std::ldexp(bf16_to_f32(bits), exponent));
  };
  const auto element = [](const auto& span, std::int64_t i) {
    std::uint16_t bits;
    std::memcpy(&bits, span.data() + 2 * i, 2);
    return bits;
  };
  for (std::int64_t tile = 0; tile < layout->num_tiles; ++tile) {
    for (std::int64_t c = 0; c < layout->num_chunks; ++c) {
      std::uint8_t* chunk =
          tiles.bytes.data() + tile * layout->tile_bytes + c * format.chunk_bytes();
      for (int h = 0; h < 2; ++h) {
        const QuantizedTensorView& w = weights[swiglu ? h : 0];
        const int bits = format.half[h].bits;
        const std::int64_t first_row =
            swiglu ? tile * kHalfRows : tile * kTileRows + h * std::int64_t{kHalfRows};
        std::uint8_t* codes = chunk + format.codes_offset(h);
        for (int lane = 0; lane < 32; ++lane) {
          const std::int64_t row = first_row + lane / 4;
          for (int i = 0; i < kPairs; ++i) {
            for (int e = 0; e < 2; ++e) {
              const std::int64_t k = c * kChunkK + pair_k(lane, i, e);
              if (row >= w.N || k >= w.K) continue;
              if (bits == kDenseBits && w.spec.is_dense() && w.spec.scale_dtype == activation) {
                const std::uint16_t same = element(w.codes, row * w.K + k);
                std::memcpy(codes + 2 * (lane * 16 + i * 2 + e), &same, 2);
              } else if (bits == kDenseBits) {
                store_float(codes, activation, lane * 16 + i * 2 + e,
                            exact_element(w, row, k, activation));
              } else {
                const int code =
                    extract_code(w.codes.data() + row * packed_row_bytes(w.K, bits), bits, k);
                put(codes, bits, lane, i, e, code);
              }
            }
          }
        }
        std::uint8_t* sets = chunk + format.scales_offset(h);
        for (int set = 0; set < format.half[h].scale_sets(); ++set) {
          for (int g = 0; g < kHalfRows; ++g) {
            const std::int64_t row = first_row + g;
            const std::int64_t k = c * kChunkK + set * format.half[h].group_size;
            if (row >= w.N || k >= w.K) continue;
            const std::int64_t group = row * (w.K / w.spec.group_size) + k / w.spec.group_size;
            const std::uint16_t pair[2] = {
                scaled(element(w.scales, group), 133 - choices[h].prescale),
                scaled(element(w.biases, group), -choices[h].prescale)};
            std::memcpy(sets + set * kScaleSetBytes + 4 * g, pair, 4);
          }
        }
      }
    }
  }
  return tiles;
}

}  // namespace qmlp::test
