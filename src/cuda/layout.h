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

// Where the code of pair i (0..7), element e (0: even k, 1: odd k) of a lane lies in the half's
// codes: up to two bit fields, the low bits in one plane and the high bits in another.
struct CodePlace {
  int byte;   // of the field's byte, from the start of the half's codes
  int shift;  // in that byte
  int bits;   // of the field; 0: no such field
};
// Plane widths: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2.
QMLP_HOST_DEVICE constexpr int low_plane_bits(int bits) {
  return bits == 3 ? 2 : bits == 5 || bits == 6 ? 4 : bits;
}
QMLP_HOST_DEVICE constexpr int high_plane_bits(int bits) { return bits - low_plane_bits(bits); }

// A plane of 8, 4 or 2 bits stores its lane's fields in 32-bit words whose low halves belong to the
// even k and whose high halves to the odd k; pair i at bit (i % per) * width of each half, `per`
// pairs a word. A plane of 1 bit has 16 bits a lane: byte 0 for the even k, byte 1 for the odd.
QMLP_HOST_DEVICE constexpr CodePlace plane_place(int plane_offset, int width, int lane, int i,
                                                 int e) {
  if (width == 0) return {0, 0, 0};
  if (width == 1) return {plane_offset + lane * 2 + e, i, 1};
  const int per = 16 / width;      // pairs in a word: 2, 4 or 8
  const int words = kPairs / per;  // words a lane: 4, 2 or 1
  const int bit = i % per * width + 16 * e;
  return {plane_offset + (lane * words + i / per) * 4 + bit / 8, bit % 8, width};
}
QMLP_HOST_DEVICE constexpr CodePlace low_place(int bits, int lane, int i, int e) {
  return plane_place(0, low_plane_bits(bits), lane, i, e);
}
QMLP_HOST_DEVICE constexpr CodePlace high_place(int bits, int lane, int i, int e) {
  return plane_place(kHalfRows * kChunkK * low_plane_bits(bits) / 8, high_plane_bits(bits), lane, i,
                     e);
}
// k within the chunk of pair i, element e of a lane.
QMLP_HOST_DEVICE constexpr int pair_k(int lane, int i, int e) {
  return i / 2 * 16 + 2 * (lane % 4) + i % 2 * 8 + e;
}

}  // namespace qmlp::cuda
