#include "runtime.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "errors.h"
#include "qmlp/c_api.h"

namespace qmlp_python {
namespace {

struct PoolDeleter {
  void operator()(qmlp_pool* pool) const noexcept { qmlp_pool_free(pool); }
};
using PoolPtr = std::shared_ptr<qmlp_pool>;

struct State {
  std::mutex mutex;
  PoolPtr pool;
  int wanted = 0;  // 0: the default
};
// Replaced, not cleaned up, after a fork: its mutex may be held by a thread that is gone.
std::atomic<State*> state{new State};

PoolPtr shared_pool() {
  State& now = *state.load(std::memory_order_acquire);
  const std::lock_guard<std::mutex> lock(now.mutex);
  if (now.pool == nullptr) {
    qmlp_pool* made = nullptr;
    if (qmlp_pool_create(now.wanted, &made) != QMLP_OK) return nullptr;
    now.pool = PoolPtr(made, PoolDeleter());
  }
  return now.pool;
}

void* acquire_pool() {
  PoolPtr pool = shared_pool();
  return pool == nullptr ? nullptr : new PoolPtr(std::move(pool));
}
void release_pool(void* held) { delete static_cast<PoolPtr*>(held); }
void* pool_of(void* held) { return static_cast<PoolPtr*>(held)->get(); }

// Grows to the largest call of its thread and goes with the thread.
struct Scratch {
  void* data = nullptr;
  std::size_t bytes = 0;
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data); }
};
thread_local Scratch scratch_of_thread;

void* scratch(std::size_t bytes) {
  Scratch& mine = scratch_of_thread;
  if (mine.data != nullptr && mine.bytes >= bytes) return mine.data;
  constexpr std::size_t kStep = QMLP_WORKSPACE_ALIGNMENT;
  if (bytes > SIZE_MAX - kStep) return nullptr;
  const std::size_t rounded = (bytes / kStep + 1) * kStep;
  void* made = std::aligned_alloc(kStep, rounded);
  if (made == nullptr) return nullptr;
  std::free(mine.data);
  mine.data = made;
  mine.bytes = rounded;
  return made;
}

constexpr Runtime kRuntime{1, acquire_pool, release_pool, pool_of, scratch};

}  // namespace

const Runtime& runtime() noexcept { return kRuntime; }

int num_threads() {
  const PoolPtr pool = shared_pool();
  if (pool == nullptr) throw_last_error(QMLP_DEVICE);
  return qmlp_pool_num_threads(pool.get());
}

void set_num_threads(int count) {
  qmlp_pool* made = nullptr;
  if (count < 0) count = -1;  // the library's own refusal
  check(qmlp_pool_create(count, &made));
  PoolPtr pool(made, PoolDeleter());
  State& now = *state.load(std::memory_order_acquire);
  {
    const std::lock_guard<std::mutex> lock(now.mutex);
    now.pool.swap(pool);
    now.wanted = count;
  }  // the old pool's threads are joined outside the lock
}

void forget_after_fork() noexcept {
  State* old = state.load(std::memory_order_acquire);
  State* fresh = new (std::nothrow) State;
  if (fresh == nullptr) return;
  fresh->wanted = old->wanted;
  state.store(fresh, std::memory_order_release);
}

}  // namespace qmlp_python
