#pragma once

#include "cpu/kernels/model_args.h"
#include "qmlp/plan.h"

namespace qmlp {

// The forward's small ops for an instruction set; null when this build does not hold it.
const cpu::ModelKernels* find_model_kernels(Isa isa) noexcept;

}  // namespace qmlp
