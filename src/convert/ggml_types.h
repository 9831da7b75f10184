#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "qmlp/types.h"

namespace qmlp {

// A storage type of GGUF files: rows of blocks of `block_elements` values.
struct GgmlType {
  std::uint32_t id;
  const char* name;
  std::uint32_t block_elements;
  std::uint32_t block_bytes;
};
// Null when no such type is known.
const GgmlType* find_ggml_type(std::uint32_t id) noexcept;

// The types that are floats as they stand.
std::optional<DType> ggml_float(std::uint32_t type) noexcept;

// The types whose values are scale * code + bias in groups of 32, with codes of `bits` bits.
// `scale_dtype` holds every scale exactly, and every bias that is in its range: f16, or f32 where a
// scale is the product of an f16 and a small integer (Q4_K, Q5_K).
struct AffineType {
  int bits = 0;
  DType scale_dtype = DType::f16;
};
inline constexpr int kAffineGroup = 32;
std::optional<AffineType> affine_type(std::uint32_t type) noexcept;
// One row of K elements: a code for each element, a scale and a bias for each group.
void decode_affine_row(std::uint32_t type, const std::byte* row, std::int64_t K,
                       std::uint8_t* codes, float* scales, float* biases) noexcept;

inline constexpr float kMaxF16 = 65504.0f;

// Whether a scale or a bias of the row may pass f16's range; looks at block headers alone.
bool may_pass_f16(std::uint32_t type, const std::byte* row, std::int64_t K) noexcept;

// The types that are neither, yet decode to f32. They are quantized anew: the smallest width of the
// affine format that is no less than the bits that the type spends on a weight.
std::optional<int> requantized_bits(std::uint32_t type) noexcept;
// One row of K elements of such a type.
void decode_row(std::uint32_t type, const std::byte* row, std::int64_t K, float* values) noexcept;

// The names of all types that one of the functions above takes.
inline constexpr const char* kSupportedTypes =
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS";

}  // namespace qmlp
