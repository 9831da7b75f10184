#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/checkpoint.h"
#include "qmlp/cpu.h"
#include "qmlp/ops.h"
#include "qmlp/plan.h"
#include "qmlp/status.h"

namespace qmlp {

struct ModelOptions {
  std::optional<DType> activations = {};  // empty: the stored type of the embedding's scales
  Precision precision = Precision::match;
  std::optional<Accumulation> accumulation = {};
  int segments = 0;
  std::string force_isa = {};  // "", "portable", "avx2", "avx512"
  std::function<void(std::string_view what, std::int64_t done, std::int64_t total)> progress;
};

// The switches that change which ops run, not what they compute.
struct FusionOptions {
  bool fused = true;
  std::int64_t fuse_min_m = 1;        // smallest M whose MLP runs fused
  std::int64_t fused_max_calls = -1;  // only this many fused calls, then unfused; -1: no cap
  bool poison_scratch = false;        // fill scratch with NaN before every layer
};

// Points of the forward that an observer sees.
enum class Tap : std::uint8_t {
  embedding,
  attention_out,  // after the o projection and its residual
  gate,           // the raw gate projection (only when tap_gate is set)
  swiglu,         // silu(gate) * up
  layer_out,      // after the MLP's residual
  final_norm,
  logits,
};
const char* to_string(Tap tap) noexcept;
struct TapEvent {
  Tap tap = Tap::embedding;
  std::int64_t layer = -1;  // -1 outside the layers
  MatrixView values;        // [M, width], valid during the call
};

struct SessionOptions {
  std::int64_t max_tokens = 0;       // context to allocate; 0: the config's, at most 4096
  std::int64_t prefill_chunk = 256;  // most tokens one pass carries
  FusionOptions fusion;
  bool tap_gate = false;
  bool check_finite = true;  // stop at the first layer whose output is not finite, naming it
  std::function<void(const TapEvent&)> observer;  // empty: none
};

enum class Logits : std::uint8_t { none, last, all };

// Weights packed for the kernels, with the plans that use them. Immutable and shared.
class Model {
 public:
  // Packs with the pool's threads. The checkpoint may be closed afterwards.
  static Result<std::shared_ptr<const Model>> load(
      const std::shared_ptr<const Checkpoint>& checkpoint, const ModelOptions& options,
      ThreadPool& pool);
  ~Model();

  const ModelConfig& config() const noexcept;
  DType activations() const noexcept;
  std::uint64_t packed_bytes() const noexcept;
  // Every op of the model in execution order, for inspect and verify.
  struct Op {
    std::string path;  // "model.layers.0.mlp" for gate and up, else the module's path
    bool is_swiglu = false;
    Plan plan;
    PackedWeightPtr weight;
    std::vector<float> linear_bias;  // empty: none; of gate and up: gate's, then up's
  };
  const std::vector<Op>& ops() const noexcept;

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }

 private:
  explicit Model(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// One conversation: a KV cache and the scratch of a forward, allocated once. Not for two threads at
// once; several sessions may share one model.
class Session {
 public:
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const Model> model,
                                                 const SessionOptions& options, ThreadPool& pool);
  ~Session();

  std::int64_t position() const noexcept;  // tokens in the cache
  std::int64_t max_tokens() const noexcept;
  std::uint64_t cache_bytes() const noexcept;

  // Appends tokens. `out` holds vocab_size floats for Logits::last, tokens.size() * vocab_size for
  // all, and may be empty for none. The logits' bits depend on the token sequence alone. Errors:
  // past max_tokens, an id out of range, a non-finite layer (named); the position is unchanged
  // then.
  Status forward(std::span<const std::int32_t> tokens, Logits logits, std::span<float> out);

  Status truncate(std::int64_t position);  // forgets the tokens after `position`
  // The cache with the tokens that filled it; load checks the model's fingerprint.
  Status save(const std::string& path) const;
  Status load(const std::string& path);
  std::span<const std::int32_t> tokens() const noexcept;

 private:
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

struct SamplingOptions {
  double temperature = 0.0;  // 0: greedy, ties to the lower id
  double top_p = 1.0;
  std::int64_t top_k = 0;  // 0: off
  double min_p = 0.0;
  double repeat_penalty = 1.0;
  std::int64_t repeat_window = 64;
  std::uint64_t seed = 0;
};
Status validate(const SamplingOptions& options);

// Draws tokens. The same seed, logits and history give the same tokens on every machine.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);
  std::int32_t sample(std::span<const float> logits, std::span<const std::int32_t> history);

 private:
  SamplingOptions options_;
  std::uint64_t state_ = 0;
  std::vector<std::pair<float, std::int32_t>> candidates_;
};

}  // namespace qmlp
