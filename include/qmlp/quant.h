#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "qmlp/status.h"
#include "qmlp/tensor.h"
#include "qmlp/types.h"

namespace qmlp {

// Bytes of the codes and of the scales (equal to the biases) of an [N, K] weight. Refuses sizes
// that overflow, K that is no multiple of the group, and specs outside the format.
struct QuantSizes {
  std::uint64_t codes_bytes = 0;
  std::uint64_t scales_bytes = 0;
};
Result<QuantSizes> quant_sizes(std::int64_t N, std::int64_t K, const QuantSpec& spec);

// Checks that spec is affine with bits 2,3,4,5,6,8 and group 32,64,128, or dense with matching
// bits.
Status validate(const QuantSpec& spec);

// An owning quantized weight.
struct QuantizedTensor {
  std::vector<std::byte> codes;
  std::vector<std::byte> scales;
  std::vector<std::byte> biases;
  std::int64_t N = 0;
  std::int64_t K = 0;
  QuantSpec spec;
  QuantizedTensorView view() const noexcept { return {codes, scales, biases, N, K, spec}; }
};

// Quantizes f32 weights [N, K] (row-major, contiguous) as MLX's CPU `quantize` does, bit for bit.
// spec.scale_dtype is the type that scales and biases are rounded to. Source: docs/format.md.
Result<QuantizedTensor> quantize(std::span<const float> weights, std::int64_t N, std::int64_t K,
                                 const QuantSpec& spec);

// Decodes rows [row_begin, row_end) to f32: out[r, k] = scale * code + bias rounded once to
// `round_to` (docs/numerics.md section 2), widened. out holds (row_end - row_begin) * K floats.
Status dequantize(const QuantizedTensorView& weight, std::int64_t row_begin, std::int64_t row_end,
                  DType round_to, std::span<float> out);

}  // namespace qmlp
