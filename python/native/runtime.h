#pragma once

#include <cstddef>
#include <cstdint>

// What the extension modules of the package share: one thread pool for the process, and scratch.
// `_native` owns it and hands it to the others in a capsule.
namespace qmlp_python {

struct Runtime {
  // Raised whenever this struct changes; modules of one wheel always agree.
  std::int32_t version = 1;
  // A qmlp_pool with one more reference; null when threads cannot be had (see qmlp_last_error).
  void* (*acquire_pool)() = nullptr;
  void (*release_pool)(void* held) = nullptr;
  void* (*pool_of)(void* held) = nullptr;  // the qmlp_pool of an acquired reference
  // Scratch of the calling thread, aligned for an op; null when memory is short.
  void* (*scratch)(std::size_t bytes) = nullptr;
};
constexpr const char* kRuntimeCapsule = "qmlp._native.runtime";

const Runtime& runtime() noexcept;

// The pool for the length of one call, however often its size is set meanwhile.
class PoolHold {
 public:
  explicit PoolHold(const Runtime& runtime) noexcept
      : runtime_(runtime), held_(runtime.acquire_pool()) {}
  ~PoolHold() {
    if (held_ != nullptr) runtime_.release_pool(held_);
  }
  PoolHold(const PoolHold&) = delete;
  PoolHold& operator=(const PoolHold&) = delete;
  void* pool() const noexcept { return held_ == nullptr ? nullptr : runtime_.pool_of(held_); }

 private:
  const Runtime& runtime_;
  void* held_;
};

int num_threads();
// 0: the default. Calls that run already keep the old pool until they end.
void set_num_threads(int count);
// In a forked child: the parent's threads are not here, so its pool is left alone, unfreed.
void forget_after_fork() noexcept;

}  // namespace qmlp_python
