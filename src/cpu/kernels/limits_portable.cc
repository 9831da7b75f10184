#include <stdint.h>
#include <string.h>

#include "cpu/limits.h"

namespace qmlp::cpu {
namespace {

// 2 x 16 lanes: 8 SSE registers where the compiler vectorises, and a call for each fma elsewhere.
constexpr int kChains = 2;

// Each file uses the ones before it.
// clang-format off
#include "cpu/kernels/simd_portable.h"
#include "cpu/kernels/limits_inl.h"
// clang-format on

}  // namespace

const LimitKernels* limits_portable() { return &kLimits; }

}  // namespace qmlp::cpu
