#include "convert/gguf_config.h"

#include <charconv>
#include <cmath>
#include <string>
#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "convert/gguf_metadata.h"
#include "convert/gguf_rope.h"
#include "io/config.h"
#include "text/quote.h"

namespace qmlp {
namespace {

using Biases = GgufArchitecture::Biases;

constexpr GgufArchitecture kArchitectures[] = {
    {"llama", "llama", "LlamaForCausalLM", true, true, Biases::optional, false, false},
    {"qwen2", "qwen2", "Qwen2ForCausalLM", false, false, Biases::qkv, false, false},
    {"qwen3", "qwen3", "Qwen3ForCausalLM", false, true, Biases::none, true, false},
    {"smollm3", "smollm3", "SmolLM3ForCausalLM", true, true, Biases::optional, false, false},
    {"phi3", "phi3", "Phi3ForCausalLM", false, false, Biases::none, false, true},
    {"minicpm", "minicpm", "MiniCPMForCausalLM", true, false, Biases::none, false, false},
    {"granite", "granite", "GraniteForCausalLM", true, false, Biases::optional, false, false},
};

// What llama.cpp assumes where a minicpm file does not say.
constexpr float kMiniCpmEmbeddingScale = 12.0f;
constexpr double kMiniCpmScaleDepth = 1.4;
constexpr std::int64_t kMiniCpmModelBase = 256;
// Every fourth layer of SmolLM3 has no rope; llama.cpp has no key for it.
constexpr std::int64_t kSmolLm3NoRopeInterval = 4;

// The shortest decimal near `value` for which `same` holds; `value` itself if there is none.
template <class Same>
double shortest_that(double value, Same same) {
  for (int digits = 1; digits <= 17; ++digits) {
    char text[40];
    const auto end =
        std::to_chars(text, text + sizeof text, value, std::chars_format::scientific, digits - 1)
            .ptr;
    double candidate = value;
    std::from_chars(text, end, candidate);
    if (same(candidate)) return candidate;
  }
  return value;
}

class ConfigReader {
 public:
  ConfigReader(const GgufModel& model, const GgufArchitecture& architecture)
      : model_(model), metadata_(model, architecture.name), architecture_(architecture) {
    out_.architecture = &architecture;
  }

  Result<GgufConfig> read() {
    QMLP_TRY(refuse_variants());
    QMLP_TRY(read_sizes());
    QMLP_TRY(read_tensors());
    QMLP_TRY(write_json());
    QMLP_TRY(check_json());
    return std::move(out_);
  }

 private:
  Error corrupt(std::string_view rest) const { return metadata_.error(Errc::corrupt_file, rest); }
  Error unsupported(std::string_view rest) const {
    return metadata_.error(Errc::unsupported, rest);
  }
  bool is(std::string_view name) const { return name == architecture_.name; }

  // Keys that change the forward in a way that the config.json of this model type cannot say.
  Status refuse_variants() const {
    for (const char* name :
         {"expert_count", "attention.max_alibi_bias", "attention.clamp_kqv",
          "attn_logit_softcapping", "final_logit_softcapping", "attention.temperature_scale",
          "attention.q_lora_rank", "attention.kv_lora_rank", "rope.scaling.alpha",
          "rope.scaling.yarn_log_multiplier"}) {
      QMLP_TRY(refuse_unless(name, 0.0));
    }
    if (!is("phi3")) QMLP_TRY(refuse_unless("attention.sliding_window", 0.0));
    if (!is("granite")) QMLP_TRY(refuse_unless("attention.scale", 0.0));
    if (!is("granite") && !is("minicpm")) {
      for (const char* name : {"embedding_scale", "residual_scale", "logit_scale"}) {
        QMLP_TRY(refuse_unless(name, 1.0));
      }
    }
    for (const char* name : {"attention.causal", "rope.scaling.finetuned"}) {
      const GgufValue* value = model_.find(metadata_.key(name));
      // For granite, llama.cpp reads "not finetuned" as "no rope".
      if (std::string_view(name) == "rope.scaling.finetuned" && !is("granite")) continue;
      if (value != nullptr && value->boolean() != true) {
        return unsupported(concat(metadata_.key(name), " is not true: not supported"));
      }
    }
    return {};
  }
  Status refuse_unless(const char* name, double harmless) const {
    const GgufValue* value = model_.find(metadata_.key(name));
    if (value == nullptr || value->number() == harmless) return {};
    return unsupported(concat(metadata_.key(name), " is set: such models are not supported"));
  }

  Status read_sizes() {
    QMLP_TRY(metadata_.size("embedding_length", out_.hidden));
    QMLP_TRY(metadata_.size("feed_forward_length", out_.intermediate));
    QMLP_TRY(metadata_.size("block_count", out_.layers));
    QMLP_TRY(metadata_.size("attention.head_count", out_.heads));
    out_.kv_heads = out_.heads;
    QMLP_TRY(metadata_.optional_size("attention.head_count_kv", out_.kv_heads));
    if (out_.heads % out_.kv_heads != 0) {
      return corrupt(concat(metadata_.key("attention.head_count_kv"), " ", out_.kv_heads,
                            " does not divide ", out_.heads, " heads"));
    }
    QMLP_TRY(metadata_.optional_size("attention.key_length", out_.head_dim));
    if (out_.head_dim == 0) {
      if (out_.hidden % out_.heads != 0) {
        return corrupt(concat(metadata_.key("embedding_length"), " ", out_.hidden,
                              " is no multiple of ", out_.heads, " heads"));
      }
      out_.head_dim = out_.hidden / out_.heads;
    }
    if (out_.head_dim % 2 != 0 || out_.head_dim > 65536) {
      return corrupt(concat("the head size ", out_.head_dim, " is odd or too large"));
    }
    if (!architecture_.has_head_dim && out_.head_dim * out_.heads != out_.hidden) {
      return unsupported(concat("the head size ", out_.head_dim, " is not ", out_.hidden, " / ",
                                out_.heads, ": not supported for ", architecture_.name));
    }
    rotary_dim_ = out_.head_dim;
    QMLP_TRY(metadata_.optional_size("rope.dimension_count", rotary_dim_));
    const bool partial = is("phi3");
    if (rotary_dim_ > out_.head_dim || rotary_dim_ % 2 != 0 ||
        (!partial && rotary_dim_ != out_.head_dim)) {
      return unsupported(
          concat(metadata_.key("rope.dimension_count"), " is ", rotary_dim_,
                 partial ? ", only even numbers up to the head size " : ", only the head size ",
                 out_.head_dim, partial ? " are supported" : " is supported"));
    }
    std::int64_t value_length = out_.head_dim;
    QMLP_TRY(metadata_.optional_size("attention.value_length", value_length));
    if (value_length != out_.head_dim) {
      return unsupported(concat(metadata_.key("attention.value_length"), " is ", value_length,
                                ", only the head size ", out_.head_dim, " is supported"));
    }
    return metadata_.optional_size("context_length", context_);
  }

  bool has_tensor(const char* name) const { return model_.find_tensor(name) != nullptr; }

  Status read_tensors() {
    const GgufTensor* embedding = model_.find_tensor("token_embd.weight");
    if (embedding == nullptr || embedding->shape.size() != 2) {
      return corrupt("tensor 'token_embd.weight' is missing or no matrix");
    }
    out_.vocab = embedding->shape[0];
    if (architecture_.biases == Biases::optional) {
      out_.attention_bias = has_tensor("blk.0.attn_q.bias");
      out_.mlp_bias = has_tensor("blk.0.ffn_gate.bias");
    }
    const bool headless = !has_tensor("output.weight");
    // mlx-lm does not scale what a tied head of a minicpm model gets; llama.cpp does.
    out_.copied_head = headless && is("minicpm");
    out_.tied = headless && !out_.copied_head;
    return {};
  }

  Status write_json() {
    JsonObject& json = out_.json;
    json.append("model_type", architecture_.model_type);
    json.append("architectures", Json(JsonArray{Json(architecture_.hf_class)}));
    json.append("hidden_size", out_.hidden);
    json.append("intermediate_size", out_.intermediate);
    json.append("num_hidden_layers", out_.layers);
    json.append("num_attention_heads", out_.heads);
    json.append("num_key_value_heads", out_.kv_heads);
    if (architecture_.has_head_dim) json.append("head_dim", out_.head_dim);
    json.append("vocab_size", out_.vocab);
    json.append("hidden_act", "silu");
    if (context_ != 0) json.append("max_position_embeddings", context_);
    QMLP_ASSIGN(const std::optional<float> eps,
                metadata_.positive("attention.layer_norm_rms_epsilon"));
    if (!eps) {
      return corrupt(concat(metadata_.key("attention.layer_norm_rms_epsilon"), " is missing"));
    }
    json.append("rms_norm_eps", shortest_decimal(*eps));
    QMLP_ASSIGN(const std::optional<float> stated_theta, metadata_.positive("rope.freq_base"));
    const float theta = stated_theta.value_or(10000.0f);
    json.append("rope_theta", shortest_decimal(theta));
    QMLP_ASSIGN(GgufRope rope, read_gguf_rope(metadata_, theta, rotary_dim_, context_));
    if (rope.scaling) json.append("rope_scaling", Json(*std::move(rope.scaling)));
    out_.used_tensors = std::move(rope.used_tensors);
    if (is("phi3")) QMLP_TRY(write_phi3(rope.original_context));
    if (is("smollm3")) write_smollm3();
    if (is("minicpm")) QMLP_TRY(write_minicpm());
    if (is("granite")) QMLP_TRY(write_granite());
    if (architecture_.biases == Biases::optional) {
      json.append("attention_bias", out_.attention_bias);
      json.append("mlp_bias", out_.mlp_bias);
    }
    json.append("tie_word_embeddings", out_.tied);
    return {};
  }

  // What the loader refuses in config.json is named before anything is written.
  Status check_json() const {
    std::vector<std::string> warnings;
    const auto loaded = parse_model_config(Json(out_.json), nullptr,
                                           concat(model_.path(), ": as config.json"), warnings);
    if (!loaded) return loaded.error();
    return {};
  }

  Status write_phi3(std::int64_t original_context) {
    const double factor = static_cast<double>(rotary_dim_) / static_cast<double>(out_.head_dim);
    // mlx-lm truncates the product with the head size.
    out_.json.append("partial_rotary_factor", shortest_that(factor, [this](double candidate) {
                       return static_cast<std::int64_t>(static_cast<double>(out_.head_dim) *
                                                        candidate) == rotary_dim_;
                     }));
    if (original_context != 0) {
      out_.json.append("original_max_position_embeddings", original_context);
    }
    const GgufValue* window = model_.find(metadata_.key("attention.sliding_window"));
    if (window == nullptr || window->integer() == 0) return {};  // 0: none
    std::int64_t size = 0;
    QMLP_TRY(metadata_.optional_size("attention.sliding_window", size));
    out_.json.append("sliding_window", size);
    return {};
  }

  void write_smollm3() {
    JsonArray layers;
    for (std::int64_t i = 1; i <= out_.layers; ++i) {
      layers.emplace_back(i % kSmolLm3NoRopeInterval != 0 ? 1 : 0);
    }
    out_.json.append("no_rope_layer_interval", kSmolLm3NoRopeInterval);
    out_.json.append("no_rope_layers", Json(std::move(layers)));
  }

  Status write_minicpm() {
    QMLP_ASSIGN(const std::optional<float> embedding, metadata_.positive("embedding_scale"));
    QMLP_ASSIGN(const std::optional<float> residual, metadata_.positive("residual_scale"));
    QMLP_ASSIGN(const std::optional<float> logit, metadata_.positive("logit_scale"));
    out_.json.append("scale_emb", shortest_decimal(embedding.value_or(kMiniCpmEmbeddingScale)));
    // The file states scale_depth / sqrt(layers) and hidden / dim_model_base, in f32.
    const double root = std::sqrt(static_cast<double>(out_.layers));
    double depth = kMiniCpmScaleDepth;
    if (residual) {
      depth = shortest_that(static_cast<double>(*residual) * root, [&](double candidate) {
        return static_cast<float>(candidate / root) == *residual;
      });
    }
    out_.json.append("scale_depth", depth);
    std::int64_t base = kMiniCpmModelBase;
    if (logit) {
      const auto hidden = static_cast<double>(out_.hidden);
      const double ratio = std::round(hidden / static_cast<double>(*logit));
      if (!(ratio >= 1.0) || static_cast<float>(hidden / ratio) != *logit) {
        return unsupported(concat(metadata_.key("logit_scale"), " is ",
                                  Json(shortest_decimal(*logit)).dump(), ", needs ", out_.hidden,
                                  " divided by an integer (dim_model_base)"));
      }
      base = static_cast<std::int64_t>(ratio);
    }
    out_.json.append("dim_model_base", base);
    return {};
  }

  Status write_granite() {
    struct Scale {
      const char* key;
      const char* field;
      double otherwise;
    };
    const double attention = 1.0 / std::sqrt(static_cast<double>(out_.head_dim));
    for (const Scale& scale : {Scale{"embedding_scale", "embedding_multiplier", 1.0},
                               Scale{"residual_scale", "residual_multiplier", 1.0},
                               Scale{"attention.scale", "attention_multiplier", attention},
                               Scale{"logit_scale", "logits_scaling", 1.0}}) {
      QMLP_ASSIGN(const std::optional<float> value, metadata_.positive(scale.key));
      out_.json.append(scale.field, value ? shortest_decimal(*value) : scale.otherwise);
    }
    return {};
  }

  const GgufModel& model_;
  GgufMetadata metadata_;
  const GgufArchitecture& architecture_;
  std::int64_t rotary_dim_ = 0;
  std::int64_t context_ = 0;
  GgufConfig out_;
};

}  // namespace

double shortest_decimal(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double out = value;
  std::from_chars(text, end, out);
  return out;
}

Result<GgufConfig> read_gguf_config(const GgufModel& model) {
  const GgufValue* name = model.find("general.architecture");
  if (name == nullptr || name->text() == nullptr) {
    return Error{Errc::corrupt_file,
                 concat(model.path(), ": general.architecture is missing or not a string")};
  }
  std::string known;
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (*name->text() == architecture.name) return ConfigReader(model, architecture).read();
    known += concat(known.empty() ? "" : ", ", architecture.name);
  }
  return Error{Errc::unsupported,
               concat(model.path(), ": general.architecture ", text::quote(*name->text()),
                      " is not supported, only ", known)};
}

}  // namespace qmlp
