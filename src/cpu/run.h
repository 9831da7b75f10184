#pragma once

#include <cstddef>

#include "plan/kernel.h"

namespace qmlp::cpu {

// plan::Kernel::body of the CPU table.
enum Body : std::uint8_t { kTiles, kRows, kTensor };

int run_kernel(const plan::Kernel& kernel, const plan::OpCall& call) noexcept;
std::size_t kernel_workspace_bytes(const plan::Kernel& kernel, const plan::Problem& problem,
                                   const DeviceFacts& device) noexcept;
// silu(gate) * up row by row with the host's best instruction set.
void swiglu_activation(const MatrixView& gate, const MatrixView& up, const MutableMatrixView& out,
                       const Stream& stream) noexcept;

}  // namespace qmlp::cpu
