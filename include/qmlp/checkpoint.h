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

enum class RopeKind : std::uint8_t { standard, linear };

// The fields of config.json that a Llama-type forward needs, checked against each other.
struct ModelConfig {
  std::string model_type;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 0;  // 0: not stated
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  RopeKind rope_kind = RopeKind::standard;
  double rope_factor = 1.0;  // linear: positions are divided by it
  bool rope_traditional = false;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tie_word_embeddings = true;
  std::optional<std::int32_t> bos_token_id;
  std::vector<std::int32_t> eos_token_ids;  // of config.json and generation_config.json, no repeats
};

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
  std::string spec_source;  // "config quantization", "config quantization.<key>", "unquantized"
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
  const std::vector<TensorInfo>& tensors() const noexcept;    // sorted by name
  const std::vector<ModuleInfo>& modules() const noexcept;    // in layer order, embedding first
  const std::vector<std::string>& warnings() const noexcept;  // unused tensors, unmatched overrides
  std::uint64_t file_bytes() const noexcept;
  bool mapped() const noexcept;

  // Null when no such module.
  const ModuleInfo* find_module(std::string_view module_path) const noexcept;
  Result<QuantizedTensorView> weight(std::string_view module_path) const;
  // A float tensor (norm weight, linear bias) widened to f32.
  Result<std::vector<float>> float_tensor(std::string_view name) const;
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
