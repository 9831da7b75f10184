#pragma once

#include <cstdint>
#include <memory>

#include "qmlp/ops.h"
#include "qmlp/status.h"

namespace qmlp {

// Threads that run an op's tasks. The calling thread is one of them. A pool serves one call at a
// time; concurrent calls from several threads queue.
class ThreadPool {
 public:
  // num_threads >= 1.
  static Result<std::unique_ptr<ThreadPool>> create(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept;
  // Calls task(context, index, thread) for index 0..num_tasks-1, each once, thread in
  // [0, num_threads); calls of one `thread` follow each other. A thread starts with a contiguous
  // range of indices and then helps the others. Returns when all are done.
  // The task may not throw.
  using Task = void (*)(void* context, std::int64_t index, int thread);
  void run(std::int64_t num_tasks, Task task, void* context) noexcept;

  template <class Function>
  void for_each(std::int64_t num_tasks, Function&& function) noexcept {
    run(
        num_tasks,
        [](void* context, std::int64_t index, int thread) {
          (*static_cast<std::remove_reference_t<Function>*>(context))(index, thread);
        },
        &function);
  }

 private:
  struct Impl;
  explicit ThreadPool(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// A stream whose ops run on the pool's threads and are finished when the call returns.
inline Stream cpu_stream(ThreadPool& pool) noexcept { return {Device{}, &pool}; }

// Threads to use by default: the least of the affinity mask, the cgroup's quota and the online
// CPUs.
int default_num_threads() noexcept;

}  // namespace qmlp
