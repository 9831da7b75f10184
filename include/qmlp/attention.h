#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "qmlp/ops.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"

namespace qmlp {

// Keys and values of one layer of one sequence, in the layout of the attention kernels. One call at
// a time. CPU.
class AttentionCache {
 public:
  // num_kv_heads and head_dim are at least 1.
  static Result<std::unique_ptr<AttentionCache>> create(std::int64_t num_kv_heads,
                                                        std::int64_t head_dim, DType dtype);
  ~AttentionCache();
  AttentionCache(const AttentionCache&) = delete;
  AttentionCache& operator=(const AttentionCache&) = delete;

  std::int64_t length() const noexcept;  // positions held

  // Drops the positions from `position` on and appends the rows of k and v, both
  // [M, num_kv_heads * head_dim] of the cache's type. Grows as needed; after an error the cache is
  // what it was. position is at most length().
  Status append(std::int64_t position, const MatrixView& k, const MatrixView& v) noexcept;

  // Positions [0, count) of every head, head_stride elements from one to the next:
  // [num_kv_heads, count, head_dim]. load copies out (a null pointer: not that part), store in.
  Status load(std::int64_t count, std::byte* keys, std::byte* values,
              std::int64_t head_stride) const noexcept;
  Status store(std::int64_t count, const std::byte* keys, const std::byte* values,
               std::int64_t head_stride) noexcept;

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }

 private:
  explicit AttentionCache(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// Causal attention of the last q.rows positions of the cache: out and q are
// [M, num_heads * head_dim] of the cache's type with no gap between rows, num_heads a multiple of
// the cache's heads. Bits: docs/forward.md. Allocates nothing.
std::size_t attention_workspace_bytes(const AttentionCache& cache, std::int64_t length,
                                      int num_threads) noexcept;
Status attention(const AttentionCache& cache, const MatrixView& q, const MutableMatrixView& out,
                 float scale, const Workspace& workspace, const Stream& stream) noexcept;

}  // namespace qmlp
