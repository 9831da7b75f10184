#include "machine_limits.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/aligned_buffer.h"
#include "context.h"
#include "cpu/limits.h"

namespace qmlp::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

const cpu::LimitKernels& kernels_for(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return *cpu::limits_avx512();
  if (isa == Isa::avx2) return *cpu::limits_avx2();
#else
  (void)isa;
#endif
  return *cpu::limits_portable();
}

struct alignas(64) Sink {  // one cache line a thread
  float value = 1.0f;
  std::uint32_t word = 0;
};

}  // namespace

MachineLimits measure_limits(Isa isa, std::size_t buffer_bytes, ThreadPool& pool) {
  const cpu::LimitKernels& kernels = kernels_for(isa);
  const int threads = pool.num_threads();
  MachineLimits limits;
  limits.threads = threads;
  std::vector<Sink> sinks(static_cast<std::size_t>(threads));

  constexpr std::size_t kBlock = 1024;
  const std::size_t share = buffer_bytes / static_cast<std::size_t>(threads) / kBlock * kBlock;
  AlignedBuffer buffer =
      value_or_throw(AlignedBuffer::allocate(share * static_cast<std::size_t>(threads)));
  const auto part = [&](std::int64_t task) {
    return buffer.data() + static_cast<std::size_t>(task) * share;
  };
  pool.for_each(threads, [&](std::int64_t task, int) { std::memset(part(task), 0x5A, share); });
  // In slices, so that other work on the machine spoils few of them; the buffer as a whole is cold
  // again when its turn comes round.
  constexpr std::size_t kSlice = std::size_t{32} << 20;
  for (int repeat = 0; repeat < 3; ++repeat) {
    check_stop();
    for (std::size_t begin = 0; begin < share; begin += kSlice) {
      const std::size_t bytes = std::min(kSlice, share - begin);
      const auto start = Clock::now();
      pool.for_each(threads, [&](std::int64_t task, int) {
        kernels.read(part(task) + begin, static_cast<std::int64_t>(bytes),
                     &sinks[static_cast<std::size_t>(task)].word);
      });
      const double rate = static_cast<double>(bytes) * threads / seconds_since(start);
      if (bytes == kSlice || share <= kSlice) {  // a short last slice is mostly start-up
        limits.read_bytes_per_s = std::max(limits.read_bytes_per_s, rate);
      }
    }
  }

  // Iterations for about 10 ms, found by doubling.
  std::int64_t iterations = 1024;
  for (double seconds = 0.0; seconds < 0.01; iterations *= 2) {
    const auto start = Clock::now();
    kernels.multiply_add(iterations, &sinks[0].value);
    seconds = seconds_since(start);
  }
  for (int repeat = 0; repeat < 16; ++repeat) {
    check_stop();
    const auto start = Clock::now();
    pool.for_each(threads, [&](std::int64_t task, int) {
      kernels.multiply_add(iterations, &sinks[static_cast<std::size_t>(task)].value);
    });
    const double rate = static_cast<double>(iterations * kernels.flops_per_iteration) * threads /
                        seconds_since(start);
    limits.flops_per_s = std::max(limits.flops_per_s, rate);
  }
  return limits;
}

}  // namespace qmlp::cli
