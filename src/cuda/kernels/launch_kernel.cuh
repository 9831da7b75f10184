#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/choice.h"
#include "cuda/kernels/launch.h"
#include "cuda/ready_kernel.h"
#include "qmlp/plan.h"

namespace qmlp::cuda {

struct LaunchShape {
  dim3 grid;  // z is 1: kernels rely on it
  unsigned threads;
  std::size_t shared_bytes;
  bool dependent;  // may start before the kernel ahead of it has ended: it waits for its results
};

template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape,
                          const DeviceFacts& device, const LaunchTarget& target,
                          std::type_identity_t<const Parameters&>... arguments) {
  cudaFunction_t function = nullptr;
  if (const cudaError_t e = ready_kernel(reinterpret_cast<const void*>(kernel), device, &function);
      e != cudaSuccess) {
    return e;
  }
  if (target.record != nullptr) {
    const void* params[] = {&arguments...};
    const CudaLaunch launch = {function,
                               {shape.grid.x, shape.grid.y, shape.grid.z},
                               {shape.threads, 1, 1},
                               static_cast<unsigned>(shape.shared_bytes),
                               const_cast<void**>(params)};
    return target.record(target.record_context, launch) ? cudaSuccess : kRecorderRefused;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(target.cuda_stream);
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &dependent;
  config.numAttrs = shape.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace qmlp::cuda
