#include "io/architecture.h"

#include <cmath>
#include <string>
#include <vector>

#include "base/try.h"

namespace qmlp {
namespace {

using Bias = Architecture::Bias;
using Field = Architecture::Field;
using Tied = Architecture::Tied;
using Window = Architecture::Window;

constexpr unsigned bit(RopeKind kind) { return 1u << static_cast<unsigned>(kind); }
constexpr unsigned kAllRopes = bit(RopeKind::standard) | bit(RopeKind::linear) |
                               bit(RopeKind::llama3) | bit(RopeKind::yarn) |
                               bit(RopeKind::dynamic) | bit(RopeKind::longrope);

// The logits of an untied head are divided by hidden_size / dim_model_base, before the head.
Status read_minicpm_scales(const Fields& fields, ModelConfig& config) {
  double depth = 0.0;
  std::int64_t base = 0;
  QMLP_TRY(fields.positive("scale_emb", config.embedding_scale));
  QMLP_TRY(fields.positive("scale_depth", depth));
  QMLP_TRY(fields.size("dim_model_base", base));
  config.residual_scale = depth / std::sqrt(static_cast<double>(config.num_hidden_layers));
  if (!config.tie_word_embeddings) {
    config.head_input_scale = static_cast<double>(base) / static_cast<double>(config.hidden_size);
  }
  return {};
}

Status read_granite_scales(const Fields& fields, ModelConfig& config) {
  double divisor = 1.0;
  QMLP_TRY(fields.positive("embedding_multiplier", config.embedding_scale));
  QMLP_TRY(fields.positive("attention_multiplier", config.attention_scale));
  QMLP_TRY(fields.positive("residual_multiplier", config.residual_scale));
  QMLP_TRY(fields.positive("logits_scaling", divisor));
  config.logits_scale = 1.0 / divisor;
  return {};
}

constexpr Architecture llama(std::string_view name, Window window = Window::ignored) {
  Architecture row;
  row.model_type = name;
  row.layer_windows = true;
  row.window = window;
  row.rope_kinds = kAllRopes;
  return row;
}

constexpr Architecture smollm3() {
  Architecture row = llama("smollm3", Window::if_enabled);
  row.rotary_layers = true;
  return row;
}

constexpr Architecture qwen2() {
  Architecture row;
  row.model_type = "qwen2";
  row.qkv_bias = Bias::always;
  row.output_bias = Bias::none;
  row.mlp_bias = Bias::none;
  row.head_dim = Field::no;
  row.num_key_value_heads = Field::required;
  row.rope_theta = 1000000.0;
  row.window = Window::if_enabled;
  row.rope_kinds = kAllRopes;
  return row;
}

constexpr Architecture qwen3() {
  Architecture row;
  row.model_type = "qwen3";
  row.qkv_bias = Bias::none;
  row.output_bias = Bias::none;
  row.mlp_bias = Bias::none;
  row.tied = Tied::required;
  row.head_dim = Field::required;
  row.num_key_value_heads = Field::required;
  row.max_position_embeddings = Field::required;
  row.rope_traditional = Field::no;
  row.rope_theta = 0.0;
  row.qk_norm = true;
  row.window = Window::if_enabled;
  row.rope_kinds = kAllRopes;
  return row;
}

constexpr Architecture minicpm() {
  Architecture row;
  row.model_type = "minicpm";
  row.qkv_bias = Bias::none;
  row.output_bias = Bias::none;
  row.mlp_bias = Bias::none;
  row.tied = Tied::not_by_default;
  row.head_dim = Field::no;
  row.num_key_value_heads = Field::required;
  row.rope_theta = 1000000.0;
  row.head_falls_back = true;
  row.read_scales = read_minicpm_scales;
  row.rope_kinds = kAllRopes;
  return row;
}

constexpr Architecture granite() {
  Architecture row;
  row.model_type = "granite";
  row.qkv_bias = Bias::required;
  row.output_bias = Bias::required;
  row.mlp_bias = Bias::required;
  row.head_dim = Field::no;
  row.num_key_value_heads = Field::required;
  row.max_position_embeddings = Field::required;
  row.rope_traditional = Field::no;
  row.rope_theta = 0.0;
  row.read_scales = read_granite_scales;
  row.rope_kinds = kAllRopes;
  return row;
}

constexpr Architecture phi3() {
  Architecture row;
  row.model_type = "phi3";
  row.qkv_bias = Bias::none;
  row.output_bias = Bias::none;
  row.mlp_bias = Bias::none;
  row.tied = Tied::not_by_default;
  row.head_dim = Field::no;
  row.partial_rotary = true;
  row.stacked = true;
  row.window = Window::stated;
  row.rope_kinds = bit(RopeKind::standard) | bit(RopeKind::linear) | bit(RopeKind::longrope);
  return row;
}

constexpr Architecture kArchitectures[] = {
    llama("llama"),
    llama("mistral", Window::stated),
    llama("iquestcoder"),
    llama("xverse"),
    smollm3(),
    qwen2(),
    qwen3(),
    minicpm(),
    granite(),
    phi3(),
};

struct Refusal {
  std::string_view model_type;
  std::string_view why;
};
constexpr std::string_view kExperts = "a mixture of experts";
constexpr std::string_view kGeglu = "its MLP is a GeGLU, whose activation is not pinned yet";
constexpr Refusal kRefusals[] = {
    {"gemma", kGeglu},
    {"gemma2", kGeglu},
    {"gemma3", kGeglu},
    {"gemma3_text", kGeglu},
    {"gemma3n", kGeglu},
    {"gemma4", kGeglu},
    {"gemma4_text", kGeglu},
    {"mixtral", kExperts},
    {"qwen2_moe", kExperts},
    {"qwen3_moe", kExperts},
    {"granitemoe", kExperts},
    {"phimoe", kExperts},
    {"olmoe", kExperts},
    {"deepseek", kExperts},
    {"deepseek_v2", kExperts},
    {"deepseek_v3", kExperts},
    {"deepseek_v32", kExperts},
    {"gpt_oss", kExperts},
    {"glm4_moe", kExperts},
    {"ernie4_5_moe", kExperts},
    {"bailing_moe", kExperts},
    {"dbrx", kExperts},
    {"llama4", kExperts},
    {"minimax", kExperts},
    {"minimax_m2", kExperts},
    {"kimi_k2", kExperts},
    {"dots1", kExperts},
    {"solar_open", kExperts},
    {"exaone_moe", kExperts},
    {"afmoe", kExperts},
    {"bitnet", "its weights are ternary, not affine"},
};

}  // namespace

std::span<const Architecture> architectures() noexcept { return kArchitectures; }

const Architecture* find_architecture(std::string_view model_type) noexcept {
  for (const Architecture& row : kArchitectures) {
    if (row.model_type == model_type) return &row;
  }
  return nullptr;
}

std::string_view why_unsupported(std::string_view model_type) noexcept {
  for (const Refusal& refusal : kRefusals) {
    if (refusal.model_type == model_type) return refusal.why;
  }
  return {};
}

std::vector<std::string> supported_model_types() {
  std::vector<std::string> names;
  for (const Architecture& row : kArchitectures) names.emplace_back(row.model_type);
  return names;
}

}  // namespace qmlp
