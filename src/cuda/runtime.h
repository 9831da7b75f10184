#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/launch.h"

// What the backend's host code shares.
namespace qmlp::cuda {

inline const char* error_words(cudaError_t error) noexcept {
  return error == kRecorderRefused ? "the caller's recorder refused a launch"
                                   : cudaGetErrorString(error);
}

// The driver's context that is current on this thread; null for none, or where it cannot be asked.
void* current_context() noexcept;

// Makes `ordinal` current for a scope and restores the caller's device. Also where it is current
// already: a thread that has not used CUDA yet has a device but no context, and the driver's own
// functions, such as those for tensor maps, refuse it. A thread on which the context is still
// current that this made current for the same device is left alone: asking the driver for that
// costs a tenth of asking the runtime.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal) noexcept {
    thread_local int bound = -1;
    thread_local void* bound_context = nullptr;
    if (bound == ordinal && bound_context != nullptr && current_context() == bound_context) return;
    cudaGetDevice(&before_);
    status_ = cudaSetDevice(ordinal);
    changed_ = before_ != ordinal;
    bound = ordinal;
    bound_context = status_ == cudaSuccess ? current_context() : nullptr;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t status() const noexcept { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace qmlp::cuda
