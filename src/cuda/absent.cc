#include "cuda/device_tiles.h"
#include "cuda/run.h"
#include "qmlp/cuda.h"

// The CUDA backend of a build without CUDA.
namespace qmlp {

Result<DeviceFacts> cuda_facts(int) {
  return Error{Errc::device,
               "this build has no CUDA: configure with -DQMLP_CUDA=ON, or pip install . -C "
               "cmake.define.QMLP_CUDA=ON"};
}

namespace cuda {

int run_kernel(const plan::Kernel&, const plan::OpCall&) noexcept {
  return static_cast<int>(Errc::unsupported);
}
std::size_t kernel_workspace_bytes(const plan::Kernel&, const plan::Problem&,
                                   const DeviceFacts&) noexcept {
  return 0;
}
void FreeDeviceMemory::operator()(std::uint8_t*) const noexcept {}

namespace {

// Without CUDA there are no CUDA plans that could run, and so no weights.
Error absent() { return Error{Errc::device, "this build has no CUDA"}; }

}  // namespace

Result<DeviceTilesPtr> pack_on_device(std::span<const QuantizedTensorView>, DType, const Stream&) {
  return absent();
}
Result<DeviceTilesPtr> copy_part(const DeviceTiles&, int, const QuantSpec&) { return absent(); }
Status unpack_device_rows(const PackedWeight&, int, std::int64_t, std::int64_t, std::byte*,
                          std::byte*, std::byte*) noexcept {
  return absent();
}
Status decode_device_row(const PackedWeight&, std::int64_t, std::byte*, const Stream&) noexcept {
  return absent();
}
Status activate_on_device(const MatrixView&, const MatrixView&, const MutableMatrixView&,
                          const Stream&) noexcept {
  return absent();
}
std::string last_error() { return {}; }

}  // namespace cuda
}  // namespace qmlp
