#pragma once

#include <cstddef>
#include <cstdint>

#include "qmlp/types.h"

namespace qmlp {

// Quantizes `rows` contiguous rows of K floats (K a multiple of spec.group_size, spec valid and not
// dense) into packed codes, scales and biases of spec.scale_dtype. Returns -1, or the index of the
// first element of a group that the format cannot hold: one with a NaN or an infinity, or with a
// range that overflows f32.
std::int64_t quantize_rows(const float* weights, std::int64_t rows, std::int64_t K,
                           const QuantSpec& spec, std::byte* codes, std::byte* scales,
                           std::byte* biases) noexcept;

}  // namespace qmlp
