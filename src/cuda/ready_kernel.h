#pragma once

#include <cuda_runtime_api.h>

#include "qmlp/plan.h"

namespace qmlp::cuda {

// A kernel (its host symbol) on the current device, which is `device`: loaded, and allowed as much
// dynamic shared memory as the device has for it. One limit for every launch, whatever its shape,
// since threads launch side by side. Remembered, for a launch that is a microsecond long.
cudaError_t ready_kernel(const void* kernel, const DeviceFacts& device, cudaFunction_t* function);

}  // namespace qmlp::cuda
