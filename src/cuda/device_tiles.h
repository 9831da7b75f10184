#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "cuda/device/packing.h"
#include "plan/packed_weight.h"
#include "qmlp/ops.h"

// Weights in a device's memory. In a build without CUDA the same functions exist and refuse
// (absent.cc).
namespace qmlp::cuda {

struct FreeDeviceMemory {
  void operator()(std::uint8_t* data) const noexcept;
};
using DeviceBytes = std::unique_ptr<std::uint8_t, FreeDeviceMemory>;

// A packed weight; its memory goes with its last owner.
struct DeviceTiles {
  int ordinal = 0;
  DeviceBytes data;
  TileLayout layout = {};
  float unscale[2] = {1.0f, 1.0f};  // undo the halves' prescales
  bool non_finite[2] = {};          // some decoded weight of a matrix is infinite or NaN
};
using DeviceTilesPtr = std::shared_ptr<const DeviceTiles>;
inline const DeviceTiles& tiles_of(const PackedWeight& weight) noexcept {
  return *static_cast<const DeviceTiles*>(weight.parts[0].get());
}

// Packs one matrix or gate and up, which were checked, from host or device memory. Done when it
// returns; takes the packed weight's memory, for a while the scales of a source that is not in this
// device's memory, and a slice of its codes.
Result<DeviceTilesPtr> pack_on_device(std::span<const QuantizedTensorView> sources,
                                      DType activation, const Stream& stream);

// The tiles of a linear with matrix `index` of a SwiGLU's tiles, whose source had `spec`.
Result<DeviceTilesPtr> copy_part(const DeviceTiles& tiles, int index, const QuantSpec& spec);

// plan::Backend's; `weight` is one of this backend's.
Status unpack_device_rows(const PackedWeight& weight, int part, std::int64_t row_begin,
                          std::int64_t row_count, std::byte* codes, std::byte* scales,
                          std::byte* biases) noexcept;
Status decode_device_row(const PackedWeight& weight, std::int64_t row, std::byte* out,
                         const Stream& stream) noexcept;
Status activate_on_device(const MatrixView& gate, const MatrixView& up,
                          const MutableMatrixView& out, const Stream& stream) noexcept;

}  // namespace qmlp::cuda
