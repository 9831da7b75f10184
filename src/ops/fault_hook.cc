#include "ops/fault_hook.h"

#include <atomic>
#include <cstddef>

namespace qmlp::testing {
namespace {

constexpr int kOff = -1;
std::atomic<int> armed_site{kOff};
std::atomic<std::int64_t> calls_left{0};
std::atomic<bool> struck{false};

}  // namespace

void plant_kernel_fault(FaultSite site, std::int64_t call_index) noexcept {
  calls_left.store(call_index, std::memory_order_relaxed);
  struck.store(false, std::memory_order_relaxed);
  armed_site.store(static_cast<int>(site), std::memory_order_release);
}

void clear_kernel_fault() noexcept { armed_site.store(kOff, std::memory_order_relaxed); }

bool kernel_fault_struck() noexcept { return struck.load(std::memory_order_relaxed); }

void maybe_corrupt_output(FaultSite site, const MutableMatrixView& out) noexcept {
  if (armed_site.load(std::memory_order_relaxed) != static_cast<int>(site)) return;
  if (out.rows < 1 || out.cols < 1) return;
  if (calls_left.fetch_sub(1, std::memory_order_relaxed) != 0) return;
  const std::int64_t element = (out.rows - 1) * out.row_stride + out.cols / 2;
  std::byte* last_bits = out.data + element * static_cast<std::int64_t>(size_of(out.dtype));
  *last_bits ^= std::byte{1};  // little endian: the significand's last bit
  struck.store(true, std::memory_order_relaxed);
  clear_kernel_fault();
}

}  // namespace qmlp::testing
