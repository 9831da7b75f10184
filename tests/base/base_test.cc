// Conversions of the 16-bit types over every pattern, checked arithmetic, buffers, results, the
// pool.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "qmlp/cpu.h"
#include "qmlp/exceptions.h"
#include "qmlp/plan.h"
#include "qmlp/status.h"

namespace qmlp {
namespace {

// Neighbours in the type: what lies between them rounds to the nearer, ties to the even pattern.
template <class Widen, class Narrow>
void check_half_type(std::uint32_t infinity, Widen widen, Narrow narrow) {
  for (std::uint32_t i = 0; i <= infinity; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float value = widen(bits);
    ASSERT_EQ(narrow(value), bits);
    ASSERT_EQ(narrow(-value), bits | 0x8000u);
    if (i + 1 >= infinity) continue;
    const auto next = static_cast<std::uint16_t>(i + 1);
    const float high = widen(next);
    ASSERT_LT(value, high);
    const float middle = value + (high - value) / 2;
    ASSERT_EQ(narrow(middle), (i & 1) == 0 ? bits : next);
    ASSERT_EQ(narrow(std::nextafter(middle, 0.0f)), bits);
    ASSERT_EQ(narrow(std::nextafter(middle, high)), next);
  }
  for (std::uint32_t i = infinity + 1; i < 0x8000u; ++i) {
    const float value = widen(static_cast<std::uint16_t>(i));
    ASSERT_TRUE(std::isnan(value));
    ASSERT_GT(narrow(value) & 0x7FFFu, infinity);  // still NaN
  }
}

TEST(Float16, EveryPatternAndEveryTie) {
  check_half_type(0x7C00u, f16_to_f32, f32_to_f16);
  EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24f);
  EXPECT_EQ(f16_to_f32(0x7BFF), 65504.0f);
  EXPECT_EQ(f32_to_f16(65519.996f), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7C00);
  EXPECT_EQ(f32_to_f16(0x1p-25f), 0x0000);  // a tie with zero, which is even
  EXPECT_EQ(f32_to_f16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
}

TEST(Bfloat16, EveryPatternAndEveryTie) {
  check_half_type(0x7F80u, bf16_to_f32, f32_to_bf16);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::denorm_min()), 0x0000);
}

TEST(Float16, ElementsOfAnyAlignment) {
  unsigned char bytes[13] = {};
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    store_float(bytes + 1, type, 1, -1.5f);
    EXPECT_EQ(load_float(bytes + 1, type, 1), -1.5f);
    EXPECT_EQ(load_float(bytes + 1, type, 0), 0.0f);
    std::memset(bytes, 0, sizeof(bytes));
  }
  EXPECT_EQ(round_to(1.0f + 0x1p-9f, DType::bf16), 1.0f);
  EXPECT_EQ(round_to(1.0f + 0x1p-9f, DType::f32), 1.0f + 0x1p-9f);
}

TEST(Checked, OverflowIsEmpty) {
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(checked_mul<std::int64_t>(3, 5), 15);
  EXPECT_FALSE(checked_mul<std::int64_t>(kMost / 2, 3));
  EXPECT_FALSE(checked_add<std::int64_t>(kMost, 1));
  EXPECT_FALSE(checked_mul<std::uint64_t>(std::uint64_t{1} << 33, std::uint64_t{1} << 31));
  EXPECT_EQ(ceil_div(0, 16), 0);
  EXPECT_EQ(ceil_div(17, 16), 2);
  EXPECT_EQ(round_up(17, 16), 32);
}

TEST(AlignedBuffer, AlignmentAndRefusal) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{3} << 20}) {
    auto buffer = AlignedBuffer::allocate(bytes);
    ASSERT_TRUE(buffer);
    EXPECT_EQ(buffer->size(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 256, 0u);
    if (bytes != 0) std::memset(buffer->data(), 1, bytes);
    AlignedBuffer moved = *std::move(buffer);
    EXPECT_EQ(moved.size(), bytes);
  }
  const auto refused = AlignedBuffer::allocate(std::numeric_limits<std::size_t>::max());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::out_of_memory);
}

Result<int> half_of(int value) {
  if (value % 2 != 0) return Error{Errc::invalid_argument, concat("value: is ", value, ", odd")};
  return value / 2;
}
Result<int> quarter_of(int value) {
  QMLP_ASSIGN(const int half, half_of(value));
  QMLP_ASSIGN(const int quarter, half_of(half));
  return quarter;
}
Status check_eighth(int value) {
  QMLP_TRY(quarter_of(value));
  QMLP_TRY(half_of(*quarter_of(value)));
  return {};
}

TEST(Status, TryPassesErrorsOn) {
  EXPECT_EQ(*quarter_of(12), 3);
  ASSERT_FALSE(quarter_of(6));
  EXPECT_EQ(quarter_of(6).error().message, "value: is 3, odd");
  EXPECT_TRUE(check_eighth(16));
  EXPECT_FALSE(check_eighth(12));
  EXPECT_EQ(value_or_throw(half_of(8)), 4);
  try {
    value_or_throw(half_of(9));
    FAIL() << "no exception";
  } catch (const Exception& error) {
    EXPECT_EQ(error.code(), Errc::invalid_argument);
    EXPECT_STREQ(error.what(), "value: is 9, odd");
  }
}

TEST(Names, AreDistinct) {
  std::set<std::string> codes;
  for (int i = 0; i <= static_cast<int>(Errc::internal); ++i) {
    codes.insert(to_string(static_cast<Errc>(i)));
  }
  EXPECT_EQ(codes.size(), static_cast<std::size_t>(Errc::internal) + 1);
  EXPECT_STREQ(to_string(DType::bf16), "bf16");
  EXPECT_STREQ(to_string(Isa::sm90a), "sm90a");
  EXPECT_STREQ(to_string(Accumulation::tensor), "tensor");
  EXPECT_STREQ(to_string(Precision::wide), "wide");
}

TEST(ThreadPool, RunsEachTaskOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    auto pool = ThreadPool::create(threads);
    ASSERT_TRUE(pool);
    EXPECT_EQ((*pool)->num_threads(), threads);
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::vector<int> owner(static_cast<std::size_t>(tasks), -1);
      (*pool)->for_each(tasks, [&](std::int64_t index, int thread) {
        runs[static_cast<std::size_t>(index)].fetch_add(1);
        owner[static_cast<std::size_t>(index)] = thread;
      });
      for (std::int64_t i = 0; i < tasks; ++i) {
        const auto at = static_cast<std::size_t>(i);
        ASSERT_EQ(runs[at].load(), 1) << threads << " threads, task " << i;
        ASSERT_GE(owner[at], 0);
        ASSERT_LT(owner[at], threads);
      }
    }
  }
  const auto refused = ThreadPool::create(0);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::invalid_argument);
}

TEST(ThreadPool, CallsFromSeveralThreadsQueue) {
  auto pool = ThreadPool::create(3);
  ASSERT_TRUE(pool);
  std::vector<std::int64_t> sums(6);
  std::vector<std::thread> callers;
  for (std::int64_t& sum : sums) {
    callers.emplace_back([&pool, &sum] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<std::int64_t> total{0};
        (*pool)->for_each(10, [&](std::int64_t index, int) { total += index; });
        sum += total;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::int64_t sum : sums) EXPECT_EQ(sum, 200 * 45);
}

TEST(ThreadPool, DefaultThreadsFitTheMachine) {
  EXPECT_GE(default_num_threads(), 1);
  EXPECT_LE(default_num_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace
}  // namespace qmlp
