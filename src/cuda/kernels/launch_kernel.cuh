#pragma once

#include <cuda_runtime.h>

#include "cuda/choice.h"
#include "qmlp/plan.h"

namespace qmlp::cuda {

struct LaunchShape {
  dim3 grid;
  unsigned threads;
  std::size_t shared_bytes;
  bool dependent;  // may start before the kernel ahead of it has ended: it waits for its results
};

template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape,
                          const DeviceFacts& device, cudaStream_t stream,
                          const Arguments&... arguments) {
  // One limit for every launch of a kernel, whatever its shape, since threads set it side by side.
  const int most = static_cast<int>(device.smem_bytes - kStaticSharedBytes);
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      e != cudaSuccess) {
    return e;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &dependent;
  config.numAttrs = shape.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace qmlp::cuda
