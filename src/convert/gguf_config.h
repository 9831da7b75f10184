#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "convert/gguf_model.h"
#include "io/json.h"
#include "qmlp/status.h"

namespace qmlp {

// How llama.cpp writes a model type that mlx-lm knows.
struct GgufArchitecture {
  enum class Biases : std::uint8_t { none, optional, qkv };

  const char* name;        // general.architecture
  const char* model_type;  // of config.json
  const char* hf_class;
  // Whether the two halves of a head that rope rotates stand in neighbouring rows of q and k.
  bool interleaved;
  bool has_head_dim;  // config.json may state a head size other than hidden / heads
  Biases biases;
  bool qk_norm;
  bool stacked;  // q, k and v in one tensor, gate and up in another
};

// What the metadata and the tensors around the weights say, checked against each other; named as
// config.json names them.
struct GgufConfig {
  const GgufArchitecture* architecture = nullptr;
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t vocab = 0;
  bool attention_bias = false;
  bool mlp_bias = false;
  bool tied = false;         // the head is the embedding, and config.json says so
  bool copied_head = false;  // the file has no head: the embedding is written as one, too
  std::vector<std::string_view> used_tensors;  // rope factors, which went into `json`
  JsonObject json;  // config.json, without quantization entries and token ids
};
// Refuses by name: other architectures, experts, sliding windows, rope and attention variants that
// config.json cannot express.
Result<GgufConfig> read_gguf_config(const GgufModel& model);

// A float as the shortest decimal that reads back as the same f32: 1e-05, not 9.99999974737875e-06.
double shortest_decimal(float value);

}  // namespace qmlp
