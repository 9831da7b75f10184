// The forward's small ops for plain C++. Internal linkage only: see model_args.h.
#include <stdint.h>
#include <string.h>

#include "cpu/kernels/model_args.h"

namespace qmlp::cpu {
namespace {

// Each file uses the ones before it.
// clang-format off
#include "cpu/kernels/simd_portable.h"
#include "cpu/kernels/math_inl.h"
#include "cpu/kernels/element_inl.h"
#include "cpu/kernels/elementwise_inl.h"
#include "cpu/kernels/attention_inl.h"
// clang-format on

const ModelKernels kModelKernels = {rms_norm, rope_append, attention, find_non_finite,
                                    widen,    scale,       add_scaled};

}  // namespace

const ModelKernels* model_kernels_portable() { return &kModelKernels; }

}  // namespace qmlp::cpu
