// Positions of the packed weight against the definitions they come from, bit by bit.
#include "cuda/layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace qmlp::cuda {
namespace {

constexpr int kWidths[] = {2, 3, 4, 5, 6, 8};
constexpr int kFormatWidths[] = {2, 3, 4, 5, 6, 8, kDenseBits};
constexpr int kGroups[] = {32, 64};

// Every bit of a half's codes belongs to one bit of one code: none is shared, none is left over.
TEST(CodeFields, AreABijectionToTheBitsOfAHalf) {
  for (const int bits : kWidths) {
    const int total = HalfFormat{bits, 64}.code_bytes() * 8;
    EXPECT_EQ(total, kHalfRows * kChunkK * bits);
    std::vector<int> owners(static_cast<std::size_t>(total), 0);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < kPairs; ++i) {
        for (int e = 0; e < 2; ++e) {
          unsigned of_code = 0;  // its bits that have been seen
          for (int f = 0; f < kCodeFields; ++f) {
            const CodeField field = code_field(bits, i, f);
            if (field.bits == 0) continue;
            const WordHalf half = word_half(bits, lane, field.word, e);
            ASSERT_GE(field.bit, 0);
            ASSERT_LE(field.bit + field.bits, 8 * half.bytes) << "bits " << bits << " pair " << i;
            for (int b = 0; b < field.bits; ++b) {
              of_code += 1u << (field.from + b);
              const int at = half.byte * 8 + field.bit + b;
              ASSERT_GE(at, 0);
              ASSERT_LT(at, total) << "bits " << bits << " lane " << lane << " pair " << i;
              ++owners[static_cast<std::size_t>(at)];
            }
          }
          ASSERT_EQ(of_code, (1u << bits) - 1) << "bits " << bits << " pair " << i;
        }
      }
    }
    for (int at = 0; at < total; ++at) {
      ASSERT_EQ(owners[static_cast<std::size_t>(at)], 1) << "bits " << bits << " bit " << at;
    }
  }
}

// Main words come first and whole, so that a lane's are one aligned load, and its rest another.
TEST(CodeFields, MainWordsAndRestsAreApartAndALanesNeighbours) {
  for (const int bits : kWidths) {
    const int words = main_words(bits), rest = rest_bits(bits);
    EXPECT_TRUE(words == 1 || words == 2 || words == 4) << bits;
    EXPECT_TRUE(rest == 0 || rest == 1 || rest == 2) << bits;
    EXPECT_EQ(rest_offset(bits), 32 * 4 * words);
    EXPECT_EQ(rest_offset(bits) + 32 * 2 * rest, (HalfFormat{bits, 64}.code_bytes()));
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < kPairs; ++i) {
        for (int f = 0; f < kCodeFields; ++f) {
          const CodeField field = code_field(bits, i, f);
          if (field.bits == 0) continue;
          ASSERT_LE(field.word, words);
          for (int e = 0; e < 2; ++e) {
            const WordHalf half = word_half(bits, lane, field.word, e);
            if (field.word < words) {
              EXPECT_EQ(half.byte, (lane * words + field.word) * 4 + 2 * e);
              EXPECT_EQ(half.bytes, 2);
            } else {
              EXPECT_EQ(half.byte, rest_offset(bits) + lane * 2 * rest + e * rest);
              EXPECT_EQ(half.bytes, rest);
            }
          }
        }
      }
    }
  }
}

// Row and column of operand A of mma.m16n8k16 as the PTX manual numbers a lane's eight elements:
// row lane / 4, or 8 more for elements 2, 3, 6, 7; column 2 (lane % 4) and the next, or 8 more
// from element 4 on.
TEST(PairK, IsTheFragmentOfAnMma) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int step = 0; step < kChunkK / 16; ++step) {
      for (int element = 0; element < 8; ++element) {
        if (element % 4 >= 2) continue;  // the other half's row
        const int column = lane % 4 * 2 + element % 2 + (element >= 4 ? 8 : 0);
        const int pair = 2 * step + (element >= 4 ? 1 : 0);
        EXPECT_EQ(pair_k(lane, pair, element % 2), 16 * step + column);
      }
    }
  }
}

TEST(PairK, CoversAChunkOfEachRowOnce) {
  int seen[kHalfRows][kChunkK] = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kPairs; ++i) {
      for (int e = 0; e < 2; ++e) {
        const int k = pair_k(lane, i, e);
        ASSERT_GE(k, 0);
        ASSERT_LT(k, kChunkK);
        ++seen[lane / 4][k];
      }
    }
  }
  for (const auto& row : seen) {
    for (const int count : row) EXPECT_EQ(count, 1);
  }
}

TEST(TileFormats, LaysPartsOneAfterAnother) {
  for (const int group : kGroups) {
    for (const int first : kFormatWidths) {
      for (const int second : kFormatWidths) {
        const TileFormat format = {{{first, group}, {second, group}}};
        const int widths[] = {first, second};
        int at = 0;
        for (int h = 0; h < 2; ++h) {
          EXPECT_EQ(format.codes_offset(h), at);
          int bits = 0;
          for (int code = 0; code < kHalfRows * kChunkK; ++code) bits += widths[h];
          EXPECT_EQ(format.half[h].code_bytes() * 8, bits);
          at += bits / 8;
        }
        for (int h = 0; h < 2; ++h) {
          EXPECT_EQ(format.scales_offset(h), at);
          int sets = 0;
          for (int k = 0; k < kChunkK && widths[h] != kDenseBits; k += group) ++sets;
          EXPECT_EQ(format.half[h].scale_sets(), sets);
          at += sets * kHalfRows * 2 * 2;  // scale and bias of 8 rows, 2 bytes each
        }
        EXPECT_EQ(format.chunk_bytes(), at);
      }
    }
  }
}

// Vector loads of 16 bytes and copies of whole chunks: every part begins at a multiple of 32.
TEST(TileFormats, Align) {
  for (const int group : kGroups) {
    for (const int first : kFormatWidths) {
      for (const int second : kFormatWidths) {
        const TileFormat format = {{{first, group}, {second, group}}};
        for (int h = 0; h < 2; ++h) {
          EXPECT_EQ(format.codes_offset(h) % 32, 0) << first << " " << second;
          EXPECT_EQ(format.scales_offset(h) % kScaleSetBytes, 0) << first << " " << second;
        }
        EXPECT_EQ(format.chunk_bytes() % 32, 0) << first << " " << second;
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::cuda
