#pragma once

#include <cstddef>
#include <memory>

#include "plan/kernel.h"

// What the rest of the library calls of the CUDA backend. In a build without CUDA the same
// functions exist and refuse (absent.cc).
namespace qmlp::cuda {

// plan::Kernel::body of the CUDA table; kTileSm90 + a TileConfig.
enum Body : std::uint8_t { kStreamSm80, kStreamSm90, kTileSm90 };

constexpr bool kCompiled =
#ifdef QMLP_CUDA
    true;
#else
    false;
#endif

// A packed weight in a device's memory; freed with its last owner.
struct DeviceTiles;

int run_kernel(const plan::Kernel& kernel, const plan::OpCall& call) noexcept;
std::size_t kernel_workspace_bytes(const plan::Kernel& kernel, const plan::Problem& problem,
                                   const DeviceFacts& device) noexcept;
Result<std::shared_ptr<const DeviceTiles>> upload(const QuantizedTensorView* weights,
                                                  int num_weights, DType activation,
                                                  const Stream& stream);
std::size_t device_bytes(const DeviceTiles& tiles) noexcept;
// The driver's last words on a device, for an error message; empty when there are none.
std::string last_error();

}  // namespace qmlp::cuda
