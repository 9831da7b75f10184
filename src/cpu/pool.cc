#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qmlp/cpu.h"

namespace qmlp {
namespace {

// About 30 us: longer than the gap between two ops of a forward, shorter than a scheduler slice.
constexpr int kSpins = 1500;

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void spin_or_wait(const std::atomic<std::uint32_t>& value, std::uint32_t old) noexcept {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

// One thread's range of a call's tasks. Its owner takes tasks from it one by one, and so does any
// thread that has finished its own range, so that nobody waits for a thread that still sleeps.
// Aligned to two cache lines: the hardware fetches lines in pairs.
struct alignas(128) Range {
  // The call's number in the upper half, tasks taken in the lower.
  std::atomic<std::uint64_t> taken{0};
};
constexpr std::uint64_t kClosed = 0xFFFFFFFF;
constexpr std::int64_t kMostTasks = std::int64_t{1} << 30;  // of one call

std::uint64_t state_of(std::uint32_t call, std::uint64_t taken) noexcept {
  return (std::uint64_t{call} << 32) | taken;
}

}  // namespace

// pthreads, since std::thread reports a system without threads by an exception.
struct ThreadPool::Impl {
  struct Worker {
    Impl* pool;
    int number;
    pthread_t thread;
  };

  int num_threads = 1;
  std::vector<Worker> workers;
  std::mutex one_call;
  std::unique_ptr<Range[]> ranges;

  alignas(128) std::atomic<std::uint32_t> generation{0};  // the last call's number
  std::atomic<bool> stop{false};
  // The call. A thread that is late may read parts of the next one's, and then takes no task.
  std::atomic<std::int64_t> first_task{0};
  std::atomic<std::int64_t> num_tasks{0};
  std::atomic<Task> task{nullptr};
  std::atomic<void*> context{nullptr};
  alignas(128) std::atomic<std::uint32_t> tasks_left{0};

  std::uint32_t drain(std::uint32_t call, int range, int thread) noexcept;
  void take_part(std::uint32_t call, int thread) noexcept;
  void work(int thread) noexcept;
  void run(std::int64_t first, std::int64_t count, Task function, void* its_context) noexcept;
};

// Does tasks of a range until none is left to take; their number.
std::uint32_t ThreadPool::Impl::drain(std::uint32_t call, int range, int thread) noexcept {
  std::atomic<std::uint64_t>& taken = ranges[static_cast<std::size_t>(range)].taken;
  std::uint32_t done = 0;
  std::uint64_t state = taken.load(std::memory_order_acquire);
  while (state >> 32 == call) {
    const std::int64_t count = num_tasks.load(std::memory_order_relaxed);
    const std::int64_t begin = count * range / num_threads;
    const std::int64_t end = count * (range + 1) / num_threads;
    const std::int64_t index = begin + static_cast<std::int64_t>(state & kClosed);
    const std::int64_t first = first_task.load(std::memory_order_relaxed);
    const Task function = task.load(std::memory_order_relaxed);
    void* const its_context = context.load(std::memory_order_relaxed);
    if (index >= end) break;
    // What was read is this call's if the state has not changed: `run` closes all ranges before it
    // writes the next one's.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!taken.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
      continue;
    }
    function(its_context, first + index, thread);
    ++done;
    state = taken.load(std::memory_order_acquire);
  }
  return done;
}

// The own range first, then the others'.
void ThreadPool::Impl::take_part(std::uint32_t call, int thread) noexcept {
  std::uint32_t done = 0;
  for (int i = 0; i < num_threads; ++i) done += drain(call, (thread + i) % num_threads, thread);
  if (done != 0 && tasks_left.fetch_sub(done, std::memory_order_acq_rel) == done) {
    tasks_left.notify_one();
  }
}

void ThreadPool::Impl::work(int thread) noexcept {
  std::uint32_t seen = 0;
  while (true) {
    spin_or_wait(generation, seen);
    seen = generation.load(std::memory_order_acquire);
    if (stop.load(std::memory_order_relaxed)) return;
    take_part(seen, thread);
  }
}

void ThreadPool::Impl::run(std::int64_t first, std::int64_t count, Task function,
                           void* its_context) noexcept {
  const std::uint32_t call = generation.load(std::memory_order_relaxed) + 1;
  const auto set_all = [&](std::uint64_t number) {
    for (int i = 0; i < num_threads; ++i) {
      ranges[static_cast<std::size_t>(i)].taken.store(state_of(call, number),
                                                      std::memory_order_release);
    }
  };
  set_all(kClosed);
  std::atomic_thread_fence(std::memory_order_release);
  first_task.store(first, std::memory_order_relaxed);
  num_tasks.store(count, std::memory_order_relaxed);
  task.store(function, std::memory_order_relaxed);
  context.store(its_context, std::memory_order_relaxed);
  tasks_left.store(static_cast<std::uint32_t>(count), std::memory_order_relaxed);
  set_all(0);
  // A full barrier, not a plain store: notify_all looks whether somebody waits, and must not do so
  // before the new number can be seen.
  generation.exchange(call, std::memory_order_seq_cst);
  generation.notify_all();
  take_part(call, 0);
  for (std::uint32_t left = tasks_left.load(std::memory_order_acquire); left != 0;
       left = tasks_left.load(std::memory_order_acquire)) {
    spin_or_wait(tasks_left, left);
  }
}

ThreadPool::ThreadPool(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(int num_threads) {
  constexpr int kMaxThreads = 1024;
  if (num_threads < 1 || num_threads > kMaxThreads) {
    return Error{Errc::invalid_argument,
                 "threads is " + std::to_string(num_threads) + ", needs 1 to 1024"};
  }
  auto impl = std::make_unique<Impl>();
  impl->num_threads = num_threads;
  impl->ranges = std::make_unique<Range[]>(static_cast<std::size_t>(num_threads));
  std::unique_ptr<ThreadPool> pool(new ThreadPool(std::move(impl)));
  std::vector<Impl::Worker>& workers = pool->impl_->workers;
  workers.reserve(static_cast<std::size_t>(num_threads));  // the threads hold addresses in it
  for (int t = 1; t < num_threads; ++t) {
    Impl::Worker& worker = workers.emplace_back(Impl::Worker{pool->impl_.get(), t, {}});
    const int code = pthread_create(
        &worker.thread, nullptr,
        [](void* its) -> void* {
          static_cast<Impl::Worker*>(its)->pool->work(static_cast<Impl::Worker*>(its)->number);
          return nullptr;
        },
        &worker);
    if (code != 0) {
      workers.pop_back();
      return Error{Errc::device, "threads is " + std::to_string(num_threads) +
                                     ", the system starts no more than " + std::to_string(t) +
                                     ": " + std::strerror(code)};
    }
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  if (impl_ == nullptr) return;
  impl_->stop.store(true, std::memory_order_relaxed);
  impl_->generation.fetch_add(1, std::memory_order_release);
  impl_->generation.notify_all();
  for (const Impl::Worker& worker : impl_->workers) pthread_join(worker.thread, nullptr);
}

int ThreadPool::num_threads() const noexcept { return impl_->num_threads; }

void ThreadPool::run(std::int64_t num_tasks, Task task, void* context) noexcept {
  if (num_tasks <= 0) return;
  if (impl_->num_threads == 1 || num_tasks == 1) {
    for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i, 0);
    return;
  }
  const std::lock_guard<std::mutex> lock(impl_->one_call);
  for (std::int64_t first = 0; first < num_tasks; first += kMostTasks) {
    impl_->run(first, std::min(kMostTasks, num_tasks - first), task, context);
  }
}

}  // namespace qmlp
