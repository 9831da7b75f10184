#pragma once

#include <cstdint>

#include "base/host_device.h"

// The packed weight of the CUDA kernels, as sizes and positions alone, for host and device.
//
// A tile is 16 rows of an MMA's A operand in two halves of 8: gate rows and the up rows of the same
// features for a SwiGLU, neighbouring rows of one matrix for a linear. Its stream is a sequence of
// chunks of 64 k: codes of half 0, codes of half 1, then the scale sets of each; every chunk
// carries its own sets, so a group of 128 is stored as two of 64, and of 32 if the other half's is.
// Within a half's codes lane (g, t) = (lane / 4, lane % 4) owns row g and, for each step j of 16 k,
// the pairs k = 16j + 2t, +1 and k = 16j + 2t + 8, +9: pair i = 2j and 2j + 1. A scale set is 8
// words, (scale, bias) of each row.
namespace qmlp::cuda {

constexpr int kChunkK = 64;
constexpr int kTileRows = 16;
constexpr int kHalfRows = 8;
constexpr int kPairs = 8;  // pairs of k that a lane owns in a half's chunk
constexpr int kScaleSetBytes = 32;
constexpr int kDenseBits = 16;  // a half may hold decoded weights instead of codes

struct HalfFormat {
  int bits;        // 2, 3, 4, 5, 6, 8 or kDenseBits
  int group_size;  // 32 or 64, the same for both halves of a tile

  QMLP_HOST_DEVICE constexpr int code_bytes() const { return kHalfRows * kChunkK * bits / 8; }
  QMLP_HOST_DEVICE constexpr int scale_sets() const {
    return bits == kDenseBits ? 0 : kChunkK / group_size;
  }
};

struct TileFormat {
  HalfFormat half[2];

  QMLP_HOST_DEVICE constexpr int codes_offset(int h) const {
    return h == 0 ? 0 : half[0].code_bytes();
  }
  QMLP_HOST_DEVICE constexpr int scales_offset(int h) const {
    const int codes = half[0].code_bytes() + half[1].code_bytes();
    return h == 0 ? codes : codes + half[0].scale_sets() * kScaleSetBytes;
  }
  QMLP_HOST_DEVICE constexpr int chunk_bytes() const {
    return scales_offset(1) + half[1].scale_sets() * kScaleSetBytes;
  }
};

// A lane's codes of a half: `bits` bytes for the even k and as many for the odd k, in 32-bit words
// whose low halves belong to the even k and whose high halves to the odd. Widths that are no power
// of two have a rest beside their main words: one more word (6 bits), or a byte for the even k and
// one for the odd (3 and 5 bits). The main words of all lanes come first, then their rests.
QMLP_HOST_DEVICE constexpr int main_bits(int bits) {
  return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits;
}
QMLP_HOST_DEVICE constexpr int rest_bits(int bits) { return bits - main_bits(bits); }
QMLP_HOST_DEVICE constexpr int main_words(int bits) { return main_bits(bits) / 2; }
QMLP_HOST_DEVICE constexpr int rest_offset(int bits) {
  return kHalfRows * kChunkK * main_bits(bits) / 8;
}

// Bits from .. from + bits - 1 of a code: in a half of word `word` (main_words: the rest), from
// `bit` up.
struct CodeField {
  int from, bits;
  int word, bit;
};
constexpr int kCodeFields = 3;  // that a code may be cut into; those that it is not have no bits
// Fields of pair i (0..7). Where they lie is what decode.cuh takes the fewest instructions for: as
// many as possible whole, several below bit 8 after one shift.
QMLP_HOST_DEVICE constexpr CodeField code_field(int bits, int i, int field) {
  const int rest = main_words(bits);
  if (bits == 3 && i == 7) {
    return field == 0   ? CodeField{0, 1, 0, 15}
           : field == 1 ? CodeField{1, 2, rest, 6}
                        : CodeField{};
  }
  if (bits == 5 && i == 7) {
    return field == 2 ? CodeField{2, 3, rest, 5} : CodeField{field, 1, field, 15};
  }
  if (bits == 6 && i == 6) {
    return field == 0 ? CodeField{0, 4, 0, 6} : field == 1 ? CodeField{4, 2, 1, 6} : CodeField{};
  }
  if (bits == 6 && i == 7) {
    return field == 0 ? CodeField{0, 2, 1, 8} : field == 1 ? CodeField{2, 4, 2, 6} : CodeField{};
  }
  if (field > 0) return {};
  if (bits == 6) return {0, 6, i / 2, i % 2 * 10};
  const int per = 16 / bits;  // pairs in a word
  return {0, bits, i / per, i % per * bits};
}

// The half of a lane's word that belongs to element e (0: even k, 1: odd k): its first byte from
// the start of the half's codes, and its bytes.
struct WordHalf {
  int byte, bytes;
};
QMLP_HOST_DEVICE constexpr WordHalf word_half(int bits, int lane, int word, int e) {
  const int words = main_words(bits);
  if (word < words) return {(lane * words + word) * 4 + 2 * e, 2};
  const int bytes = rest_bits(bits);
  return {rest_offset(bits) + (lane * 2 + e) * bytes, bytes};
}

// k within the chunk of pair i, element e of a lane.
QMLP_HOST_DEVICE constexpr int pair_k(int lane, int i, int e) {
  return i / 2 * 16 + 2 * (lane % 4) + i % 2 * 8 + e;
}

}  // namespace qmlp::cuda
