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

// The types whose blocks of 32 are affine groups: value = d * code + m, or d * (code - zero_code).
struct AffineBlocks {
  int bits = 0;
  int zero_code = 0;  // when there is no m: the code that stands for 0, so that m = -zero_code * d
  bool has_min = false;
};
inline constexpr int kAffineBlock = 32;
std::optional<AffineBlocks> affine_blocks(std::uint32_t type) noexcept;
// The types that are floats as they stand.
std::optional<DType> ggml_float(std::uint32_t type) noexcept;

// One row of `blocks` blocks of an affine type: 32 codes for each block in element order, and for
// each block d and m as f16 bits (m is left alone without has_min).
void decode_affine_row(std::uint32_t type, const std::byte* row, std::int64_t blocks,
                       std::uint8_t* codes, std::uint16_t* d, std::uint16_t* m) noexcept;

}  // namespace qmlp
