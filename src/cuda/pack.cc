#include "cuda/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/checked.h"
#include "base/float16.h"
#include "base/try.h"
#include "qmlp/cpu.h"
#include "quant/codes.h"
#include "quant/exact.h"

namespace qmlp::cuda {
namespace {

void put_bits(std::uint8_t* codes, const CodePlace& place, int value) noexcept {
  if (place.bits == 0) return;
  codes[place.byte] = static_cast<std::uint8_t>(codes[place.byte] | value << place.shift);
}

// The power of two that brings every bf16 scale below 2^-5 (decode.cuh); 0 when none is needed.
// kMaxPrescale + 1, which is refused, when weights might leave the normal range with it: a weight
// is a multiple of its scale's or its bias's last place, and those are 2^-97 or more.
constexpr int kMaxPrescale = 24;
constexpr float kLeastPrescaled = 0x1p-90f;
int prescale_of(const QuantizedTensorView& w) noexcept {
  float most = 0.0f, least = 1.0f;  // least: of those that are not 0
  const std::int64_t count = w.N * (w.K / w.spec.group_size);
  for (std::int64_t i = 0; i < count; ++i) {
    const float s = std::fabs(load_float(w.scales.data(), w.spec.scale_dtype, i));
    const float b = std::fabs(load_float(w.biases.data(), w.spec.scale_dtype, i));
    if (s - s == 0.0f) most = std::max(most, s);
    if (s != 0.0f) least = std::min(least, s);
    if (b != 0.0f) least = std::min(least, b);
  }
  int exponent = 0;
  while (most >= 0x1p-5f) {
    most *= 0.5f;
    ++exponent;
  }
  return exponent != 0 && least < kLeastPrescaled ? kMaxPrescale + 1 : exponent;
}

struct Half {
  const QuantizedTensorView* weight;
  HalfFormat format;
  DType activation;
  int prescale;

  // The codes of rows first_row .. +7 of chunk c; `codes` was zeroed.
  void put_codes(std::int64_t first_row, std::int64_t c, std::uint8_t* codes) const noexcept {
    const QuantizedTensorView& w = *weight;
    for (int lane = 0; lane < 32; ++lane) {
      const std::int64_t row = first_row + lane / 4;
      if (row >= w.N) continue;
      for (int i = 0; i < kPairs; ++i) {
        for (int e = 0; e < 2; ++e) {
          const std::int64_t k = c * kChunkK + pair_k(lane, i, e);
          if (k >= w.K) continue;
          if (format.bits == kDenseBits) {
            store_float(codes, activation, lane * 16 + i * 2 + e,
                        exact_element(w, row, k, activation));
            continue;
          }
          const int code = extract_code(w.codes.data() + row * packed_row_bytes(w.K, w.spec.bits),
                                        w.spec.bits, k);
          const int low = low_plane_bits(format.bits);
          put_bits(codes, low_place(format.bits, lane, i, e), code & ((1 << low) - 1));
          put_bits(codes, high_place(format.bits, lane, i, e), code >> low);
        }
      }
    }
  }

  void put_scales(std::int64_t first_row, std::int64_t c, std::uint8_t* sets) const noexcept {
    const QuantizedTensorView& w = *weight;
    for (int set = 0; set < format.scale_sets(); ++set) {
      const std::int64_t k = c * kChunkK + set * format.group_size;
      if (k >= w.K) continue;
      for (int g = 0; g < kHalfRows; ++g) {
        const std::int64_t row = first_row + g;
        if (row >= w.N) continue;
        const std::int64_t group = row * (w.K / w.spec.group_size) + k / w.spec.group_size;
        float scale = load_float(w.scales.data(), w.spec.scale_dtype, group);
        float bias = load_float(w.biases.data(), w.spec.scale_dtype, group);
        if (activation == DType::bf16) {
          scale = std::ldexp(scale, 133 - prescale);
          bias = std::ldexp(bias, -prescale);
        }
        store_float(sets + set * kScaleSetBytes, activation, 2 * g, scale);
        store_float(sets + set * kScaleSetBytes, activation, 2 * g + 1, bias);
      }
    }
  }
};

Half make_half(const QuantizedTensorView& w, DType activation) noexcept {
  Half half{&w, {w.spec.bits, std::min(w.spec.group_size, kChunkK)}, activation, 0};
  if (!w.spec.is_dense() && w.spec.scale_dtype == activation) {
    if (activation == DType::bf16) half.prescale = prescale_of(w);
    if (half.prescale <= kMaxPrescale) return half;
    half.prescale = 0;
  }
  half.format = {kDenseBits, kChunkK};
  return half;
}

}  // namespace

Result<HostTiles> pack_tiles(const QuantizedTensorView* weights, int num_weights,
                             DType activation) {
  for (int i = 0; i < num_weights; ++i) QMLP_TRY(validate(weights[i]));
  const bool swiglu = num_weights == 2;
  Half halves[2] = {make_half(weights[0], activation),
                    make_half(weights[swiglu ? 1 : 0], activation)};
  const int group_size = std::min(halves[0].format.group_size, halves[1].format.group_size);
  for (Half& half : halves) half.format.group_size = group_size;
  const std::int64_t N = weights[0].N, K = weights[0].K;
  HostTiles tiles;
  tiles.format = {{halves[0].format, halves[1].format}};
  tiles.num_tiles = ceil_div(N, swiglu ? kHalfRows : kTileRows);
  tiles.num_chunks = ceil_div(K, kChunkK);
  tiles.tile_bytes = tiles.num_chunks * tiles.format.chunk_bytes();
  for (int h = 0; h < 2; ++h) tiles.unscale[h] = std::ldexp(1.0f, halves[h].prescale);
  if (halves[0].format.bits == kDenseBits || halves[1].format.bits == kDenseBits) {
    tiles.exact_tiles = tiles.num_tiles;
  }
  const auto total = checked_mul<std::int64_t>(tiles.num_tiles, tiles.tile_bytes);
  if (!total) return Error{Errc::out_of_memory, "packed weight size overflows 64 bits"};
  tiles.bytes.assign(static_cast<std::size_t>(*total), 0);
  QMLP_ASSIGN(const auto pool, ThreadPool::create(default_num_threads()));
  pool->for_each(tiles.num_tiles, [&](std::int64_t tile, int) {
    std::uint8_t* stream = tiles.bytes.data() + tile * tiles.tile_bytes;
    for (std::int64_t c = 0; c < tiles.num_chunks; ++c) {
      std::uint8_t* chunk = stream + c * tiles.format.chunk_bytes();
      for (int h = 0; h < 2; ++h) {
        const std::int64_t row =
            swiglu ? tile * kHalfRows : tile * kTileRows + h * std::int64_t{kHalfRows};
        halves[h].put_codes(row, c, chunk + tiles.format.codes_offset(h));
        halves[h].put_scales(row, c, chunk + tiles.format.scales_offset(h));
      }
    }
  });
  return tiles;
}

}  // namespace qmlp::cuda
