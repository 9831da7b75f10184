#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/random.h"
#include "qmlp/cpu.h"

namespace qmlp::test {
namespace {

TEST(ThreadPool, DoesEachTaskOnce) {
  Random random(3);
  for (const int threads : {1, 2, 3, 8, 17}) {
    auto pool = *ThreadPool::create(threads);
    EXPECT_EQ(pool->num_threads(), threads);
    for (int call = 0; call < 3000; ++call) {
      const std::int64_t count = random.below(70);
      std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
      std::vector<int> of_thread(static_cast<std::size_t>(threads));  // plain: one at a time
      pool->for_each(count, [&](std::int64_t index, int thread) {
        ASSERT_GE(index, 0);
        ASSERT_LT(index, count);
        ++done[static_cast<std::size_t>(index)];
        ++of_thread[static_cast<std::size_t>(thread)];
      });
      std::int64_t total = 0;
      for (const int each : of_thread) total += each;
      ASSERT_EQ(total, count);
      for (const auto& each : done) ASSERT_EQ(each.load(), 1);
    }
  }
}

TEST(ThreadPool, ManyTasks) {
  auto pool = *ThreadPool::create(4);
  std::atomic<std::int64_t> sum{0};
  constexpr std::int64_t kTasks = 1000003;
  pool->for_each(kTasks,
                 [&](std::int64_t index, int) { sum.fetch_add(index, std::memory_order_relaxed); });
  EXPECT_EQ(sum.load(), kTasks * (kTasks - 1) / 2);
}

TEST(ThreadPool, CallsFromSeveralThreadsQueue) {
  auto pool = *ThreadPool::create(3);
  std::atomic<int> inside{0};
  std::atomic<std::int64_t> done{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int call = 0; call < 500; ++call) {
        int mine = 0;  // written by one call's threads, read after it
        std::atomic<int> count{0};
        pool->for_each(7, [&](std::int64_t, int) {
          ++inside;
          ++count;
          ++done;
          --inside;
        });
        mine = count.load();
        ASSERT_EQ(mine, 7);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(inside.load(), 0);
  EXPECT_EQ(done.load(), 4 * 500 * 7);
}

// A thread that is held up in a task keeps nobody else: the others do the rest of its range.
TEST(ThreadPool, RangesOfBusyThreadsAreDoneByOthers) {
  auto pool = *ThreadPool::create(3);
  constexpr std::int64_t kTasks = 30;
  std::atomic<std::int64_t> done{0};
  bool all_others_done = false;
  pool->for_each(kTasks, [&](std::int64_t index, int) {
    if (index != 0) {
      ++done;
      return;
    }
    // The first task of the caller's range: the other 29 must be done while it runs.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (done.load() != kTasks - 1 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    all_others_done = done.load() == kTasks - 1;
  });
  EXPECT_TRUE(all_others_done);
}

TEST(ThreadPool, AfterAPause) {
  auto pool = *ThreadPool::create(4);
  for (int call = 0; call < 20; ++call) {
    std::atomic<int> done{0};
    pool->for_each(16, [&](std::int64_t, int) { ++done; });
    EXPECT_EQ(done.load(), 16);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the threads fall asleep
  }
}

TEST(ThreadPool, Refusals) {
  EXPECT_EQ(ThreadPool::create(0).error().message, "threads is 0, needs 1 to 1024");
  EXPECT_EQ(ThreadPool::create(2000).error().message, "threads is 2000, needs 1 to 1024");
}

}  // namespace
}  // namespace qmlp::test
