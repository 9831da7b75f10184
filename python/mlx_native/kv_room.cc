#include "kv_room.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>

#include "array_holders.h"
#include "heads.h"
#include "layer.h"

namespace qmlp_mlx {

namespace mx = mlx::core;

namespace {

// Elements of 16 bytes.
constexpr int kUnit = 8;

mx::Strides strides_in_room(const mx::array& a, int capacity) {
  const std::int64_t width = a.shape(3);
  return {std::int64_t{a.shape(1)} * capacity * width, capacity * width, width, 1};
}

// The rooms that are in use, and how far arrays cover them.
class Rooms {
 public:
  // The capacity of the room that `before` lies in, with positions [offset, end) of it taken; 0 if
  // they are not free.
  int extend(const mx::array& before, long holders, int offset, int end) {
    const std::shared_ptr<mx::array::Data>& data = before.data_shared_ptr();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = rooms_.find(data.get());
    if (at == rooms_.end()) return 0;
    Room& room = at->second;
    // A safeguard: the address cannot be that of an earlier one while the table refers to it.
    if (room.memory.owner_before(data) || data.owner_before(room.memory)) return 0;
    if (end > room.capacity || before.offset() != 0 ||
        before.strides() != strides_in_room(before, room.capacity)) {
      return 0;
    }
    // Whoever holds the array could have the host read it while our kernel is still to run: MLX
    // then moves the memory of all arrays that share it, and waits for this one's kernels alone.
    if (holders_of(before) != holders) return 0;
    // That is, the array ends where the rows that are taken end.
    const bool is_free = before.shape(2) <= room.end && room.end <= offset;
    // Kernels that have not run yet hold what they read.
    if (!is_free && data.use_count() != 1) return 0;
    room.end = end;
    return room.capacity;
  }

  void open(const mx::array& memory, int end, int capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (rooms_.size() >= sweep_at_) {
      std::erase_if(rooms_, [](const auto& held) { return held.second.memory.expired(); });
      sweep_at_ = std::max<std::size_t>(256, 2 * rooms_.size());
    }
    rooms_[memory.data_shared_ptr().get()] = {memory.data_shared_ptr(), end, capacity};
  }

 private:
  struct Room {
    std::weak_ptr<mx::array::Data> memory;
    int end = 0;
    int capacity = 0;
  };
  std::mutex mutex_;
  std::unordered_map<const mx::array::Data*, Room> rooms_;
  std::size_t sweep_at_ = 256;
};

Rooms& rooms() {
  static auto* const all = new Rooms;  // arrays outlive statics
  return *all;
}

// Makes `out` the first positions of the memory of `room`.
void show(mx::array& out, const mx::array& room, int capacity) {
  const mx::Strides strides = strides_in_room(out, capacity);
  std::size_t span = 1;
  for (int axis = 0; axis < 4; ++axis) {
    span += static_cast<std::size_t>((out.shape(axis) - 1) * strides[axis]);
  }
  mx::array::Flags flags = {};
  flags.contiguous = flags.row_contiguous = span == out.size();
  out.copy_shared_buffer(room, strides, flags, span);
}

bool in_units(const mx::array& a) {
  return a.strides(3) == 1 && a.strides(0) % kUnit == 0 && a.strides(1) % kUnit == 0 &&
         a.strides(2) % kUnit == 0 && reinterpret_cast<std::uintptr_t>(gpu::pointer(a)) % 16 == 0;
}

// The array itself or a copy, so that rows can be read in units.
mx::array readable(gpu::Recording& on, const mx::array& a) {
  if (in_units(a)) return a;
  mx::array seen = on.make(a.shape(), a.dtype());
  // MLX hands on what it takes for contiguous, wherever it begins.
  seen.copy_shared_buffer(a, a.strides(), {}, a.data_size());
  return on.contiguous(seen);
}

}  // namespace

void place_in_rooms(gpu::Recording& on, const mx::array* before, long holders, int offset,
                    mx::array* keys_and_values) {
  const mx::Shape& shape = keys_and_values[0].shape();
  const int end = shape[2], capacity = whole_steps(end);
  CarryArgs carry = {};
  unsigned count = 0;
  mx::array* made[2] = {};
  for (int i = 0; i < 2; ++i) {
    mx::array& out = keys_and_values[i];
    if (before != nullptr) {
      const int held = rooms().extend(before[i], holders, offset, end);
      if (held != 0) {
        show(out, before[i], held);
        on.keep(out);
        continue;
      }
    }
    const mx::array room = on.allocated({shape[0], shape[1], capacity, shape[3]}, out.dtype());
    show(out, room, capacity);
    rooms().open(room, end, capacity);
    if (before != nullptr && offset > 0) {
      const mx::array from = readable(on, before[i]);
      on.reads(from);
      carry.from[count] = gpu::pointer(from);
      for (int axis = 0; axis < 3; ++axis) {
        carry.from_strides[count][axis] = from.strides(axis) / kUnit;
      }
    }
    carry.to[count] = gpu::pointer(room);
    made[count++] = &out;
  }
  if (count == 0) return;
  carry.batch = shape[0];
  carry.heads = shape[1];
  carry.room = capacity;
  carry.width = shape[3] / kUnit;
  carry.kept = offset;
  carry.zeroed = end;
  void* const function = carry_function();
  if (function == nullptr) throw std::runtime_error("QmlpLayer: no kernel for this GPU");
  const std::int64_t units = std::int64_t{carry.batch} * carry.heads * carry.room * carry.width;
  const auto blocks = static_cast<std::uint32_t>(
      std::min<std::int64_t>((units + kCarryBlock - 1) / kCarryBlock, 2048));
  void* params[] = {&carry};
  on.record({made[0], made[count - 1]},
            {function, {blocks, count, 1}, {kCarryBlock, 1, 1}, 0, params});
}

}  // namespace qmlp_mlx
