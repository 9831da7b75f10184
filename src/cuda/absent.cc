#include "cuda/run.h"
#include "qmlp/cuda.h"

// The CUDA backend of a build without CUDA.
namespace qmlp {

Result<DeviceFacts> cuda_facts(int) {
  return Error{Errc::device, "this build has no CUDA: configure with -DQMLP_CUDA=ON"};
}

namespace cuda {

struct DeviceTiles {};

int run_kernel(const plan::Kernel&, const plan::OpCall&) noexcept {
  return static_cast<int>(Errc::unsupported);
}
std::size_t kernel_workspace_bytes(const plan::Kernel&, const plan::Problem&,
                                   const DeviceFacts&) noexcept {
  return 0;
}
Result<std::shared_ptr<const DeviceTiles>> upload(const QuantizedTensorView*, int, DType,
                                                  const Stream&) {
  return Error{Errc::device, "this build has no CUDA"};
}
std::size_t device_bytes(const DeviceTiles&) noexcept { return 0; }
std::string last_error() { return {}; }

}  // namespace cuda
}  // namespace qmlp
