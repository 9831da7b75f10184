#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/aligned_buffer.h"
#include "model/model_impl.h"

namespace qmlp {

// Keys and values of every layer, in the activation type. Keys lie in blocks of 16 positions,
// [layer, kv head, block, head_dim, 16], so that positions are a vector's lanes; values lie
// [layer, kv head, position, v_row_stride].
struct KvCache {
  AlignedBuffer data;
  std::int64_t num_layers = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t v_row_stride = 0;   // elements, head_dim rounded up to 16
  std::int64_t k_head_stride = 0;  // elements from one KV head to the next
  std::int64_t v_head_stride = 0;
  std::size_t element_bytes = 0;

  std::byte* keys(std::int64_t layer) noexcept {
    return data.data() + layer_elements() * layer * static_cast<std::int64_t>(element_bytes);
  }
  std::byte* values(std::int64_t layer) noexcept {
    return keys(layer) + num_kv_heads * k_head_stride * static_cast<std::int64_t>(element_bytes);
  }
  const std::byte* keys(std::int64_t layer) const noexcept {
    return const_cast<KvCache*>(this)->keys(layer);
  }
  const std::byte* values(std::int64_t layer) const noexcept {
    return const_cast<KvCache*>(this)->values(layer);
  }
  std::int64_t layer_elements() const noexcept {
    return num_kv_heads * (k_head_stride + v_head_stride);
  }
};

struct Session::Impl {
  Impl(std::shared_ptr<const Model> shared_model, const SessionOptions& session_options,
       ThreadPool& session_pool)
      : model(std::move(shared_model)), options(session_options), pool(session_pool) {}

  Status allocate();
  Status forward(std::span<const std::int32_t> ids, Logits logits, std::span<float> out);
  Status save(const std::string& path) const;
  Status load(const std::string& path);

  std::shared_ptr<const Model> model;
  SessionOptions options;
  ThreadPool& pool;
  std::int64_t max_tokens = 0;
  std::int64_t chunk = 0;
  std::int64_t position = 0;
  std::vector<std::int32_t> tokens;  // `position` of them, and room for max_tokens
  KvCache cache;

 private:
  // Where each buffer of a forward lies; all but `x` may be poisoned between layers.
  struct Scratch {
    std::byte* x = nullptr;  // [chunk, hidden], the residual stream
    std::byte* normed = nullptr;
    std::byte* q = nullptr;
    std::byte* k = nullptr;
    std::byte* v = nullptr;
    std::byte* attention = nullptr;
    std::byte* gate = nullptr;  // null unless some MLP may run unfused or the gate is tapped
    std::byte* up = nullptr;
    std::byte* hidden = nullptr;  // [chunk, intermediate]
    std::byte* logits = nullptr;  // null when the activation type is f32
    float* scores = nullptr;      // scratch of attention, one piece for each thread
    std::byte* workspace = nullptr;
  };

  const Model::Impl& impl() const noexcept { return model->impl(); }
  Status allocate_cache();
  Status allocate_scratch();
  Status make_rotary_tables();
  Status run_chunk(std::span<const std::int32_t> ids, std::int64_t start, std::int64_t logit_rows,
                   std::span<float> out);
  Status run_attention(std::int64_t layer_index, std::int64_t start, std::int64_t M);
  Status run_mlp(std::int64_t layer_index, std::int64_t start, std::int64_t M);
  Status run_head(std::int64_t start, std::int64_t M, std::int64_t logit_rows,
                  std::span<float> out);
  Status linear(const LinearOp& op, const MatrixView& x, const MutableMatrixView& out,
                const MatrixView& residual = {});
  Status add_linear(const LinearOp& op, const MatrixView& in, const MutableMatrixView& x);
  // Rows as wide as the weight; may be in place.
  void norm(const std::byte* x, const std::vector<float>& weight, std::byte* out,
            std::int64_t rows);
  void scale(const MutableMatrixView& x, double factor);
  // Shows the values to the observer and, with check_finite, looks for infinities and NaN.
  Status tap(Tap which, std::int64_t layer, std::int64_t first_position, const MatrixView& values);
  Error non_finite_error(Tap which, std::int64_t layer, std::int64_t token, std::int64_t feature,
                         float value) const;
  MutableMatrixView matrix(std::byte* data, std::int64_t rows, std::int64_t cols) const noexcept;
  template <class Function>
  void for_rows(std::int64_t M, std::int64_t rows_per_task, std::int64_t work, Function&& function);

  AlignedBuffer scratch_memory_;
  Scratch scratch_;
  std::size_t workspace_bytes_ = 0;
  std::int64_t score_stride_ = 0;
  std::vector<float> cosines_;  // [max_tokens, rotary_dim / 2]
  std::vector<float> sines_;
  std::int64_t fused_calls_ = 0;
};

}  // namespace qmlp
