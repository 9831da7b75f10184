#include "cpu/backend.h"
#include "cuda/backend.h"
#include "plan/backend.h"

// The one place that knows which backends exist.
namespace qmlp::plan {

const Backend* backend(DeviceKind kind) noexcept {
  switch (kind) {
    case DeviceKind::cpu:
      return &cpu::backend();
    case DeviceKind::cuda:
      return &cuda::backend();
    case DeviceKind::metal:
      return nullptr;
  }
  return nullptr;
}

std::span<const Kernel> kernels(DeviceKind kind) noexcept {
  const Backend* found = backend(kind);
  return found == nullptr ? std::span<const Kernel>() : found->kernels;
}

}  // namespace qmlp::plan
