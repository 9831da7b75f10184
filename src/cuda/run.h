#pragma once

#include <cstddef>
#include <string>

#include "plan/kernel.h"

// What the rest of the library calls of the CUDA backend. In a build without CUDA the same
// functions exist and refuse (absent.cc).
namespace qmlp::cuda {

// plan::Kernel::body of the CUDA table; kTileSm90 + a TileConfig.
enum Body : std::uint8_t { kStreamSm80, kStreamSm90, kRelaySm90, kTileSm90 };

constexpr bool kCompiled =
#ifdef QMLP_CUDA
    true;
#else
    false;
#endif

int run_kernel(const plan::Kernel& kernel, const plan::OpCall& call) noexcept;
std::size_t kernel_workspace_bytes(const plan::Kernel& kernel, const plan::Problem& problem,
                                   const DeviceFacts& device) noexcept;
// The driver's last words on a device, for an error message; empty when there are none.
std::string last_error();

}  // namespace qmlp::cuda
