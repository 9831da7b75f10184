// The maths that GPUs pack with, run on a CPU: the bytes of the reference packer, and back again.
#include "cuda/device/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/host/weights.h"
#include "cuda/host_tiles.h"
#include "quant/exact.h"

namespace qmlp::cuda {
namespace {

using test::describe;
using test::HostTiles;
using test::kGroups;
using test::kWidths;
using test::make_weight;
using test::Range;
using test::Weight;

SourceRows rows_of(const QuantizedTensorView& w) {
  return {w.codes.data(), w.scales.data(),   w.biases.data(),   w.N, w.K,
          w.spec.bits,    w.spec.group_size, w.spec.scale_dtype};
}

ScaleRange range_of(const QuantizedTensorView& w) {
  ScaleRange range;
  for (std::size_t i = 0; i < w.scales.size() / 2; ++i) {
    const auto at = static_cast<std::int64_t>(i);
    range = widened(range, load_aligned<std::uint16_t>(w.scales.data(), at),
                    load_aligned<std::uint16_t>(w.biases.data(), at));
  }
  return range;
}

TileLayout layout_of(const std::vector<QuantizedTensorView>& weights, DType type) {
  HalfChoice choices[2];
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const ScaleRange range =
        needs_scale_range(weights[i].spec, type) ? range_of(weights[i]) : ScaleRange{};
    choices[i] = choose_half(weights[i].spec, type, range);
  }
  return *lay_out_tiles(weights[0].N, weights[0].K, choices, weights.size() == 2, type);
}

// What pack_kernel of kernels/pack.cu does, lane by lane.
std::vector<std::uint8_t> pack_as_gpus(const std::vector<QuantizedTensorView>& weights,
                                       const TileLayout& layout, bool* non_finite) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(layout.bytes()), 0xA5);
  const std::int64_t blocks = layout.num_tiles * (layout.is_swiglu ? 1 : 2);
  for (std::size_t part = 0; part < weights.size(); ++part) {
    const SourceRows source = rows_of(weights[part]);
    for (std::int64_t block = 0; block < blocks; ++block) {
      for (std::int64_t c = 0; c < layout.num_chunks; ++c) {
        const int half = half_of(layout, static_cast<int>(part), block);
        const HalfFormat& format = layout.format.half[half];
        const HalfChunk to = half_chunk(layout, bytes.data(), static_cast<int>(part), block, c);
        for (int lane = 0; lane < 32; ++lane) {
          const std::int64_t row = block * kHalfRows + lane / 4;
          if (format.bits == kDenseBits) {
            std::uint16_t own[16];
            for (int j = 0; j < 16; ++j) {
              own[j] = decoded_element(source, row, c * kChunkK + pair_k(lane, j / 2, j % 2),
                                       layout.activation);
              *non_finite |= !is_finite_element(own[j], layout.activation);
            }
            std::memcpy(to.codes + lane * 32, own, 32);
            continue;
          }
          std::uint32_t words[16] = {};
          const std::int64_t left = std::min<std::int64_t>(source.K - c * kChunkK, kChunkK);
          if (row < source.rows) {
            std::memcpy(
                words,
                source.codes + row * packed_row_bytes(source.K, format.bits) + c * 8 * format.bits,
                static_cast<std::size_t>(left / 8 * format.bits));
          }
          store_lane(to.codes, format.bits, lane, lane_words(words, format.bits, lane % 4));
        }
        for (int i = 0; i < format.scale_sets() * kHalfRows; ++i) {
          const std::int64_t row = block * kHalfRows + i % kHalfRows;
          const std::int64_t k = c * kChunkK + i / kHalfRows * format.group_size;
          const std::uint32_t word =
              scale_word(source, row, k, layout.activation, layout.prescale[half]);
          std::memcpy(to.scales + 4 * i, &word, 4);
          *non_finite |= !is_finite_group(source, row, k, layout.activation);
        }
      }
    }
  }
  return bytes;
}

bool same_number(std::uint16_t a, std::uint16_t b, DType type) {
  const int infinity = type == DType::bf16 ? 0x7F80 : 0x7C00;
  const bool a_nan = (a & 0x7FFF) > infinity, b_nan = (b & 0x7FFF) > infinity;
  return a_nan || b_nan ? a_nan && b_nan : a == b;
}

// Packs as GPUs do, against the reference; then every element, code, scale and bias back.
void check(const std::vector<QuantizedTensorView>& weights, DType type) {
  HostTiles reference = test::pack_tiles(weights.data(), static_cast<int>(weights.size()), type);
  const TileLayout layout = layout_of(weights, type);
  for (int h = 0; h < 2; ++h) {
    ASSERT_EQ(layout.format.half[h].bits, reference.layout.format.half[h].bits);
    ASSERT_EQ(std::ldexp(1.0f, layout.prescale[h]), reference.unscale[h]);
  }
  ASSERT_EQ(layout.tile_bytes, reference.layout.tile_bytes);
  bool non_finite = false, expect_non_finite = false;
  std::vector<std::uint8_t> bytes = pack_as_gpus(weights, layout, &non_finite);
  ASSERT_TRUE(bytes == reference.bytes) << describe(weights[0]);

  for (std::size_t part = 0; part < weights.size(); ++part) {
    const QuantizedTensorView& w = weights[part];
    for (std::int64_t row = 0; row < w.N; ++row) {
      const std::int64_t block = row / kHalfRows;
      const int g = static_cast<int>(row % kHalfRows);
      const int half = half_of(layout, static_cast<int>(part), block);
      const HalfFormat& format = layout.format.half[half];
      for (std::int64_t k = 0; k < w.K; ++k) {
        const HalfChunk chunk =
            half_chunk(layout, bytes.data(), static_cast<int>(part), block, k / kChunkK);
        const int in_chunk = static_cast<int>(k % kChunkK);
        const std::uint16_t got =
            tile_element(chunk, format, g, in_chunk, type, layout.prescale[half]);
        const float exact = exact_element(w, row, k, type);
        const std::uint16_t want = type == DType::bf16 ? f32_to_bf16(exact) : f32_to_f16(exact);
        ASSERT_TRUE(same_number(got, want, type))
            << describe(w) << ", row " << row << ", k " << k << ": " << got << ", not " << want;
        expect_non_finite |= !is_finite_element(want, type);
        if (format.bits == kDenseBits) continue;
        if (k % 8 == 0) {
          const std::uint64_t run = source_run(chunk.codes, format.bits, g, in_chunk / 8);
          ASSERT_EQ(std::memcmp(&run,
                                w.codes.data() + row * packed_row_bytes(w.K, format.bits) +
                                    k / 8 * format.bits,
                                static_cast<std::size_t>(format.bits)),
                    0)
              << describe(w) << ", row " << row << ", k " << k;
        }
        if (k % w.spec.group_size == 0) {
          const std::int64_t group = row * (w.K / w.spec.group_size) + k / w.spec.group_size;
          const int set = in_chunk / format.group_size;
          const ScaleAndBias of =
              source_scales(load_aligned<std::uint32_t>(chunk.scales + set * kScaleSetBytes, g),
                            type, layout.prescale[half]);
          ASSERT_EQ(of.scale, load_aligned<std::uint16_t>(w.scales.data(), group));
          ASSERT_EQ(of.bias, load_aligned<std::uint16_t>(w.biases.data(), group));
        }
      }
    }
  }
  EXPECT_EQ(non_finite, expect_non_finite) << describe(weights[0]);
}

class Packing : public ::testing::TestWithParam<DType> {};

TEST_P(Packing, EveryFormat) {
  const DType type = GetParam();
  std::uint64_t seed = 20000;
  for (const int bits : kWidths) {
    for (const int group : kGroups) {
      for (const std::int64_t N : {1, 9, 16, 35}) {
        for (const Range range : {Range::usual, Range::wide, Range::prescale, Range::huge}) {
          const Weight w = make_weight(++seed, N, 3 * group, {bits, group, type}, range);
          check({w.view}, type);
        }
      }
      for (const int up_bits : kWidths) {
        for (const int up_group : kGroups) {
          const std::int64_t K = std::max({group, up_group, 96});
          if (K % group != 0 || K % up_group != 0) continue;
          const Weight gate = make_weight(++seed, 11, K, {bits, group, type}, Range::prescale);
          const Weight up = make_weight(++seed, 11, K, {up_bits, up_group, type}, Range::wide);
          check({gate.view, up.view}, type);
        }
      }
    }
  }
}

TEST_P(Packing, DecodedHalves) {
  const DType type = GetParam();
  std::uint64_t seed = 30000;
  for (const DType stored : {DType::bf16, DType::f16, DType::f32}) {
    const QuantSpec dense = QuantSpec::dense(stored);
    for (const std::int64_t K : {1, 7, 50, 64, 95, 192}) {
      const Weight w = make_weight(++seed, 19, K, dense, Range::usual);
      check({w.view}, type);
      check({w.view, w.view}, type);
    }
    for (const int bits : kWidths) {
      for (const int group : kGroups) {
        const Weight plain = make_weight(++seed, 13, 3 * group, dense, Range::usual);
        const Weight own = make_weight(++seed, 13, 3 * group, {bits, group, type}, Range::usual);
        check({own.view, plain.view}, type);
        const Weight other = make_weight(++seed, 13, 3 * group, {bits, group, stored}, Range::wide);
        check({other.view}, type);
        check({other.view, own.view}, type);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Packing, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& of) { return std::string(to_string(of.param)); });

// Every bf16 that a prescale allows comes back bit for bit: zeros of both signs, subnormals,
// infinities, NaNs of any payload.
TEST(StoredScales, AreOneToOne) {
  for (int prescale = 0; prescale < kNoPrescale; ++prescale) {
    int scales = 0, biases = 0;
    for (int bits = 0; bits < 0x10000; ++bits) {
      const auto value = static_cast<std::uint16_t>(bits);
      const int magnitude = bits & 0x7FFF;
      const bool finite = magnitude < 0x7F80;
      const bool large_enough = prescale == 0 || magnitude == 0 || magnitude >= (127 - 90) << 7;
      if (!large_enough) continue;
      const bool is_scale = !finite || magnitude < (127 - 5 + prescale) << 7;
      const std::uint32_t stored =
          stored_scales({is_scale ? value : std::uint16_t{0}, value}, DType::bf16, prescale);
      const ScaleAndBias back = source_scales(stored, DType::bf16, prescale);
      if (is_scale) {
        ASSERT_EQ(back.scale, value) << "prescale " << prescale;
        const auto kept = static_cast<std::uint16_t>(stored);
        // A finite scale stays finite: its product with a code is what counts.
        ASSERT_EQ((kept & 0x7FFF) < 0x7F80, finite) << value << ", prescale " << prescale;
        ++scales;
      }
      ASSERT_EQ(back.bias, value) << "prescale " << prescale;
      ++biases;
    }
    EXPECT_GT(scales, 20000);
    EXPECT_GT(biases, 40000);
  }
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto value = static_cast<std::uint16_t>(bits);
    const ScaleAndBias back =
        source_scales(stored_scales({value, value}, DType::f16, 0), DType::f16, 0);
    ASSERT_EQ(back.scale, value);
    ASSERT_EQ(back.bias, value);
  }
}

// The least power of two that brings the largest finite scale below 2^-5.
TEST(Prescale, OfEveryMagnitude) {
  for (std::uint32_t most = 0; most < 0x7F80; ++most) {
    const float value = bf16_to_f32(static_cast<std::uint16_t>(most));
    int want = 0;
    while (std::ldexp(value, -want) >= 0x1p-5f) ++want;
    EXPECT_EQ(prescale_of({most, 0x3F80}), std::min(want, kNoPrescale)) << value;
    const auto tiny = static_cast<std::uint32_t>((127 - 90) << 7) - 1;
    EXPECT_EQ(prescale_of({most, tiny}), want == 0 ? 0 : kNoPrescale) << value;
  }
}

TEST(LayOut, SizesThatOverflowAreRefused) {
  const HalfChoice choice = {8, 64, 0};
  const std::int64_t huge = std::int64_t{1} << 40;
  const auto layout = lay_out_tiles(huge, huge, &choice, false, DType::bf16);
  ASSERT_FALSE(layout);
  EXPECT_EQ(layout.error().code, Errc::out_of_memory);
}

}  // namespace
}  // namespace qmlp::cuda
