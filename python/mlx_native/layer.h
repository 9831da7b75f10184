#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ops.h"

// A decoder layer of the Llama form, or its attention alone. On CPU streams it is one op: between
// its matrices nothing waits for MLX's graph, and the keys and values stay where the kernels want
// them. On GPU streams a whole block is one op too where MLX has attention in one kernel; elsewhere
// it is a graph, built at once.
namespace qmlp_mlx {

// What a layer is made of. Arrays of one type, that of the activations.
struct LayerParts {
  PackedWeightPtr q, k, v, o;
  OptionalArray q_bias, k_bias, v_bias, o_bias;
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  float scale = 1.0f;            // of the scores
  OptionalArray q_norm, k_norm;  // [head_dim], both or neither
  float q_eps = 0.0f, k_eps = 0.0f;
  OptionalArray frequencies;  // f32 [rotated pairs]; without, nothing is rotated
  bool traditional = false;
  float rope_scale = 1.0f;
  // The same for mx.fast.rope, for GPU streams: features that are rotated (0: none), and the base
  // or the periods.
  int rope_dims = 0;
  std::optional<float> rope_base;
  OptionalArray rope_periods;
  // A whole block: h = x + attention(norm(x)), h + mlp(norm(h)). Without input_norm: the attention
  // alone, of x as it is.
  OptionalArray input_norm, post_norm;
  float input_eps = 0.0f, post_eps = 0.0f;
  PackedWeightPtr gate_up, down;
  OptionalArray gate_bias, up_bias, down_bias;
};

// Positions by which mlx-lm's KVCache grows. MLX's attention has a faster kernel for caches of
// whole steps.
constexpr int kCacheStep = 256;
inline int whole_steps(int positions) {
  return (positions + kCacheStep - 1) / kCacheStep * kCacheStep;
}

// Whether the parts compute in one type and their shapes belong together.
bool belong_together(const LayerParts& parts, mlx::core::Dtype type);

// The keys and values of a batch's sequences at one layer, in the kernels' layout.
class Sequences;

// A cache's keys and values as the last call left them, and the arrays that stand for them.
class KvRows {
 public:
  // Whether a call may go on where this stands: the cache's arrays are those handed out, and nobody
  // else can still ask what they hold. `unshared`: no other Python object refers to them.
  bool continues(const array& keys, const array& values, bool unshared, int batch, int offset,
                 const mlx::core::Stream& s) const;

  std::shared_ptr<Sequences> sequences;
  std::optional<array> done;  // evaluated once the rows are there
  std::uintptr_t keys_id = 0, values_id = 0;
  int batch = 0;
  int length = 0;
  int stream = 0;
};
using KvRowsPtr = std::shared_ptr<KvRows>;

struct LayerResult {
  array out;
  // Lazy, [B, heads, length, head_dim]: as mlx-lm's KVCache holds them, or, of a GPU's one op, no
  // longer than the cache.
  OptionalArray keys, values;
  KvRowsPtr rows;
};

class GpuLayer;

class Layer {
 public:
  explicit Layer(LayerParts parts);
  ~Layer();

  // x [B, L, hidden], causal, after `offset` positions of the cache. `cached` false: no cache, and
  // nothing is kept. Empty where the op is not for these arrays: another type or device, a function
  // being traced.
  std::optional<LayerResult> run(const array& x, bool cached, const KvRowsPtr& rows,
                                 const array* keys, const array* values, int offset,
                                 bool unshared) const;

  struct Ready;  // for one activation type

 private:
  std::optional<LayerResult> run_on_gpu(const array& x, bool cached, const array* keys,
                                        const array* values, int offset,
                                        const mlx::core::Stream& s) const;
  std::shared_ptr<const Ready> ready_for(mlx::core::Dtype type) const;

  LayerParts parts_;
  std::unique_ptr<GpuLayer> gpu_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Ready> ready_;
};

}  // namespace qmlp_mlx
