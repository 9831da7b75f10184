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
  bool parts_stand_alone;  // each part is a linear weight of its own
  void (*decode_row)(const PackedWeight& weight, std::int64_t row, void* out) noexcept;
  void (*swiglu_activation)(const MatrixView& gate, const MatrixView& up,
                            const MutableMatrixView& out, const Stream& stream) noexcept;
  std::string (*last_error)();  // the device's own words on the last failure
  // Rows of a part as its source held them, into buffers whose sizes were checked. False when the
  // source's codes were not kept.
  bool (*unpack_rows)(const PackedWeight& weight, int part, std::int64_t row_begin,
                      std::int64_t row_count, std::byte* codes, std::byte* scales,
                      std::byte* biases) noexcept = nullptr;
};

// Null for a kind that no build has.
const Backend* backend(DeviceKind kind) noexcept;

}  // namespace qmlp::plan
