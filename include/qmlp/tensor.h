#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "qmlp/status.h"
#include "qmlp/types.h"

namespace qmlp {

// Borrowed weights of a linear layer, row-major [N, K] as MLX stores them. Dense weights keep their
// floats in `codes`' bytes and leave scales and biases empty. No alignment is required.
struct QuantizedTensorView {
  std::span<const std::byte> codes;   // U32 words [N, K * bits / 32], little endian
  std::span<const std::byte> scales;  // spec.scale_dtype [N, K / group_size]
  std::span<const std::byte> biases;  // spec.scale_dtype [N, K / group_size], the affine offsets
  std::int64_t N = 0;
  std::int64_t K = 0;
  QuantSpec spec;
};

// Checks bits, group size, divisibility and that each span holds exactly what the shape needs.
Status validate(const QuantizedTensorView& weight);

// A borrowed row-major matrix. Element (r, c) is at data + (r * row_stride + c) * size_of(dtype);
// data must be aligned to its element.
template <class Byte>
struct BasicMatrixView {
  Byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;  // in elements
  DType dtype = DType::bf16;
  Device device = {};
};
using MatrixView = BasicMatrixView<const std::byte>;
using MutableMatrixView = BasicMatrixView<std::byte>;

// Borrowed scratch. Contents are unspecified before and after a call.
struct Workspace {
  static constexpr std::size_t kAlignment = 256;
  std::span<std::byte> bytes;
};

}  // namespace qmlp
