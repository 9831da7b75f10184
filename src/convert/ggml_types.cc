#include "convert/ggml_types.h"

#include <cmath>
#include <cstring>

#include "base/float16.h"

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
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kBf16 = 30
};

constexpr GgmlType kTypes[] = {
    {kF32, "F32", 1, 4},
    {kF16, "F16", 1, 2},
    {kQ4_0, "Q4_0", 32, 18},
    {kQ4_1, "Q4_1", 32, 20},
    {kQ5_0, "Q5_0", 32, 22},
    {kQ5_1, "Q5_1", 32, 24},
    {kQ8_0, "Q8_0", 32, 34},
    {9, "Q8_1", 32, 40},
    {kQ2_K, "Q2_K", 256, 84},
    {kQ3_K, "Q3_K", 256, 110},
    {kQ4_K, "Q4_K", 256, 144},
    {kQ5_K, "Q5_K", 256, 176},
    {kQ6_K, "Q6_K", 256, 210},
    {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98},
    {19, "IQ1_S", 256, 50},
    {kIQ4_NL, "IQ4_NL", 32, 18},
    {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},
    {kIQ4_XS, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},
    {25, "I16", 1, 2},
    {26, "I32", 1, 4},
    {27, "I64", 1, 8},
    {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},
    {kBf16, "BF16", 1, 2},
    {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},
    {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
};

constexpr int kSuperBlock = 256;

std::uint32_t byte_at(const std::byte* bytes, int i) { return std::to_integer<unsigned>(bytes[i]); }

std::uint16_t read_u16(const std::byte* at) {
  std::uint16_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float read_f16(const std::byte* at) { return f16_to_f32(read_u16(at)); }

// The low nibbles are elements 0..15, the high ones 16..31; `high_bits` adds a fifth bit to each.
void unpack_nibbles(const std::byte* nibbles, std::uint32_t high_bits, std::uint8_t* codes) {
  for (int j = 0; j < 16; ++j) {
    const std::uint32_t byte = byte_at(nibbles, j);
    codes[j] = static_cast<std::uint8_t>((byte & 15u) | (((high_bits >> j) & 1u) << 4));
    codes[j + 16] = static_cast<std::uint8_t>((byte >> 4) | (((high_bits >> (j + 16)) & 1u) << 4));
  }
}

// A block of 32 with a scale, and a minimum or a code that stands for 0.
void decode_simple_block(std::uint32_t type, const std::byte* block, std::uint8_t* codes,
                         float& scale, float& bias) {
  scale = read_f16(block);
  const std::byte* at = block + 2;
  if (type == kQ8_0) {
    // Signed bytes; adding 128 flips the top bit.
    for (int j = 0; j < kAffineGroup; ++j) {
      codes[j] = static_cast<std::uint8_t>(byte_at(at, j) ^ 0x80u);
    }
    bias = -128.0f * scale;
    return;
  }
  if (type == kQ4_1 || type == kQ5_1) {
    bias = read_f16(at);
    at += 2;
  } else {
    bias = (type == kQ4_0 ? -8.0f : -16.0f) * scale;
  }
  std::uint32_t high_bits = 0;
  if (type == kQ5_0 || type == kQ5_1) {
    std::memcpy(&high_bits, at, sizeof high_bits);
    at += sizeof high_bits;
  }
  unpack_nibbles(at, high_bits, codes);
}

// Q4_K and Q5_K: eight groups of 32 whose scales and minima are 6-bit multiples of the block's own.
void decode_k_block(std::uint32_t type, const std::byte* block, std::uint8_t* codes, float* scales,
                    float* biases) {
  const float d = read_f16(block);
  const float d_min = read_f16(block + 2);
  const std::byte* packed = block + 4;  // 12 bytes
  for (int g = 0; g < 8; ++g) {
    std::uint32_t scale;
    std::uint32_t minimum;
    if (g < 4) {
      scale = byte_at(packed, g) & 63u;
      minimum = byte_at(packed, g + 4) & 63u;
    } else {
      // The top two bits are those that the first groups leave free.
      const std::uint32_t low = byte_at(packed, g + 4);
      scale = (low & 15u) | (byte_at(packed, g - 4) >> 6 << 4);
      minimum = (low >> 4) | (byte_at(packed, g) >> 6 << 4);
    }
    scales[g] = d * static_cast<float>(scale);
    biases[g] = -(d_min * static_cast<float>(minimum));
  }
  const std::byte* high = type == kQ5_K ? block + 16 : nullptr;
  const std::byte* nibbles = block + 16 + (type == kQ5_K ? 32 : 0);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int group = i / 32;
    const int lane = i % 32;
    std::uint32_t code = byte_at(nibbles, group / 2 * 32 + lane) >> (group % 2 * 4) & 15u;
    if (high != nullptr) code |= (byte_at(high, lane) >> group & 1u) << 4;
    codes[i] = static_cast<std::uint8_t>(code);
  }
}

void decode_q2_k(const std::byte* block, float* values) {
  const std::byte* codes = block + 16;
  const float d = read_f16(block + 80);
  const float d_min = read_f16(block + 82);
  for (int i = 0; i < kSuperBlock; ++i) {
    const std::uint32_t packed = byte_at(block, i / 16);
    const float scale = d * static_cast<float>(packed & 15u);
    const float minimum = d_min * static_cast<float>(packed >> 4);
    const std::uint32_t code = byte_at(codes, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3u;
    values[i] = scale * static_cast<float>(code) - minimum;
  }
}

void decode_q3_k(const std::byte* block, float* values) {
  const std::byte* codes = block + 32;
  const std::byte* packed = block + 96;  // 16 scales of 6 bits
  const float d = read_f16(block + 108);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int group = i / 16;
    const std::uint32_t low = byte_at(packed, group % 8) >> (group / 8 * 4) & 15u;
    const std::uint32_t high = byte_at(packed, 8 + group % 4) >> (group / 4 * 2) & 3u;
    const float scale = d * static_cast<float>(static_cast<int>(low | high << 4) - 32);
    const int code =
        static_cast<int>(byte_at(codes, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3u);
    const bool third_bit = (byte_at(block, i % 32) >> (i / 32) & 1u) != 0;
    values[i] = scale * static_cast<float>(third_bit ? code : code - 4);
  }
}

void decode_q6_k(const std::byte* block, float* values) {
  const std::byte* high_bits = block + 128;
  const std::byte* packed = block + 192;
  const float d = read_f16(block + 208);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int half = i / 128;
    const int in_half = i % 128;
    const std::uint32_t low = byte_at(block, half * 64 + in_half % 64) >> (in_half / 64 * 4) & 15u;
    const std::uint32_t high = byte_at(high_bits, half * 32 + i % 32) >> (in_half / 32 * 2) & 3u;
    const auto scale = static_cast<std::int8_t>(byte_at(packed, i / 16));
    values[i] =
        d * static_cast<float>(scale) * static_cast<float>(static_cast<int>(low | high << 4) - 32);
  }
}

// The sixteen values of the IQ4 types, in multiples of the scale.
constexpr float kIq4Values[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                  1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};

void decode_iq4_group(const std::byte* nibbles, float scale, float* values) {
  for (int j = 0; j < 16; ++j) {
    values[j] = scale * kIq4Values[byte_at(nibbles, j) & 15u];
    values[j + 16] = scale * kIq4Values[byte_at(nibbles, j) >> 4];
  }
}

void decode_iq4_xs(const std::byte* block, float* values) {
  const float d = read_f16(block);
  const std::uint32_t high_bits = read_u16(block + 2);
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t low = byte_at(block, 4 + g / 2) >> (g % 2 * 4) & 15u;
    const std::uint32_t high = high_bits >> (2 * g) & 3u;
    const float scale = d * static_cast<float>(static_cast<int>(low | high << 4) - 32);
    decode_iq4_group(block + 8 + 16 * g, scale, values + 32 * g);
  }
}

}  // namespace

const GgmlType* find_ggml_type(std::uint32_t id) noexcept {
  for (const GgmlType& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
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

std::optional<AffineType> affine_type(std::uint32_t type) noexcept {
  switch (type) {
    case kQ4_0:
    case kQ4_1:
      return AffineType{4, DType::f16};
    case kQ5_0:
    case kQ5_1:
      return AffineType{5, DType::f16};
    case kQ8_0:
      return AffineType{8, DType::f16};
    case kQ4_K:
      return AffineType{4, DType::f32};
    case kQ5_K:
      return AffineType{5, DType::f32};
    default:
      return std::nullopt;
  }
}

void decode_affine_row(std::uint32_t type, const std::byte* row, std::int64_t K,
                       std::uint8_t* codes, float* scales, float* biases) noexcept {
  const GgmlType& format = *find_ggml_type(type);
  const std::int64_t blocks = K / format.block_elements;
  const int groups = static_cast<int>(format.block_elements) / kAffineGroup;
  for (std::int64_t b = 0; b < blocks; ++b) {
    if (groups == 1) {
      decode_simple_block(type, row, codes, *scales, *biases);
    } else {
      decode_k_block(type, row, codes, scales, biases);
    }
    row += format.block_bytes;
    codes += format.block_elements;
    scales += groups;
    biases += groups;
  }
}

bool may_pass_f16(std::uint32_t type, const std::byte* row, std::int64_t K) noexcept {
  if (type == kQ4_1 || type == kQ5_1) return false;  // both are f16 in the file
  const GgmlType& format = *find_ggml_type(type);
  const bool super_block = format.block_elements == kSuperBlock;
  // The largest multiple of the stored scale that becomes a scale or a bias.
  const float most = super_block ? 63.0f : 128.0f;
  for (std::int64_t b = 0; b < K / format.block_elements; ++b, row += format.block_bytes) {
    if (!(std::fabs(read_f16(row)) * most <= kMaxF16)) return true;
    if (super_block && !(std::fabs(read_f16(row + 2)) * most <= kMaxF16)) return true;
  }
  return false;
}

std::optional<int> requantized_bits(std::uint32_t type) noexcept {
  switch (type) {
    case kQ2_K:  // 2.625 bits a weight
      return 3;
    case kQ3_K:  // 3.4375
      return 4;
    case kQ6_K:  // 6.5625; there is no 7
      return 8;
    case kIQ4_NL:  // 4.5
    case kIQ4_XS:  // 4.25
      return 5;
    default:
      return std::nullopt;
  }
}

void decode_row(std::uint32_t type, const std::byte* row, std::int64_t K, float* values) noexcept {
  const GgmlType& format = *find_ggml_type(type);
  for (std::int64_t b = 0; b < K / format.block_elements; ++b) {
    switch (type) {
      case kQ2_K:
        decode_q2_k(row, values);
        break;
      case kQ3_K:
        decode_q3_k(row, values);
        break;
      case kQ6_K:
        decode_q6_k(row, values);
        break;
      case kIQ4_NL:
        decode_iq4_group(row + 2, read_f16(row), values);
        break;
      case kIQ4_XS:
        decode_iq4_xs(row, values);
        break;
      default:
        break;
    }
    row += format.block_bytes;
    values += format.block_elements;
  }
}

}  // namespace qmlp
