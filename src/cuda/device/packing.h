#pragma once

#include <cstddef>
#include <cstdint>

#include "base/float16.h"
#include "cuda/layout.h"
#include "qmlp/types.h"
#include "quant/codes.h"
#include "quant/exact.h"

// Source rows to the words of a tile and back, as pack.cu runs it on a GPU and tests on a CPU.
namespace qmlp::cuda {

// Tiles as packed. `prescale` is the power of two taken from each half's bf16 scales and biases.
struct TileLayout {
  TileFormat format;
  std::int64_t N, K;
  std::int64_t num_tiles, num_chunks, tile_bytes;
  int prescale[2];
  bool is_swiglu;
  DType activation;

  QMLP_HOST_DEVICE std::int64_t bytes() const { return num_tiles * tile_bytes; }
};

// Eight rows of one matrix in one chunk.
struct HalfChunk {
  std::uint8_t* codes;
  std::uint8_t* scales;
};
// Half of the tile that holds rows 8 * block .. + 7 of matrix `part`.
QMLP_HOST_DEVICE inline int half_of(const TileLayout& layout, int part, std::int64_t block) {
  return layout.is_swiglu ? part : static_cast<int>(block % 2);
}
QMLP_HOST_DEVICE inline HalfChunk half_chunk(const TileLayout& layout, std::uint8_t* tiles,
                                             int part, std::int64_t block, std::int64_t c) {
  const int half = half_of(layout, part, block);
  const std::int64_t tile = layout.is_swiglu ? block : block / 2;
  std::uint8_t* chunk = tiles + tile * layout.tile_bytes + c * layout.format.chunk_bytes();
  return {chunk + layout.format.codes_offset(half), chunk + layout.format.scales_offset(half)};
}

// Rows of a matrix in memory of the running code: codes 4-byte aligned, floats as their type wants.
struct SourceRows {
  const std::byte* codes;
  const std::byte* scales;
  const std::byte* biases;
  std::int64_t rows, K;
  int bits, group_size;  // group_size 0: dense
  DType scale_dtype;
};

template <class U>
QMLP_HOST_DEVICE inline U load_aligned(const void* data, std::int64_t index) {
  U value;
  const void* at = static_cast<const char*>(data) + index * static_cast<std::int64_t>(sizeof(U));
  __builtin_memcpy(&value, __builtin_assume_aligned(at, sizeof(U)), sizeof(U));
  return value;
}
QMLP_HOST_DEVICE inline float load_value(const void* data, DType dtype, std::int64_t index) {
  if (dtype == DType::f32) return load_aligned<float>(data, index);
  const auto bits = load_aligned<std::uint16_t>(data, index);
  return dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
QMLP_HOST_DEVICE inline bool is_finite(float value) { return value - value == 0.0f; }
// Index of the group of element k of a row; group sizes are powers of two.
QMLP_HOST_DEVICE inline std::int64_t group_index(const SourceRows& source, std::int64_t row,
                                                 std::int64_t k) {
  const int shift = source.group_size == 32 ? 5 : source.group_size == 64 ? 6 : 7;
  return row * (source.K >> shift) + (k >> shift);
}

// ---- prescale ----

// Magnitudes, as bit patterns, of bf16 scales and biases: the largest finite scale, and the least
// of both that is not 0.
struct ScaleRange {
  std::uint32_t most = 0;
  std::uint32_t least = 0x7F80;
};
QMLP_HOST_DEVICE inline ScaleRange widened(ScaleRange range, std::uint16_t scale,
                                           std::uint16_t bias) {
  const std::uint32_t s = scale & 0x7FFFu, b = bias & 0x7FFFu;
  if (s < 0x7F80u && s > range.most) range.most = s;
  if (s != 0 && s < range.least) range.least = s;
  if (b != 0 && b < range.least) range.least = b;
  return range;
}

// The power of two that brings every bf16 scale below 2^-5 (decode.cuh), or kNoPrescale when
// weights might leave the normal range with it: a weight is a multiple of its scale's or its bias's
// last place, and those must be 2^-97 or more.
constexpr int kNoPrescale = 25;
QMLP_HOST_DEVICE constexpr int prescale_of(ScaleRange range) {
  constexpr std::uint32_t kLimit = 127 - 5, kLeast = (127 - 90) << 7;  // 2^-5's exponent, 2^-90
  const std::uint32_t exponent = range.most >> 7;
  if (exponent < kLimit) return 0;
  const int prescale = static_cast<int>(exponent - kLimit) + 1;
  return prescale >= kNoPrescale || range.least < kLeast ? kNoPrescale : prescale;
}

// ---- scales ----

// A bf16 times 2^first * 2^second where both steps are exact; infinities and NaNs stay as they are.
QMLP_HOST_DEVICE inline std::uint16_t times_powers(std::uint16_t bits, int first, int second) {
  if ((bits & 0x7F80u) == 0x7F80u) return bits;
  const auto power = [](int exponent) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(exponent + 127) << 23);
  };
  return f32_to_bf16(bf16_to_f32(bits) * power(first) * power(second));
}

// (scale, bias) as a scale set stores them: bf16 scales times 2^(133 - prescale), biases times
// 2^-prescale. Both are one to one: a scale is below 2^(prescale - 5), which leaves room above, and
// with a prescale no value is below 2^-90, so no bit is lost below.
struct ScaleAndBias {
  std::uint16_t scale, bias;
};
QMLP_HOST_DEVICE inline std::uint32_t stored_scales(ScaleAndBias of, DType activation,
                                                    int prescale) {
  if (activation == DType::bf16) {
    of.scale = times_powers(of.scale, 6 - prescale, 127);
    of.bias = times_powers(of.bias, -prescale, 0);
  }
  return of.scale | static_cast<std::uint32_t>(of.bias) << 16;
}
QMLP_HOST_DEVICE inline ScaleAndBias source_scales(std::uint32_t stored, DType activation,
                                                   int prescale) {
  ScaleAndBias of = {static_cast<std::uint16_t>(stored), static_cast<std::uint16_t>(stored >> 16)};
  if (activation == DType::bf16) {
    of.scale = times_powers(of.scale, -126, prescale - 7);
    of.bias = times_powers(of.bias, prescale, 0);
  }
  return of;
}

// Word g of the scale set that begins at k: 0 beyond the matrix.
QMLP_HOST_DEVICE inline std::uint32_t scale_word(const SourceRows& source, std::int64_t row,
                                                 std::int64_t k, DType activation, int prescale) {
  if (row >= source.rows || k >= source.K) return 0;
  const std::int64_t group = group_index(source, row, k);
  return stored_scales({load_aligned<std::uint16_t>(source.scales, group),
                        load_aligned<std::uint16_t>(source.biases, group)},
                       activation, prescale);
}

// ---- codes ----

// Pair i of lane (g, t) is codes 2t and 2t + 1 of run i of row g: runs are of 8 codes.
static_assert(pair_k(0, 5, 1) == 41 && pair_k(3, 0, 0) == 6 && pair_k(31, 7, 1) == 63);

// Run i of a row's chunk (and above it what follows), from the chunk's 2 * bits words.
QMLP_HOST_DEVICE inline std::uint64_t run_of_words(const std::uint32_t* words, int bits, int i) {
  const int word = i * bits / 4, shift = i * bits % 4 * 8;
  std::uint64_t run = words[word] >> shift;
  if (shift + 8 * bits > 32) run |= static_cast<std::uint64_t>(words[word + 1]) << (32 - shift);
  return run;
}

// A lane's words, main ones first; the two bytes of a short rest lie in the last one's low half.
struct LaneWords {
  std::uint32_t of[4];
};
QMLP_HOST_DEVICE inline LaneWords lane_words(const std::uint32_t* row_words, int bits, int t) {
  LaneWords lane = {};
  QMLP_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    const auto pair =
        static_cast<std::uint32_t>(run_of_words(row_words, bits, i) >> (2 * t * bits));
    QMLP_UNROLL
    for (int f = 0; f < kCodeFields; ++f) {
      const CodeField field = code_field(bits, i, f);
      if (field.bits == 0) continue;
      const bool short_rest = field.word == main_words(bits) && rest_bits(bits) == 1;
      QMLP_UNROLL
      for (int e = 0; e < 2; ++e) {
        const std::uint32_t part = pair >> (e * bits + field.from) & ((1u << field.bits) - 1);
        lane.of[field.word] |= part << (field.bit + e * (short_rest ? 8 : 16));
      }
    }
  }
  return lane;
}

template <int kBytes>
QMLP_HOST_DEVICE inline void store_aligned(std::uint8_t* to, const void* from) {
  __builtin_memcpy(__builtin_assume_aligned(to, kBytes), from, kBytes);
}
QMLP_HOST_DEVICE inline void store_lane(std::uint8_t* codes, int bits, int lane,
                                        const LaneWords& words) {
  const int mains = main_words(bits), rest = rest_bits(bits);
  if (mains == 4) store_aligned<16>(codes + lane * 16, words.of);
  if (mains == 2) store_aligned<8>(codes + lane * 8, words.of);
  if (mains == 1) store_aligned<4>(codes + lane * 4, words.of);
  std::uint8_t* rests = codes + rest_offset(bits);
  if (rest == 2) store_aligned<4>(rests + lane * 4, words.of + mains);
  if (rest == 1) store_aligned<2>(rests + lane * 2, words.of + mains);
}

// Codes 8i .. 8i + 7 of row g of a half's chunk, in file order.
QMLP_HOST_DEVICE inline std::uint64_t source_run(const std::uint8_t* codes, int bits, int g,
                                                 int i) {
  std::uint64_t run = 0;
  for (int j = 0; j < 8; ++j) {
    const int lane = 4 * g + j / 2, e = j % 2;
    std::uint32_t code = 0;
    for (int f = 0; f < kCodeFields; ++f) {
      const CodeField field = code_field(bits, i, f);
      if (field.bits == 0) continue;
      const WordHalf half = word_half(bits, lane, field.word, e);
      std::uint32_t word = codes[half.byte];
      if (half.bytes == 2) word |= static_cast<std::uint32_t>(codes[half.byte + 1]) << 8;
      code |= (word >> field.bit & ((1u << field.bits) - 1)) << field.from;
    }
    run |= static_cast<std::uint64_t>(code) << (j * bits);
  }
  return run;
}

// ---- decoded weights ----

// Elements k and k + 1 of a row as the activation type has them, 0 beyond the matrix.
QMLP_HOST_DEVICE inline std::uint16_t decoded_element(const SourceRows& source, std::int64_t row,
                                                      std::int64_t k, DType activation) {
  if (row >= source.rows || k >= source.K) return 0;
  float value;
  if (source.group_size == 0) {
    const std::int64_t at = row * source.K + k;
    if (source.scale_dtype == activation) return load_aligned<std::uint16_t>(source.codes, at);
    value = load_value(source.codes, source.scale_dtype, at);
  } else {
    const std::int64_t group = group_index(source, row, k);
    const std::byte* codes = source.codes + row * packed_row_bytes(source.K, source.bits);
    value = exact_weight(load_value(source.scales, source.scale_dtype, group),
                         extract_code(codes, source.bits, k),
                         load_value(source.biases, source.scale_dtype, group), activation);
  }
  return activation == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
}
QMLP_HOST_DEVICE inline bool is_finite_element(std::uint16_t bits, DType activation) {
  const int infinity = activation == DType::bf16 ? 0x7F80 : 0x7C00;
  return (bits & 0x7FFF) < infinity;
}

// Whether every weight of the group at k is finite, the codes themselves looked at last.
QMLP_HOST_DEVICE inline bool is_finite_group(const SourceRows& source, std::int64_t row,
                                             std::int64_t k, DType activation) {
  if (row >= source.rows || k >= source.K) return true;
  const std::int64_t group = group_index(source, row, k);
  const float scale = load_value(source.scales, source.scale_dtype, group);
  const float bias = load_value(source.biases, source.scale_dtype, group);
  const float magnitude = (scale < 0.0f ? -scale : scale) * 256.0f + (bias < 0.0f ? -bias : bias);
  if (magnitude < 60000.0f) return true;  // in f16 too; a NaN is not less
  const int max_code = (1 << source.bits) - 1;
  if (is_finite(exact_weight(scale, 0, bias, activation)) &&
      is_finite(exact_weight(scale, max_code, bias, activation))) {
    return true;
  }
  const std::int64_t begin = k & -std::int64_t{source.group_size};
  for (std::int64_t i = begin; i < begin + source.group_size; ++i) {
    if (!is_finite_element(decoded_element(source, row, i, activation), activation)) return false;
  }
  return true;
}

// Element k of row g of a half's chunk, decoded from the tile. `bits` and `group_size` are the
// half's.
QMLP_HOST_DEVICE inline std::uint16_t tile_element(const HalfChunk& chunk, const HalfFormat& format,
                                                   int g, int k, DType activation, int prescale) {
  const int i = k / 8, lane = 4 * g + k % 8 / 2, e = k % 2;
  if (format.bits == kDenseBits) {
    return load_aligned<std::uint16_t>(chunk.codes, lane * 16 + i * 2 + e);
  }
  const auto code =
      static_cast<int>(source_run(chunk.codes, format.bits, g, i) >> (k % 8 * format.bits)) &
      ((1 << format.bits) - 1);
  const int set = k / format.group_size;
  const ScaleAndBias of = source_scales(
      load_aligned<std::uint32_t>(chunk.scales + set * kScaleSetBytes, g), activation, prescale);
  const auto widen = [&](std::uint16_t bits) {
    return activation == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
  };
  const float value = exact_weight(widen(of.scale), code, widen(of.bias), activation);
  return activation == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
}

}  // namespace qmlp::cuda
