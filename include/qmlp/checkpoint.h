#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"
#include "qmlp/tensor.h"
#include "qmlp/types.h"

namespace qmlp {

enum class RopeKind : std::uint8_t { standard, linear, llama3, yarn, dynamic, longrope };
const char* to_string(RopeKind kind) noexcept;  // "default", "linear", "llama3", ...

// What rotary kinds beyond default and linear take from config.json.
struct RopeScaling {
  std::int64_t original_context = 0;  // llama3, yarn, longrope
  double low_freq_factor = 1.0;       // llama3
  double high_freq_factor = 4.0;
  double beta_fast = 32.0;  // yarn
  double beta_slow = 1.0;
  double mscale = 1.0;
  double mscale_all_dim = 0.0;
  std::vector<double> long_factors;  // longrope: one for each rotated pair
};

struct LayerConfig {
  bool rotary = true;
  std::int64_t window = 0;  // a token sees this many tokens, itself included; 0: all before it
};

// All that a forward needs to know of a model: the fields of config.json, checked against each
// other, with what its model_type fixes filled in. Nothing below model_type depends on its name.
struct ModelConfig {
  std::string model_type;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;  // as stated; 0: not stated
  std::int64_t context_length = 0;           // most tokens of a session; 0: no limit is known
  double rms_norm_eps = 1e-5;

  std::int64_t rotary_dim = 0;  // the first features of a head are rotated, the rest are not
  double rope_theta = 10000.0;
  RopeKind rope_kind = RopeKind::standard;
  double rope_factor = 1.0;  // linear: positions are divided by it; longrope: context / original
  RopeScaling rope;
  bool rope_traditional = false;
  std::vector<LayerConfig> layers;  // num_hidden_layers of them

  bool attention_bias = false;         // of q, k and v
  bool attention_output_bias = false;  // of o
  bool mlp_bias = false;               // of gate, up and down
  bool qk_norm = false;                // RMS norm of each head's q and k before they are rotated
  bool tie_word_embeddings = true;     // the head is the embedding

  double embedding_scale = 1.0;   // of the embedding's rows
  double attention_scale = 0.0;   // of the scores; 0: 1 / sqrt(head_dim)
  double residual_scale = 1.0;    // of each half layer's output, before it is added
  double head_input_scale = 1.0;  // of the final norm's output
  double logits_scale = 1.0;

  std::optional<std::int32_t> bos_token_id;
  std::vector<std::int32_t> eos_token_ids;  // of config.json and generation_config.json, no repeats
};

// The model types that run, in the order of docs/models.md.
std::vector<std::string> supported_model_types();

// One stored tensor as the file describes it.
struct TensorInfo {
  std::string name;
  std::string file;   // name of the safetensors file that holds it
  std::string dtype;  // as safetensors spells it: "U32", "F16", "BF16", "F32"
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;
};

// A linear or embedding module: its weight and where its format came from.
struct ModuleInfo {
  std::string path;  // "model.layers.0.mlp.gate_proj"
  QuantSpec spec;
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::uint64_t bytes = 0;       // weight, scales, biases and linear bias
  bool has_linear_bias = false;  // a `<path>.bias` tensor exists
  // "config quantization", "config quantization.<key>", "tensor shapes" or "unquantized"
  std::string spec_source;
  // The module that the file holds: `path`, or one that stacks the rows of several ("qkv_proj",
  // "gate_up_proj"), of which this one is rows [row_begin, row_begin + N).
  std::string stored_path;
  std::int64_t row_begin = 0;
};

struct CheckpointOptions {
  bool use_mmap = true;  // false: read the files into memory; also the fallback when mapping fails
};

// An opened MLX checkpoint directory. Everything is validated at open: headers, shapes, offsets,
// completeness against config.json, quantization formats. Views borrow from the checkpoint.
class Checkpoint {
 public:
  static Result<std::shared_ptr<const Checkpoint>> open(const std::string& path,
                                                        const CheckpointOptions& options = {});
  ~Checkpoint();

  const std::string& path() const noexcept;
  const ModelConfig& config() const noexcept;
  const std::vector<TensorInfo>& tensors() const noexcept;  // sorted by name
  const std::vector<ModuleInfo>& modules() const noexcept;  // in layer order, embedding first
  // The same as the file holds them: a stacked module once instead of its parts.
  const std::vector<ModuleInfo>& stored_modules() const noexcept;
  const std::vector<std::string>& warnings() const noexcept;  // unused tensors, unmatched overrides
  std::uint64_t file_bytes() const noexcept;
  bool mapped() const noexcept;

  // Of modules() or stored_modules(); null when there is no such module.
  const ModuleInfo* find_module(std::string_view module_path) const noexcept;
  Result<QuantizedTensorView> weight(std::string_view module_path) const;
  // A stored float tensor (a norm's weight) widened to f32.
  Result<std::vector<float>> float_tensor(std::string_view name) const;
  // The module's linear bias widened to f32; empty when it has none.
  Result<std::vector<float>> linear_bias(std::string_view module_path) const;
  // Tells the system that a module's file pages are no longer needed (it has been packed).
  void release(std::string_view module_path) const noexcept;

 private:
  struct Impl;
  explicit Checkpoint(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// `--bits gate=4,up=8,down=6/32,layers.0.*=8`: bits, or bits/group, for the modules that a pattern
// matches; the last match wins. A pattern without '.' or '*' is a projection's short name (gate,
// up, down, q, k, v, o, embed, head); others match the module path, '*' standing for any text.
struct QuantPattern {
  std::string pattern;
  int bits = 4;
  int group_size = 0;  // 0: the default group
};
Result<std::vector<QuantPattern>> parse_quant_patterns(std::string_view text);

struct ConvertOptions {
  std::vector<QuantPattern> patterns;  // empty: keep an affine source as it is
  std::optional<int> group_size;       // default group for patterns without one
  std::optional<DType> scale_dtype;    // default: the source's own
  bool force = false;                  // replace an existing folder
  std::function<void(std::string_view what, std::int64_t done, std::int64_t total)> progress;
  std::function<bool()> stop_requested;  // polled between tensors; a stop leaves nothing behind
};

struct ConvertReport {
  std::int64_t num_tensors = 0;
  std::uint64_t bytes_written = 0;
  bool lossless = false;           // every quantized value is exactly the source's
  std::vector<std::string> notes;  // what a user should know: scales stored wider, and so on
};

// Writes an MLX checkpoint directory from a GGUF file, an MLX checkpoint, or a float safetensors
// directory. Written under a temporary name and renamed when complete. Formats:
// docs/checkpoints.md.
Result<ConvertReport> convert(const std::string& source, const std::string& destination,
                              const ConvertOptions& options = {});

}  // namespace qmlp
