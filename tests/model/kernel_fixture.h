#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/float16.h"
#include "kernels/random.h"
#include "model/kernels.h"

namespace qmlp::test {

// Values of one dtype in exactly sized storage, so that a sanitizer sees a read past the end.
struct Values {
  Values(DType type, std::int64_t n) : dtype(type), count(n), bytes(n * size_of(type)) {}
  float at(std::int64_t i) const { return load_float(bytes.data(), dtype, i); }
  void set(std::int64_t i, float value) { store_float(bytes.data(), dtype, i, value); }
  void fill_normal(Random& random, double scale = 1.0) {
    for (std::int64_t i = 0; i < count; ++i) set(i, static_cast<float>(scale * random.normal()));
  }
  void fill(float value) {
    for (std::int64_t i = 0; i < count; ++i) set(i, value);
  }

  DType dtype;
  std::int64_t count;
  std::vector<std::byte> bytes;
};

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

// Half the gap between neighbours near 1: one rounding's relative error.
inline double unit_roundoff(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}
// The absolute error of a rounding to a subnormal.
inline double least_half(DType dtype) { return dtype == DType::f16 ? 0x1p-25 : 0x1p-140; }

struct NamedKernels {
  Isa isa;
  const cpu::ModelKernels* kernels;
};

// Every instruction set that this machine runs; says which it leaves out.
inline std::vector<NamedKernels> usable_kernels() {
  const Isa best = host_facts().isa;
  std::vector<NamedKernels> found = {{Isa::portable, find_model_kernels(Isa::portable)}};
  for (const Isa isa : {Isa::avx2, Isa::avx512}) {
    const bool usable = isa == best || (isa == Isa::avx2 && best == Isa::avx512);
    const cpu::ModelKernels* kernels = find_model_kernels(isa);
    if (usable && kernels != nullptr) {
      found.push_back({isa, kernels});
    } else {
      std::printf("skipped: %s is missing on this machine or in this build\n", to_string(isa));
    }
  }
  return found;
}

}  // namespace qmlp::test
