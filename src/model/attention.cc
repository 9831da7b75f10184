#include "model/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/byte_range.h"
#include "base/carver.h"
#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "model/kernels.h"
#include "model/key_blocks.h"
#include "qmlp/attention.h"

namespace qmlp {

namespace {

// Multiply-adds below which waking the other threads costs more than it saves.
constexpr std::int64_t kSerialWork = 16384;
// Positions by which a cache grows at least.
constexpr std::int64_t kLeastGrowth = 256;

// The longest cache, in positions.
constexpr std::int64_t kMostPositions = std::int64_t{1} << 40;

// Rows have memory, aligned to their elements.
template <class View>
Status check_memory(const char* name, const View& view) {
  if (view.rows < 0) {
    return Error{Errc::invalid_argument,
                 concat(name, ": has ", view.rows, " rows, must have at least 0")};
  }
  if (view.rows == 0) return {};
  if (view.data == nullptr) return Error{Errc::invalid_argument, concat(name, ": is null")};
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    return Error{Errc::invalid_argument, concat(name, ": is not aligned to its elements")};
  }
  return {};
}

const cpu::ModelKernels& host_kernels() noexcept {
  static const cpu::ModelKernels& kernels = *find_model_kernels(host_facts().isa);
  return kernels;
}

}  // namespace

std::int64_t attention_scratch_floats(std::int64_t score_stride, std::int64_t head_dim,
                                      std::int64_t v_row_stride) noexcept {
  return round_up(cpu::kAttentionRows * (score_stride + head_dim + v_row_stride), 64);
}

void attend(const cpu::ModelKernels& kernels, const cpu::AttentionArgs& args,
            std::int64_t num_kv_heads, std::int64_t M, float* scratch, ThreadPool& pool) noexcept {
  const std::int64_t scratch_floats =
      attention_scratch_floats(args.score_stride, args.head_dim, args.v_row_stride);
  const std::int64_t rows = M * args.heads_per_kv;
  // Rows of one call share each load of the cache; few calls are split further for idle threads.
  std::int64_t rows_per_call = cpu::kAttentionRows;
  while (rows_per_call > 1 && num_kv_heads * ceil_div(rows, rows_per_call) < pool.num_threads()) {
    --rows_per_call;
  }
  const std::int64_t tiles = ceil_div(rows, rows_per_call);
  auto run_one = [&](std::int64_t index, int thread) {
    // A thread's range of indices alternates early tiles and late ones: late ones see more keys.
    const std::int64_t turn = index / num_kv_heads;
    const std::int64_t tile = turn % 2 == 0 ? turn / 2 : tiles - 1 - turn / 2;
    const std::int64_t begin = tile * rows_per_call;
    kernels.attention(&args, index % num_kv_heads, begin, std::min(rows, begin + rows_per_call),
                      scratch + thread * scratch_floats);
  };
  const std::int64_t work = rows * num_kv_heads * args.head_dim * (args.position + M);
  if (work < kSerialWork) {
    for (std::int64_t index = 0; index < tiles * num_kv_heads; ++index) run_one(index, 0);
  } else {
    pool.for_each(tiles * num_kv_heads, run_one);
  }
}

struct AttentionCache::Impl {
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  DType dtype = DType::f32;
  std::int64_t v_row_stride = 0;  // elements
  std::int64_t capacity = 0;      // positions, a multiple of a block
  std::int64_t length = 0;
  AlignedBuffer
      data;  // keys [head, block, head_dim, 16], then values [head, position, v_row_stride]

  std::int64_t width() const noexcept { return num_kv_heads * head_dim; }
  std::int64_t element() const noexcept { return static_cast<std::int64_t>(size_of(dtype)); }
  std::int64_t k_head_stride() const noexcept { return capacity * head_dim; }
  std::int64_t v_head_stride() const noexcept { return capacity * v_row_stride; }
  std::byte* keys(std::int64_t head) const noexcept {
    return const_cast<std::byte*>(data.data()) + head * k_head_stride() * element();
  }
  std::byte* values(std::int64_t head) const noexcept {
    return keys(num_kv_heads) + head * v_head_stride() * element();
  }

  Status reserve(std::int64_t positions);
};

Status AttentionCache::Impl::reserve(std::int64_t positions) {
  if (positions <= capacity) return {};
  const auto too_large = [&]() -> Status {
    return Error{Errc::out_of_memory,
                 concat("attention cache of ", positions, " positions is too large")};
  };
  if (positions > kMostPositions) return too_large();
  Impl grown;
  grown.num_kv_heads = num_kv_heads;
  grown.head_dim = head_dim;
  grown.dtype = dtype;
  grown.v_row_stride = v_row_stride;
  grown.capacity =
      round_up(std::max(positions, capacity + std::max(capacity / 2, kLeastGrowth)), 16);
  Carver sizes(nullptr);
  sizes.take(grown.capacity, num_kv_heads, static_cast<std::size_t>(head_dim * element()));
  sizes.take(grown.capacity, num_kv_heads, static_cast<std::size_t>(v_row_stride * element()));
  if (!sizes.total()) return too_large();
  QMLP_ASSIGN(grown.data, AlignedBuffer::allocate(*sizes.total()));
  const std::int64_t held = round_up(length, cpu::kCacheBlock);
  for (std::int64_t head = 0; length > 0 && head < num_kv_heads; ++head) {
    std::memcpy(grown.keys(head), keys(head),
                static_cast<std::size_t>(held * head_dim * element()));
    std::memcpy(grown.values(head), values(head),
                static_cast<std::size_t>(length * v_row_stride * element()));
  }
  capacity = grown.capacity;
  data = std::move(grown.data);
  return {};
}

AttentionCache::AttentionCache(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
AttentionCache::~AttentionCache() = default;
std::int64_t AttentionCache::length() const noexcept { return impl_->length; }

Result<std::unique_ptr<AttentionCache>> AttentionCache::create(std::int64_t num_kv_heads,
                                                               std::int64_t head_dim, DType dtype) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  const auto check = [=](const char* name, std::int64_t value) -> Status {
    if (value >= 1 && value <= kMost) return {};
    return Error{Errc::invalid_argument,
                 concat(name, ": is ", value, ", must be from 1 to ", kMost)};
  };
  QMLP_TRY(check("num_kv_heads", num_kv_heads));
  QMLP_TRY(check("head_dim", head_dim));
  auto impl = std::make_unique<Impl>();
  impl->num_kv_heads = num_kv_heads;
  impl->head_dim = head_dim;
  impl->dtype = dtype;
  impl->v_row_stride = round_up(head_dim, 16);
  return std::unique_ptr<AttentionCache>(new AttentionCache(std::move(impl)));
}

Status AttentionCache::append(std::int64_t position, const MatrixView& k,
                              const MatrixView& v) noexcept {
  Impl& impl = *impl_;
  if (position < 0 || position > impl.length) {
    return Error{Errc::invalid_argument, concat("position: is ", position, ", must be from 0 to ",
                                                impl.length, ", the cache's length")};
  }
  const auto check = [&](const char* name, const MatrixView& rows) -> Status {
    if (rows.rows == k.rows && rows.cols == impl.width() && rows.row_stride == impl.width() &&
        rows.dtype == impl.dtype && rows.device.kind == DeviceKind::cpu) {
      return {};
    }
    return Error{Errc::invalid_argument,
                 concat(name, ": is ", rows.rows, " x ", rows.cols, " of ", to_string(rows.dtype),
                        ", needs ", k.rows, " x ", impl.width(), " of ", to_string(impl.dtype),
                        " on the CPU, without gaps")};
  };
  QMLP_TRY(check("k", k));
  QMLP_TRY(check("v", v));
  QMLP_TRY(check_memory("k", k));
  QMLP_TRY(check_memory("v", v));
  if (k.rows == 0) {
    impl.length = position;
    return {};
  }
  if (k.rows > kMostPositions) {
    return Error{Errc::out_of_memory,
                 concat("attention cache of ", k.rows, " positions more is too large")};
  }
  QMLP_TRY(impl.reserve(position + k.rows));
  cpu::RopeArgs args{};
  args.type = static_cast<int>(impl.dtype);
  args.k = const_cast<std::byte*>(k.data);  // not written where nothing is rotated
  args.v = v.data;
  args.num_kv_heads = impl.num_kv_heads;
  args.head_dim = impl.head_dim;
  args.position = position;
  args.k_cache = impl.keys(0);
  args.v_cache = impl.values(0);
  args.k_head_stride = impl.k_head_stride();
  args.v_head_stride = impl.v_head_stride();
  args.v_row_stride = impl.v_row_stride;
  host_kernels().rope_append(&args, 0, k.rows);
  impl.length = position + k.rows;
  return {};
}

namespace {

template <class Element>
void copy_head(const AttentionCache::Impl& impl, std::int64_t head, std::int64_t count,
               std::byte* keys, std::byte* values, bool to_rows) {
  if (keys != nullptr) {
    copy_keys(reinterpret_cast<Element*>(impl.keys(head)), reinterpret_cast<Element*>(keys), count,
              impl.head_dim, to_rows);
  }
  if (values == nullptr) return;
  const auto row_bytes = static_cast<std::size_t>(impl.head_dim) * sizeof(Element);
  for (std::int64_t p = 0; p < count; ++p) {
    std::byte* in_cache = impl.values(head) + p * impl.v_row_stride * impl.element();
    std::byte* row = values + p * impl.head_dim * impl.element();
    std::memcpy(to_rows ? row : in_cache, to_rows ? in_cache : row, row_bytes);
  }
}

std::byte* past(std::byte* data, std::int64_t bytes) {
  return data == nullptr ? nullptr : data + bytes;
}

void copy_heads(const AttentionCache::Impl& impl, std::int64_t count, std::byte* keys,
                std::byte* values, std::int64_t head_stride, bool to_rows) {
  for (std::int64_t head = 0; head < impl.num_kv_heads; ++head) {
    const std::int64_t at = head * head_stride * impl.element();
    if (impl.element() == 4) {
      copy_head<std::uint32_t>(impl, head, count, past(keys, at), past(values, at), to_rows);
    } else {
      copy_head<std::uint16_t>(impl, head, count, past(keys, at), past(values, at), to_rows);
    }
  }
}

Status check_rows(const AttentionCache::Impl& impl, std::int64_t count, std::int64_t most,
                  std::int64_t head_stride) {
  if (count < 0 || count > most) {
    return Error{Errc::invalid_argument, concat("count: is ", count, ", must be from 0 to ", most)};
  }
  const auto least = checked_mul(count, impl.head_dim);
  if (!least || head_stride < *least) {
    return Error{Errc::invalid_argument,
                 concat("head_stride: is ", head_stride, ", needs at least ", count, " rows of ",
                        impl.head_dim)};
  }
  const auto heads = checked_mul(head_stride, impl.num_kv_heads);
  if (!heads || !checked_mul(*heads, impl.element())) {
    return Error{Errc::invalid_argument, concat("head_stride: is ", head_stride, ", too large for ",
                                                impl.num_kv_heads, " heads")};
  }
  return {};
}

}  // namespace

Status AttentionCache::load(std::int64_t count, std::byte* keys, std::byte* values,
                            std::int64_t head_stride) const noexcept {
  QMLP_TRY(check_rows(*impl_, count, impl_->length, head_stride));
  copy_heads(*impl_, count, keys, values, head_stride, /*to_rows=*/true);
  return {};
}

Status AttentionCache::store(std::int64_t count, const std::byte* keys, const std::byte* values,
                             std::int64_t head_stride) noexcept {
  QMLP_TRY(check_rows(*impl_, count, kMostPositions, head_stride));
  QMLP_TRY(impl_->reserve(count));
  copy_heads(*impl_, count, const_cast<std::byte*>(keys), const_cast<std::byte*>(values),
             head_stride, /*to_rows=*/false);
  impl_->length = count;
  return {};
}

std::size_t attention_workspace_bytes(const AttentionCache& cache, std::int64_t length,
                                      int num_threads) noexcept {
  const AttentionCache::Impl& impl = cache.impl();
  if (length < 0 || length > kMostPositions || num_threads < 1) return 0;
  return sizeof(float) * static_cast<std::size_t>(num_threads) *
         static_cast<std::size_t>(attention_scratch_floats(round_up(length, cpu::kCacheBlock),
                                                           impl.head_dim, impl.v_row_stride));
}

Status attention(const AttentionCache& cache, const MatrixView& q, const MutableMatrixView& out,
                 float scale, const Workspace& workspace, const Stream& stream) noexcept {
  const AttentionCache::Impl& impl = cache.impl();
  if (stream.device.kind != DeviceKind::cpu || stream.handle == nullptr) {
    return Error{Errc::invalid_argument, "attention: stream is no CPU stream, needs one"};
  }
  const auto check = [&](const char* name, const auto& rows) -> Status {
    if (rows.rows == q.rows && rows.cols == q.cols && rows.row_stride == rows.cols &&
        rows.dtype == impl.dtype && rows.device.kind == DeviceKind::cpu && rows.cols > 0 &&
        rows.cols % impl.width() == 0) {
      return {};
    }
    return Error{Errc::invalid_argument,
                 concat("attention: ", name, " is ", rows.rows, " x ", rows.cols, " of ",
                        to_string(rows.dtype), ", needs ", q.rows, " x a multiple of ",
                        impl.width(), " of ", to_string(impl.dtype), " on the CPU, without gaps")};
  };
  QMLP_TRY(check("q", q));
  QMLP_TRY(check("out", out));
  QMLP_TRY(check_memory("attention: q", q));
  QMLP_TRY(check_memory("attention: out", out));
  if (q.rows > impl.length) {
    return Error{Errc::invalid_argument,
                 concat("attention: q has ", q.rows, " rows, must have at most ", impl.length,
                        ", the cache's length")};
  }
  if (q.rows == 0) return {};
  ThreadPool& pool = *static_cast<ThreadPool*>(stream.handle);
  const std::size_t need = attention_workspace_bytes(cache, impl.length, pool.num_threads());
  if (workspace.bytes.size() < need) {
    return Error{Errc::invalid_argument, concat("attention: workspace holds ",
                                                workspace.bytes.size(), " bytes, needs ", need)};
  }
  const auto scratch = reinterpret_cast<std::uintptr_t>(workspace.bytes.data());
  if (range_of(out).meets({scratch, scratch + need})) {
    return Error{Errc::invalid_argument, "attention: out overlaps the workspace, must be apart"};
  }
  cpu::AttentionArgs args{};
  args.type = static_cast<int>(impl.dtype);
  args.q = q.data;
  args.out = out.data;
  args.k_cache = impl.keys(0);
  args.v_cache = impl.values(0);
  args.num_heads = q.cols / impl.head_dim;
  args.heads_per_kv = args.num_heads / impl.num_kv_heads;
  args.head_dim = impl.head_dim;
  args.k_head_stride = impl.k_head_stride();
  args.v_head_stride = impl.v_head_stride();
  args.v_row_stride = impl.v_row_stride;
  args.score_stride = round_up(impl.length, cpu::kCacheBlock);
  args.position = impl.length - q.rows;
  args.scale = scale;
  attend(host_kernels(), args, impl.num_kv_heads, q.rows,
         reinterpret_cast<float*>(workspace.bytes.data()), pool);
  return {};
}

}  // namespace qmlp
