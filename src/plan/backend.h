#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "plan/kernel.h"
#include "plan/packed_weight.h"

namespace qmlp::plan {

// What a device kind does besides running kernels. A null member means that it can't.
struct Backend {
  std::span<const Kernel> kernels;
  // Fills weight.parts from the sources, whose shapes and specs were checked.
  Status (*pack)(std::span<const QuantizedTensorView> sources, const Stream& stream,
                 PackedWeight& weight);
  PackedInfo (*info)(const PackedWeight& weight) noexcept;
  // The backend's form of a part of a SwiGLU weight as a linear weight of its own.
  Result<std::shared_ptr<const void>> (*part)(const PackedWeight& weight, int index);
  // Row `row` of a linear weight, as checked; `stream` has no handle where the caller waits.
  Status (*decode_row)(const PackedWeight& weight, std::int64_t row, std::byte* out,
                       const Stream& stream) noexcept;
  Status (*swiglu_activation)(const MatrixView& gate, const MatrixView& up,
                              const MutableMatrixView& out, const Stream& stream) noexcept;
  std::string (*last_error)();  // the device's own words on the last failure
  // Rows of a part as its source held them, into buffers whose sizes were checked, or
  // codes_not_kept().
  Status (*unpack_rows)(const PackedWeight& weight, int part, std::int64_t row_begin,
                        std::int64_t row_count, std::byte* codes, std::byte* scales,
                        std::byte* biases) noexcept;
};

inline Error codes_not_kept() {
  return Error{Errc::unsupported,
               "unpack_rows: some blocks are kept as decoded floats, their codes are gone"};
}

// Null for a kind that no build has.
const Backend* backend(DeviceKind kind) noexcept;

}  // namespace qmlp::plan
