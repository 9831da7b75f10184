#pragma once

#include "qmlp/ops.h"
#include "qmlp/plan.h"
#include "qmlp/status.h"

namespace qmlp {

// Facts of a CUDA device, `present` when this build has code for it. Errors, one line each: a build
// without CUDA, no driver, a driver older than the toolkit, no such device, an unsupported
// architecture.
Result<DeviceFacts> cuda_facts(int ordinal = 0);

// One kernel of an op, as cuLaunchKernel takes it.
struct CudaLaunch {
  void* function = nullptr;  // a CUfunction of the device's primary context
  unsigned grid[3] = {};
  unsigned block[3] = {};
  unsigned shared_bytes = 0;  // dynamic; the function's limit is already set
  void** params = nullptr;    // of the call alone
};

// A stream for ops on a device: `cuda_stream` is a cudaStream_t (null: the default stream). Ops are
// asynchronous on it, allocate nothing and may be captured in a graph. The caller keeps it alive.
//
// For a caller that puts launches into a graph of its own: when `record` is set, it gets each
// kernel of an op, in order, each to run after the one before it, and nothing is launched; false
// fails the op.
struct CudaStream {
  void* cuda_stream = nullptr;
  bool (*record)(void* context, const CudaLaunch& launch) = nullptr;
  void* record_context = nullptr;
};
inline Stream stream_of(const CudaStream& stream, int ordinal = 0) noexcept {
  return {Device{DeviceKind::cuda, ordinal}, const_cast<CudaStream*>(&stream)};
}

}  // namespace qmlp
