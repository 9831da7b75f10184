#include "cuda/ready_kernel.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda/choice.h"

namespace qmlp::cuda {
namespace {

// An open hash table that only grows; a kernel that finds no place is made ready at each launch.
struct Entry {
  std::atomic<std::uintptr_t> key{0};
  std::atomic<cudaFunction_t> function{nullptr};
};
constexpr std::size_t kEntries = 1 << 13, kProbes = 16;
Entry g_entries[kEntries];

cudaError_t make_ready(const void* kernel, const DeviceFacts& device, cudaFunction_t* function) {
  const int most = static_cast<int>(device.smem_bytes - kStaticSharedBytes);
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
      e != cudaSuccess) {
    return e;
  }
  return cudaGetFuncBySymbol(function, kernel);
}

}  // namespace

cudaError_t ready_kernel(const void* kernel, const DeviceFacts& device, cudaFunction_t* function) {
  // Host symbols are less than 2^48 and even.
  const std::uintptr_t key = reinterpret_cast<std::uintptr_t>(kernel) +
                             (static_cast<std::uintptr_t>(device.ordinal) << 48);
  std::size_t at = static_cast<std::size_t>((key * 0x9E3779B97F4A7C15u) >> 51);
  for (std::size_t i = 0; i < kProbes; ++i, at = (at + 1) % kEntries) {
    Entry& entry = g_entries[at];
    std::uintptr_t found = entry.key.load(std::memory_order_acquire);
    if (found == 0) {
      if (const cudaError_t e = make_ready(kernel, device, function); e != cudaSuccess) return e;
      if (!entry.key.compare_exchange_strong(found, key) && found != key) continue;
      entry.function.store(*function, std::memory_order_release);
      return cudaSuccess;
    }
    if (found != key) continue;
    *function = entry.function.load(std::memory_order_acquire);
    // Null while another thread makes it ready.
    return *function != nullptr ? cudaSuccess : make_ready(kernel, device, function);
  }
  return make_ready(kernel, device, function);
}

}  // namespace qmlp::cuda
