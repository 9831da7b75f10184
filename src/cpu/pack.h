#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned_buffer.h"
#include "cpu/kernels/kernel_args.h"
#include "qmlp/cpu.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"

namespace qmlp::cpu {

constexpr std::uint32_t kLayoutN16 = 1;

// A weight in the layout of BlockMatrix, for activations of one type.
struct PackedMatrix {
  AlignedBuffer data;
  std::vector<unsigned long long> offsets;
  std::vector<unsigned char> kinds;
  BlockMatrix blocks;  // points into the members above
  QuantSpec spec;
  std::int64_t exact_blocks = 0;
};

Result<std::shared_ptr<const PackedMatrix>> pack_matrix(const QuantizedTensorView& source,
                                                        DType activation, ThreadPool& pool);

// Whether unpack_rows can give back what was packed.
bool can_unpack(const PackedMatrix& matrix) noexcept;
// Rows [row_begin, row_begin + row_count) as the source held them.
void unpack_rows(const PackedMatrix& matrix, std::int64_t row_begin, std::int64_t row_count,
                 std::byte* codes, std::byte* scales, std::byte* biases) noexcept;

// Row `row` in the activation type: K elements at `out`, aligned to their type.
void decode_row(const PackedMatrix& matrix, DType activation, std::int64_t row, void* out) noexcept;

}  // namespace qmlp::cpu
