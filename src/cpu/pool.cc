#include <atomic>
#include <mutex>
#include <thread>
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

}  // namespace

struct ThreadPool::Impl {
  int num_threads = 1;
  std::vector<std::thread> workers;
  std::mutex one_call;

  std::atomic<std::uint32_t> generation{0};
  std::atomic<std::uint32_t> running{0};
  std::atomic<bool> stop{false};
  std::int64_t num_tasks = 0;
  Task task = nullptr;
  void* context = nullptr;

  void run_share(int thread) noexcept {
    const std::int64_t begin = num_tasks * thread / num_threads;
    const std::int64_t end = num_tasks * (thread + 1) / num_threads;
    for (std::int64_t i = begin; i < end; ++i) task(context, i, thread);
  }

  void work(int thread) noexcept {
    std::uint32_t seen = 0;
    while (true) {
      spin_or_wait(generation, seen);
      seen = generation.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      run_share(thread);
      if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
    }
  }
};

ThreadPool::ThreadPool(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

Result<std::unique_ptr<ThreadPool>> ThreadPool::create(int num_threads) {
  constexpr int kMaxThreads = 1024;
  if (num_threads < 1 || num_threads > kMaxThreads) {
    return Error{Errc::invalid_argument,
                 "threads is " + std::to_string(num_threads) + ", needs 1 to 1024"};
  }
  auto impl = std::make_unique<Impl>();
  impl->num_threads = num_threads;
  std::unique_ptr<ThreadPool> pool(new ThreadPool(std::move(impl)));
  Impl* shared = pool->impl_.get();
  for (int t = 1; t < num_threads; ++t) {
    shared->workers.emplace_back([shared, t] { shared->work(t); });
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  if (impl_ == nullptr) return;
  impl_->stop.store(true, std::memory_order_relaxed);
  impl_->generation.fetch_add(1, std::memory_order_release);
  impl_->generation.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::num_threads() const noexcept { return impl_->num_threads; }

void ThreadPool::run(std::int64_t num_tasks, Task task, void* context) noexcept {
  if (num_tasks <= 0) return;
  if (impl_->num_threads == 1 || num_tasks == 1) {
    for (std::int64_t i = 0; i < num_tasks; ++i) task(context, i, 0);
    return;
  }
  const std::lock_guard<std::mutex> lock(impl_->one_call);
  impl_->num_tasks = num_tasks;
  impl_->task = task;
  impl_->context = context;
  impl_->running.store(static_cast<std::uint32_t>(impl_->num_threads - 1),
                       std::memory_order_relaxed);
  impl_->generation.fetch_add(1, std::memory_order_release);
  impl_->generation.notify_all();
  impl_->run_share(0);
  for (std::uint32_t left = impl_->running.load(std::memory_order_acquire); left != 0;
       left = impl_->running.load(std::memory_order_acquire)) {
    spin_or_wait(impl_->running, left);
  }
}

}  // namespace qmlp
