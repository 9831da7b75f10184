// Weights packed for the CUDA kernels and decoded again by the kernels' own functions, compiled for
// the CPU: every element is the exactly rounded weight, and zero beyond the matrix.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/float16.h"
#include "cuda/device/decode.cuh"
#include "cuda/host/weights.h"
#include "cuda/host_tiles.h"
#include "cuda/kernels/formats.cuh"

namespace qmlp::cuda {
namespace {

using test::describe;
using test::HostTiles;
using test::kGroups;
using test::kWidths;
using test::make_weight;
using test::Random;
using test::Range;
using test::Weight;

float widen(DType type, std::uint16_t bits) {
  return type == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
std::uint16_t narrow(DType type, float value) {
  return type == DType::bf16 ? f32_to_bf16(value) : f32_to_f16(value);
}

// ---- the CPU's multiply-add against integers ----

struct Float16Format {
  DType type;
  int significand_bits, lowest_quantum, highest_exponent;
};
constexpr Float16Format kBf16Format = {DType::bf16, 8, -133, 127};
constexpr Float16Format kF16Format = {DType::f16, 11, -24, 15};

// value = (-1)^negative * significand * 2^exponent of a finite pattern.
struct Parts {
  bool negative;
  std::int64_t significand;
  int exponent;
};
Parts parts_of(const Float16Format& f, std::uint16_t bits) {
  const int stored_bits = f.significand_bits - 1;
  const int exponent = (bits & 0x7FFF) >> stored_bits;
  const int fraction = bits & ((1 << stored_bits) - 1);
  return {(bits & 0x8000) != 0, exponent == 0 ? fraction : fraction | 1 << stored_bits,
          f.lowest_quantum + std::max(exponent, 1) - 1};
}

// a * b + c with integers alone. Where one term is far below the other it is kept as one unit of a
// place that rounding cannot tell from the truth.
std::uint16_t integer_fma(const Float16Format& f, std::uint16_t a, std::uint16_t b,
                          std::uint16_t c) {
  const Parts x = parts_of(f, a), y = parts_of(f, b), z = parts_of(f, c);
  const bool product_negative = x.negative != y.negative;
  __int128 product = static_cast<__int128>(x.significand) * y.significand;
  __int128 addend = z.significand;
  int product_exponent = x.exponent + y.exponent, addend_exponent = z.exponent;
  if (product == 0) product_exponent = addend_exponent;
  if (addend == 0) addend_exponent = product_exponent;
  constexpr int kFar = 64;
  const auto align = [](__int128& high, int& high_exponent, __int128& low, int& low_exponent) {
    if (high_exponent - low_exponent > kFar) {
      low = 1;
      low_exponent = high_exponent - kFar;
    }
    high <<= high_exponent - low_exponent;
    high_exponent = low_exponent;
  };
  if (product_exponent >= addend_exponent) {
    align(product, product_exponent, addend, addend_exponent);
  } else {
    align(addend, addend_exponent, product, product_exponent);
  }
  const __int128 sum = (product_negative ? -product : product) + (z.negative ? -addend : addend);
  if (sum == 0) return product_negative && z.negative ? 0x8000 : 0;
  const bool negative = sum < 0;
  __int128 rest = negative ? -sum : sum;
  int exponent = product_exponent, length = 0;
  while (rest >> length != 0) ++length;
  const int quantum = std::max(exponent + length - f.significand_bits, f.lowest_quantum);
  if (const int drop = quantum - exponent; drop > 0) {
    const __int128 kept = drop > 120 ? 0 : rest >> drop;
    const __int128 lost = rest - (drop > 120 ? 0 : kept << drop);
    const __int128 half = drop > 120 ? 0 : static_cast<__int128>(1) << (drop - 1);
    const bool up = drop <= 120 && (lost > half || (lost == half && (kept & 1) != 0));
    rest = kept + (up ? 1 : 0);
    exponent = quantum;
  }
  const double magnitude = std::ldexp(static_cast<double>(rest), exponent);
  std::uint16_t bits;
  if (magnitude >= std::ldexp(1.0, f.highest_exponent + 1)) {
    bits = f.type == DType::bf16 ? 0x7F80 : 0x7C00;
  } else {
    bits = narrow(f.type, static_cast<float>(magnitude));  // exact
  }
  return static_cast<std::uint16_t>(bits | (negative ? 0x8000 : 0));
}

std::uint16_t cpu_fma(DType type, std::uint16_t a, std::uint16_t b, std::uint16_t c) {
  return type == DType::bf16 ? on_host::fma<true>(a, b, c) : on_host::fma<false>(a, b, c);
}

bool is_finite(DType type, std::uint16_t bits) {
  const int infinity = type == DType::bf16 ? 0x7F80 : 0x7C00;
  return (bits & 0x7FFF) < infinity;
}

TEST(OnHost, MultiplyAddRoundsOnce) {
  Random random(71);
  for (const Float16Format& f : {kBf16Format, kF16Format}) {
    for (int trial = 0; trial < 300000; ++trial) {
      auto a = static_cast<std::uint16_t>(random.bits());
      const auto b = static_cast<std::uint16_t>(random.bits());
      auto c = static_cast<std::uint16_t>(random.bits());
      if (trial % 3 == 1) {  // a code times a scale
        a = static_cast<std::uint16_t>(random.below(256));
        if (f.type == DType::f16) a = narrow(f.type, static_cast<float>(a));
      }
      if (trial % 2 == 1 && is_finite(f.type, a) && is_finite(f.type, b)) {
        // An addend near the product's size, so that sums cancel and halves are met.
        c = narrow(f.type, widen(f.type, a) * widen(f.type, b));
        c = static_cast<std::uint16_t>((c ^ (random.bits() & 0x8000)) + random.bits() % 7 - 3);
      }
      if (!is_finite(f.type, a) || !is_finite(f.type, b) || !is_finite(f.type, c)) continue;
      ASSERT_EQ(cpu_fma(f.type, a, b, c), integer_fma(f, a, b, c))
          << to_string(f.type) << std::hex << " " << a << " " << b << " " << c;
    }
  }
}

TEST(OnHost, MultiplyAddOfSpecialValues) {
  constexpr std::uint16_t kInf = 0x7F80, kMinusInf = 0xFF80, kNan = 0x7FC1, kOne = 0x3F80;
  EXPECT_EQ(cpu_fma(DType::bf16, 0, kInf, kOne), 0x7FFF);
  EXPECT_EQ(cpu_fma(DType::bf16, kOne, kInf, kMinusInf), 0x7FFF);
  EXPECT_EQ(cpu_fma(DType::bf16, kOne, kOne, kNan), 0x7FFF);
  EXPECT_EQ(cpu_fma(DType::bf16, kOne, kInf, kOne), kInf);
  EXPECT_EQ(cpu_fma(DType::bf16, kOne, kOne, kMinusInf), kMinusInf);
  EXPECT_EQ(cpu_fma(DType::f16, 0, 0x7C00, 0), 0x7FFF);
  EXPECT_EQ(cpu_fma(DType::f16, 0x7BFF, 0x7BFF, 0), 0x7C00);
}

TEST(OnHost, BytePermutation) {
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x3210u), 0x33221100u);
  EXPECT_EQ(__byte_perm(0x33221100u, 0x77665544u, 0x7654u), 0x77665544u);
  EXPECT_EQ(__byte_perm(0x33221100u, 0u, 0x1010u), 0x11001100u);
  EXPECT_EQ(__byte_perm(0xBEEFu, 0u, 0x4140u), 0x00BE00EFu);
}

// ---- weights ----

// Counts a tile stream's elements that are not what they should be, naming the first.
template <class T, int kBits, int kGroup>
int check_chunk(const HostTiles& tiles, const QuantizedTensorView* weights, int num_weights,
                DType type, std::int64_t tile, std::int64_t c) {
  const bool swiglu = num_weights == 2;
  const std::uint8_t* chunk =
      tiles.bytes.data() + tile * tiles.layout.tile_bytes + c * tiles.layout.format.chunk_bytes();
  const MixedShape shape = mixed_shape(tiles.layout.format);
  EXPECT_EQ((chunk_bytes<kBits, kGroup>(kBits == 0 ? shape : MixedShape{})),
            static_cast<std::uint32_t>(tiles.layout.format.chunk_bytes()));
  int wrong = 0;
  for (int lane = 0; lane < 32; ++lane) {
    RawChunk<T, kBits, kGroup> raw{};
    raw.load(shape, chunk, lane);
    std::uint32_t a[2][4][2];
    raw.template decode<0>(a, 0);
    raw.template decode<1>(a, 1);
    raw.template decode<2>(a, 2);
    raw.template decode<3>(a, 3);
    for (int h = 0; h < 2; ++h) {
      const QuantizedTensorView& w = weights[swiglu ? h : 0];
      const std::int64_t row =
          (swiglu ? tile * kHalfRows : tile * kTileRows + h * std::int64_t{kHalfRows}) + lane / 4;
      for (int element = 0; element < 16; ++element) {
        const int step = element / 4, register_index = element / 2 % 2, e = element % 2;
        const std::int64_t k = c * kChunkK + step * 16 + register_index * 8 + lane % 4 * 2 + e;
        const auto bits = static_cast<std::uint16_t>(a[h][step][register_index] >> (16 * e));
        const float got = widen(type, bits) * tiles.unscale[h];
        const bool exists = row < w.N && k < w.K;
        const float want = exists ? exact_element(w, row, k, type) : 0.0f;
        const bool same = std::isnan(want) ? std::isnan(got)
                                           : std::bit_cast<std::uint32_t>(got) ==
                                                 std::bit_cast<std::uint32_t>(want);
        if (same) continue;
        if (wrong == 0) {
          ADD_FAILURE() << describe(w) << ", half " << h << ", row " << row << ", k " << k << ": "
                        << got << ", the weight is " << want;
        }
        ++wrong;
      }
    }
  }
  return wrong;
}

template <class T>
void check_tiles(const HostTiles& tiles, const QuantizedTensorView* weights, int num_weights,
                 DType type) {
  const std::int64_t N = weights[0].N, rows = num_weights == 2 ? kHalfRows : kTileRows;
  ASSERT_EQ(tiles.layout.num_tiles, (N + rows - 1) / rows);
  ASSERT_EQ(tiles.layout.num_chunks, (weights[0].K + kChunkK - 1) / kChunkK);
  ASSERT_EQ(tiles.layout.tile_bytes, tiles.layout.num_chunks * tiles.layout.format.chunk_bytes());
  ASSERT_EQ(static_cast<std::int64_t>(tiles.bytes.size()),
            tiles.layout.num_tiles * tiles.layout.tile_bytes);
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(tiles.bytes.data()) % 16, 0u);
  const int wrong = with_format(tiles.layout.format, [&]<int kBits, int kGroup>() {
    int count = 0;
    for (std::int64_t tile = 0; tile < tiles.layout.num_tiles; ++tile) {
      for (std::int64_t c = 0; c < tiles.layout.num_chunks; ++c) {
        count += check_chunk<T, kBits, kGroup>(tiles, weights, num_weights, type, tile, c);
      }
    }
    return count;
  });
  EXPECT_EQ(wrong, 0) << "elements of " << describe(weights[0]);
}

// Packs, decodes and compares; the format that was packed.
HostTiles round_trip(const std::vector<QuantizedTensorView>& weights, DType type) {
  HostTiles tiles = test::pack_tiles(weights.data(), static_cast<int>(weights.size()), type);
  if (type == DType::bf16) {
    check_tiles<Bf16>(tiles, weights.data(), static_cast<int>(weights.size()), type);
  } else {
    check_tiles<F16>(tiles, weights.data(), static_cast<int>(weights.size()), type);
  }
  return tiles;
}

class PackTiles : public ::testing::TestWithParam<DType> {};

TEST_P(PackTiles, LinearOfEveryFormat) {
  const DType type = GetParam();
  std::uint64_t seed = 1;
  for (const int bits : kWidths) {
    for (const int group : kGroups) {
      for (const std::int64_t N : {1, 7, 16, 37}) {
        for (const std::int64_t groups : {1, 3, 4}) {
          for (const Range range : {Range::usual, Range::wide}) {
            const Weight w = make_weight(++seed, N, groups * group, {bits, group, type}, range);
            const HostTiles tiles = round_trip({w.view}, type);
            for (int h = 0; h < 2; ++h) {
              EXPECT_EQ(tiles.layout.format.half[h].bits, bits);
              EXPECT_EQ(tiles.layout.format.half[h].group_size, std::min(group, kChunkK));
              EXPECT_EQ(tiles.unscale[h], 1.0f);
            }
          }
        }
      }
    }
  }
}

TEST_P(PackTiles, SwigluOfEveryPairOfFormats) {
  const DType type = GetParam();
  std::uint64_t seed = 1000;
  for (const int gate_bits : kWidths) {
    for (const int gate_group : kGroups) {
      for (const int up_bits : kWidths) {
        for (const int up_group : kGroups) {
          const int group = std::max(gate_group, up_group);
          const std::int64_t K = group == 32 ? 96 : group == 64 ? 192 : 128;
          const Weight gate =
              make_weight(++seed, 11, K, {gate_bits, gate_group, type}, Range::usual);
          const Weight up = make_weight(++seed, 11, K, {up_bits, up_group, type}, Range::wide);
          const HostTiles tiles = round_trip({gate.view, up.view}, type);
          EXPECT_EQ(tiles.layout.format.half[0].bits, gate_bits);
          EXPECT_EQ(tiles.layout.format.half[1].bits, up_bits);
          EXPECT_EQ(tiles.layout.format.half[0].group_size,
                    std::min({gate_group, up_group, kChunkK}));
        }
      }
    }
  }
}

// Codes beside decoded weights, whose group is the other half's.
TEST_P(PackTiles, DenseHalves) {
  const DType type = GetParam();
  std::uint64_t seed = 5000;
  for (const DType stored : {DType::bf16, DType::f16, DType::f32}) {
    const QuantSpec dense{stored == DType::f32 ? 32 : 16, 0, stored};
    for (const std::int64_t K : {1, 50, 64, 95, 200}) {
      const Weight w = make_weight(++seed, 19, K, dense, Range::usual);
      const HostTiles tiles = round_trip({w.view}, type);
      EXPECT_EQ(tiles.layout.format.half[0].bits, kDenseBits);
      round_trip({w.view, w.view}, type);
    }
    for (const int bits : kWidths) {
      for (const int group : kGroups) {
        const std::int64_t K = 3 * group;
        const Weight coded = make_weight(++seed, 13, K, {bits, group, type}, Range::usual);
        const Weight plain = make_weight(++seed, 13, K, dense, Range::usual);
        const HostTiles first = round_trip({coded.view, plain.view}, type);
        EXPECT_EQ(first.layout.format.half[0].bits, bits);
        EXPECT_EQ(first.layout.format.half[1].bits, kDenseBits);
        EXPECT_EQ(first.layout.format.half[1].group_size, first.layout.format.half[0].group_size);
        round_trip({plain.view, coded.view}, type);
      }
    }
  }
}

TEST_P(PackTiles, ScalesOfAnotherTypeAreDecodedExactly) {
  const DType type = GetParam();
  std::uint64_t seed = 7000;
  for (const DType scales : {DType::bf16, DType::f16, DType::f32}) {
    if (scales == type) continue;
    for (const int bits : kWidths) {
      for (const int group : kGroups) {
        for (const Range range : {Range::usual, Range::wide}) {
          const Weight w = make_weight(++seed, 17, 3 * group, {bits, group, scales}, range);
          EXPECT_EQ(round_trip({w.view}, type).layout.format.half[0].bits, kDenseBits);
          const Weight own = make_weight(++seed, 17, 3 * group, {4, group, type}, Range::usual);
          EXPECT_EQ(round_trip({own.view, w.view}, type).layout.format.half[0].bits, 4);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, PackTiles, ::testing::Values(DType::bf16, DType::f16),
                         [](const auto& of) { return std::string(to_string(of.param)); });

// A power of two of the whole half keeps bf16 scales below 2^-5; each half has its own.
TEST(Prescale, KeepsWeightsExact) {
  std::uint64_t seed = 9000;
  for (const int bits : kWidths) {
    for (const int group : kGroups) {
      const QuantSpec spec{bits, group, DType::bf16};
      const Weight large = make_weight(++seed, 21, 3 * group, spec, Range::prescale);
      const Weight usual = make_weight(++seed, 21, 3 * group, spec, Range::usual);
      const HostTiles one = round_trip({large.view}, DType::bf16);
      EXPECT_EQ(one.layout.format.half[0].bits, bits);
      EXPECT_GT(one.unscale[0], 1.0f);
      EXPECT_EQ(one.unscale[0], one.unscale[1]);
      const HostTiles two = round_trip({usual.view, large.view}, DType::bf16);
      EXPECT_EQ(two.layout.format.half[1].bits, bits);
      EXPECT_EQ(two.unscale[0], 1.0f);
      EXPECT_GT(two.unscale[1], 1.0f);
      const Weight huge = make_weight(++seed, 21, 3 * group, spec, Range::huge);
      const HostTiles three = round_trip({huge.view, usual.view}, DType::bf16);
      EXPECT_EQ(three.layout.format.half[0].bits, kDenseBits);
      EXPECT_EQ(three.layout.format.half[1].bits, bits);
      EXPECT_EQ(three.unscale[0], 1.0f);
    }
  }
}

// One large scale must not cost another group its small bits.
TEST(Prescale, TinyWeightsBesideALargeScale) {
  for (const float tiny : {0x1p-133f, 0x1.02p-126f, -0x1.FEp-120f, 0x1.54p-110f}) {
    for (const float large : {0x1p-5f, 0x1p0f, 0x1p18f}) {
      Weight w = make_weight(77, 8, 64, {8, 32, DType::bf16}, Range::usual);
      for (int i = 0; i < 16; ++i) {
        store_float(w.scales.data(), DType::bf16, i, i == 5 ? large : tiny);
        store_float(w.biases.data(), DType::bf16, i, i % 3 == 0 ? 0.0f : tiny * 3);
      }
      round_trip({w.view}, DType::bf16);
    }
  }
}

}  // namespace
}  // namespace qmlp::cuda
