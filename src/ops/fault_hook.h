#pragma once

#include <cstdint>

#include "qmlp/tensor.h"

// A planted fault in a kernel's output, so that the checks which should see it can be tested. Off,
// it costs a call and one relaxed load for each op.
namespace qmlp::testing {

enum class FaultSite : std::uint8_t { swiglu, linear };

// The call with this index, counted from 0 over the op's calls from now on, gets the last bit of
// one output element flipped. One fault at a time, for the whole process.
void plant_kernel_fault(FaultSite site, std::int64_t call_index) noexcept;
void clear_kernel_fault() noexcept;
// Whether the planted fault has struck since it was planted.
bool kernel_fault_struck() noexcept;

// Each op calls this once with its finished output, which is on the CPU and may have no rows.
void maybe_corrupt_output(FaultSite site, const MutableMatrixView& out) noexcept;

}  // namespace qmlp::testing
