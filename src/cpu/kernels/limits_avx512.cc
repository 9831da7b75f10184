#include <immintrin.h>
#include <stdint.h>

#include "cpu/limits.h"

namespace qmlp::cpu {
namespace {

// Two pipes of 4 cycles.
constexpr int kChains = 12;

// Each file uses the ones before it.
// clang-format off
#include "cpu/kernels/simd_avx512.h"
#include "cpu/kernels/limits_inl.h"
// clang-format on

}  // namespace

const LimitKernels* limits_avx512() { return &kLimits; }

}  // namespace qmlp::cpu
