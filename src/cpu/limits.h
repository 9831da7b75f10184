#pragma once

#include <stdint.h>

// The machine's own limits, as loops of one instruction set: what `qmlp bench` measures against.
// Plain types only, since files built for one instruction set include this.
namespace qmlp::cpu {

struct LimitKernels {
  // `iterations` steps of independent f32 multiply-add chains; *sink depends on all of them.
  void (*multiply_add)(int64_t iterations, float* sink);
  int64_t flops_per_iteration;
  // Reads all bytes, a multiple of 1024, once; *sink depends on all of them.
  void (*read)(const void* data, int64_t bytes, uint32_t* sink);
};

const LimitKernels* limits_portable();
#if defined(__x86_64__)
const LimitKernels* limits_avx2();
const LimitKernels* limits_avx512();
#endif

}  // namespace qmlp::cpu
