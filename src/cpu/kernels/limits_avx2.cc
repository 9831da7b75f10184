#include <immintrin.h>
#include <stdint.h>

#include "cpu/limits.h"

namespace qmlp::cpu {
namespace {

// 10 chains in 16 registers: two pipes of 4 or 5 cycles.
constexpr int kChains = 5;

// Each file uses the ones before it.
// clang-format off
#include "cpu/kernels/simd_avx2.h"
#include "cpu/kernels/limits_inl.h"
// clang-format on

}  // namespace

const LimitKernels* limits_avx2() { return &kLimits; }

}  // namespace qmlp::cpu
