#include "convert/ggml_types.h"

#include <cstring>

namespace qmlp {
namespace {

enum Id : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kBf16 = 30
};

constexpr GgmlType kTypes[] = {
    {kF32, "F32", 1, 4},      {kF16, "F16", 1, 2},      {kQ4_0, "Q4_0", 32, 18},
    {kQ4_1, "Q4_1", 32, 20},  {kQ5_0, "Q5_0", 32, 22},  {kQ5_1, "Q5_1", 32, 24},
    {kQ8_0, "Q8_0", 32, 34},  {9, "Q8_1", 32, 36},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {kBf16, "BF16", 1, 2},    {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
};

std::uint16_t read_u16(const std::byte* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The low nibbles are elements 0..15, the high ones 16..31; `high_bits` adds a fifth bit to each.
void unpack_nibbles(const std::byte* nibbles, std::uint32_t high_bits, std::uint8_t* codes) {
  for (int j = 0; j < 16; ++j) {
    const auto byte = std::to_integer<std::uint32_t>(nibbles[j]);
    codes[j] = static_cast<std::uint8_t>((byte & 15u) | (((high_bits >> j) & 1u) << 4));
    codes[j + 16] = static_cast<std::uint8_t>((byte >> 4) | (((high_bits >> (j + 16)) & 1u) << 4));
  }
}

}  // namespace

const GgmlType* find_ggml_type(std::uint32_t id) noexcept {
  for (const GgmlType& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

std::optional<AffineBlocks> affine_blocks(std::uint32_t type) noexcept {
  switch (type) {
    case kQ4_0:
      return AffineBlocks{4, 8, false};
    case kQ4_1:
      return AffineBlocks{4, 0, true};
    case kQ5_0:
      return AffineBlocks{5, 16, false};
    case kQ5_1:
      return AffineBlocks{5, 0, true};
    case kQ8_0:
      return AffineBlocks{8, 128, false};
    default:
      return std::nullopt;
  }
}

std::optional<DType> ggml_float(std::uint32_t type) noexcept {
  switch (type) {
    case kF32:
      return DType::f32;
    case kF16:
      return DType::f16;
    case kBf16:
      return DType::bf16;
    default:
      return std::nullopt;
  }
}

void decode_affine_row(std::uint32_t type, const std::byte* row, std::int64_t blocks,
                       std::uint8_t* codes, std::uint16_t* d, std::uint16_t* m) noexcept {
  const std::size_t block_bytes = find_ggml_type(type)->block_bytes;
  const bool has_min = affine_blocks(type)->has_min;
  for (std::int64_t b = 0; b < blocks; ++b, row += block_bytes, codes += kAffineBlock) {
    d[b] = read_u16(row);
    const std::byte* at = row + 2;
    if (has_min) {
      m[b] = read_u16(at);
      at += 2;
    }
    if (type == kQ8_0) {
      // Signed bytes; adding 128 flips the top bit.
      for (int j = 0; j < kAffineBlock; ++j) {
        codes[j] = static_cast<std::uint8_t>(std::to_integer<unsigned>(at[j]) ^ 0x80u);
      }
      continue;
    }
    std::uint32_t high_bits = 0;
    if (type == kQ5_0 || type == kQ5_1) {
      std::memcpy(&high_bits, at, sizeof high_bits);
      at += sizeof high_bits;
    }
    unpack_nibbles(at, high_bits, codes);
  }
}

}  // namespace qmlp
