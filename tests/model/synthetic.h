#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "qmlp/model.h"

namespace qmlp::test {

// A small made-up model. Formats are given by a module's last name ("q_proj"), or by its whole path
// where one layer is to differ.
struct SyntheticSpec {
  std::int64_t hidden = 96, intermediate = 160, layers = 3, heads = 6, kv_heads = 2, head_dim = 16;
  std::int64_t vocab = 131;
  std::int64_t max_position = 512;
  bool tied = true;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool interleaved = false;
  double rope_theta = 10000.0;
  double rope_factor = 1.0;  // other than 1: linear
  // What other model types than llama bring; `more_config` says the same to config.json.
  std::string model_type = "llama";
  std::string more_config;  // members, each with a comma before it
  bool stacked = false;     // qkv_proj and gate_up_proj
  bool qk_norm = false;
  std::int64_t rotary_dim = 0;  // 0: head_dim
  std::vector<std::int64_t> unrotated_layers = {};
  std::vector<std::int64_t> window_layers = {};
  std::int64_t window = 0;
  double embedding_scale = 1.0, attention_scale = 0.0, residual_scale = 1.0, logits_scale = 1.0;
  DType scale_dtype = DType::f16;
  std::map<std::string, QuantSpec> formats;
  std::uint64_t seed = 1;
};

QuantSpec affine(int bits, int group_size, DType scale_dtype);

// Odd sizes, every width, grouped heads, biases, float modules, tied and untied heads.
SyntheticSpec mixed_tied();
SyntheticSpec untied_interleaved();
SyntheticSpec one_kv_head();
// Other model types: stacked projections and partial rotation (phi3), norms of q and k (qwen3),
// multipliers (granite), layers without rotation and layers with a window (smollm3).
SyntheticSpec stacked_partial();
SyntheticSpec normed_heads();
SyntheticSpec scaled();
SyntheticSpec unlike_layers();

// A model's weights as floats, decoded from what the files hold, for the double reference.
struct SyntheticWeights {
  std::map<std::string, std::vector<float>> tensors;  // "<module>.weight", "<module>.bias", norms
};

// A checkpoint folder under the system's temporary one, removed at the end.
class SyntheticModel {
 public:
  explicit SyntheticModel(const SyntheticSpec& spec);
  ~SyntheticModel();
  SyntheticModel(const SyntheticModel&) = delete;
  SyntheticModel& operator=(const SyntheticModel&) = delete;

  const SyntheticSpec& spec() const { return spec_; }
  std::string path() const { return folder_.string(); }
  std::string file(const std::string& name) const { return (folder_ / name).string(); }
  const SyntheticWeights& weights() const { return weights_; }
  // Overwrites the first value of a stored tensor, such as "model.layers.1.mlp.up_proj.scales".
  void set_first(const std::string& tensor, DType dtype, float value);

 private:
  SyntheticSpec spec_;
  std::filesystem::path folder_;
  SyntheticWeights weights_;
};

std::unique_ptr<ThreadPool> make_pool(int threads);
std::shared_ptr<const Model> load_model(const SyntheticModel& model, const ModelOptions& options,
                                        ThreadPool& pool);
std::vector<std::int32_t> some_tokens(const SyntheticSpec& spec, std::size_t count);
ModelOptions with_activations(DType dtype);

// Logits [tokens, vocab] by a plain forward in double, weights rounded to f32 only.
std::vector<double> reference_logits(const SyntheticModel& model,
                                     const std::vector<std::int32_t>& tokens);

}  // namespace qmlp::test
