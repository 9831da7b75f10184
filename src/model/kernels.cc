#include "model/kernels.h"

namespace qmlp {

static_assert(static_cast<int>(DType::f32) == cpu::kF32 &&
              static_cast<int>(DType::f16) == cpu::kF16 &&
              static_cast<int>(DType::bf16) == cpu::kBf16);

const cpu::ModelKernels* find_model_kernels(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return cpu::model_kernels_portable();
#if defined(__x86_64__)
    case Isa::avx2:
      return cpu::model_kernels_avx2();
    case Isa::avx512:
      return cpu::model_kernels_avx512();
#endif
    default:
      return nullptr;
  }
}

}  // namespace qmlp
