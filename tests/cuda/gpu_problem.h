#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "qmlp/cuda.h"
#include "qmlp/qmlp.h"

// Random problems for the GPU programs, and the small tools they share.
namespace gpu {

#define GPU_CHECK(expression)                                                                 \
  do {                                                                                        \
    const cudaError_t gpu_error = (expression);                                               \
    if (gpu_error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(gpu_error)); \
      std::exit(3);                                                                           \
    }                                                                                         \
  } while (false)

template <class T>
T value(qmlp::Result<T> result) {
  if (!result) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(3);
  }
  return *std::move(result);
}
inline void value(const qmlp::Status& status) {
  if (!status) {
    std::fprintf(stderr, "%s\n", status.error().message.c_str());
    std::exit(3);
  }
}

struct Buffer {  // device memory
  explicit Buffer(std::size_t n) : bytes(n) { GPU_CHECK(cudaMalloc(&data, n == 0 ? 16 : n)); }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* at(std::size_t offset = 0) const { return static_cast<std::byte*>(data) + offset; }
  void* data = nullptr;
  std::size_t bytes;
};

// A bit pattern of bf16 or f16 as a number, and whether two are the same result: any NaN is NaN.
float widened(std::uint16_t bits, qmlp::DType type);
bool same(std::uint16_t a, std::uint16_t b, qmlp::DType type);

using Rng = std::mt19937_64;

// Weights that look like a model's: normal values quantized, or random codes and scales when large.
qmlp::QuantizedTensor random_weight(Rng& rng, std::int64_t N, std::int64_t K,
                                    const qmlp::QuantSpec& spec);
// Normal activations with a few outliers, of the type's bit patterns.
std::vector<std::uint16_t> random_rows(Rng& rng, std::int64_t count, qmlp::DType type);

int run_bench(const std::vector<const char*>& arguments);
int run_robust();
int run_pack(const std::vector<const char*>& arguments);  // "seconds": cut short
int run_vectors(const std::vector<const char*>& arguments);

}  // namespace gpu
