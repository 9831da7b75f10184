#pragma once

#include "qmlp/ops.h"
#include "qmlp/plan.h"
#include "qmlp/status.h"

namespace qmlp {

// Facts of a CUDA device, `present` when this build has code for it. Errors, one line each: a build
// without CUDA, no driver, a driver older than the toolkit, no such device, an unsupported
// architecture.
Result<DeviceFacts> cuda_facts(int ordinal = 0);

// A stream for ops on a device: `cuda_stream` is a cudaStream_t (null: the default stream). Ops are
// asynchronous on it, allocate nothing and may be captured in a graph. The caller keeps it alive.
struct CudaStream {
  void* cuda_stream = nullptr;
};
inline Stream stream_of(const CudaStream& stream, int ordinal = 0) noexcept {
  return {Device{DeviceKind::cuda, ordinal}, const_cast<CudaStream*>(&stream)};
}

}  // namespace qmlp
