#include "io/config.h"

#include <algorithm>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "io/architecture.h"
#include "io/fields.h"
#include "io/rope_config.h"

namespace qmlp {
namespace {

constexpr std::int64_t kMaxLayers = 100'000;
using Bias = Architecture::Bias;
using Field = Architecture::Field;

std::string join(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += concat(out.empty() ? "" : ", ", name);
  return out;
}

Result<const Architecture*> read_architecture(const Fields& fields) {
  std::string name;
  QMLP_TRY(fields.text("model_type", name));
  if (const Architecture* row = find_architecture(name)) return row;
  const std::string_view why = why_unsupported(name);
  return Error{
      Errc::unsupported,
      concat(fields.what(), ": model_type \"", name, "\" is not supported",
             why.empty() ? "" : concat(" (", why, ")"), ", only ", join(supported_model_types()))};
}

// What would change the answer if it were ignored.
Status refuse_other_models(const Fields& fields) {
  if (const Json* file = fields.find("model_file")) {
    return fields.unsupported("model_file", *file, "models without code of their own");
  }
  for (const char* name : {"num_local_experts", "num_experts", "n_routed_experts",
                           "moe_num_experts", "num_experts_per_tok"}) {
    const Json* value = fields.find(name);
    if (value != nullptr && value->integer() != 0) {
      return fields.unsupported(name, *value, "models without experts");
    }
  }
  for (const char* name : {"hidden_act", "hidden_activation"}) {
    const Json* act = fields.find(name);
    if (act == nullptr) continue;
    if (act->string() == nullptr || (*act->string() != "silu" && *act->string() != "swish")) {
      return fields.unsupported(name, *act, "\"silu\"");
    }
  }
  return {};
}

// A size that the model must state, may state, or states nowhere.
Status read_size(const Fields& fields, Field rule, std::string_view name, std::int64_t& out) {
  return rule == Field::required ? fields.size(name, out) : fields.optional_size(name, out);
}

Status read_heads(const Fields& fields, const Architecture& architecture, ModelConfig& config) {
  const std::string_view what = fields.what();
  QMLP_TRY(fields.size("num_attention_heads", config.num_attention_heads));
  QMLP_TRY(read_size(fields, architecture.num_key_value_heads, "num_key_value_heads",
                     config.num_key_value_heads));
  QMLP_TRY(read_size(fields, architecture.head_dim, "head_dim", config.head_dim));
  const bool divides = config.hidden_size % config.num_attention_heads == 0;
  const std::int64_t derived = divides ? config.hidden_size / config.num_attention_heads : 0;
  if (config.head_dim == 0 || architecture.head_dim == Field::no) {
    if (!divides) {
      return Error{Errc::corrupt_file,
                   concat(what, ": hidden_size ", config.hidden_size, " is no multiple of ",
                          config.num_attention_heads, " heads",
                          architecture.head_dim == Field::no ? "" : ", and head_dim is missing")};
    }
    if (config.head_dim != 0 && config.head_dim != derived) {
      return fields.wrong(
          "head_dim", Json(config.head_dim),
          concat(derived, ", hidden_size / num_attention_heads, for ", architecture.model_type));
    }
    config.head_dim = derived;
  }
  if (config.num_key_value_heads == 0) config.num_key_value_heads = config.num_attention_heads;
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return Error{Errc::corrupt_file,
                 concat(what, ": num_key_value_heads ", config.num_key_value_heads,
                        " does not divide ", config.num_attention_heads, " attention heads")};
  }
  const auto width = checked_mul(config.head_dim, config.num_attention_heads);
  if (!width || *width > Fields::kMaxSize) {
    return Error{Errc::corrupt_file, concat(what, ": head_dim ", config.head_dim, " times ",
                                            config.num_attention_heads, " heads is too large")};
  }
  return {};
}

Status read_bias(const Fields& fields, const Architecture& architecture, Bias rule,
                 std::string_view name, bool& out) {
  if (rule == Bias::always) {
    out = true;
    return {};
  }
  if (rule == Bias::required && fields.find(name) == nullptr) {
    return fields.missing(name, "true or false");
  }
  QMLP_TRY(fields.flag(name, out));
  if (rule != Bias::none || !out) return {};
  return fields.unsupported(name, Json(true), concat("false for ", architecture.model_type));
}

Status read_biases(const Fields& fields, const Architecture& row, ModelConfig& config) {
  QMLP_TRY(read_bias(fields, row, row.qkv_bias, "attention_bias", config.attention_bias));
  if (row.qkv_bias != Bias::always) {  // else attention_bias is not a field of this model
    QMLP_TRY(
        read_bias(fields, row, row.output_bias, "attention_bias", config.attention_output_bias));
  }
  return read_bias(fields, row, row.mlp_bias, "mlp_bias", config.mlp_bias);
}

Status read_tied(const Fields& fields, const Architecture& architecture, bool& out) {
  constexpr const char* kName = "tie_word_embeddings";
  constexpr const char* kNeed = "true or false";
  const bool required = architecture.tied == Architecture::Tied::required;
  // Programs read null as false or as their default, so it says nothing.
  if (fields.find(kName) == nullptr && (required || fields.has(kName))) {
    return fields.missing(kName, kNeed);
  }
  out = architecture.tied != Architecture::Tied::not_by_default;
  return fields.flag(kName, out);
}

// Layers without rotary embedding: a list of flags, or every n-th layer.
Status read_rotary_layers(const Fields& fields, ModelConfig& config) {
  std::int64_t interval = 4;
  QMLP_TRY(fields.optional_size("no_rope_layer_interval", interval));
  const Json* list = fields.find("no_rope_layers");
  if (list == nullptr) {
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      config.layers[i].rotary = (i + 1) % static_cast<std::size_t>(interval) != 0;
    }
    return {};
  }
  const std::string need =
      concat("an array of ", config.num_hidden_layers, " numbers, 1 for a layer with rope, else 0");
  if (list->array() == nullptr) return fields.wrong("no_rope_layers", *list, need);
  if (list->array()->size() != config.layers.size()) {
    return Error{Errc::corrupt_file, concat(fields.what(), ": no_rope_layers holds ",
                                            list->array()->size(), " values, needs ", need)};
  }
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const Json& value = (*list->array())[i];
    const auto number = value.integer();
    if (number != 0 && number != 1) return fields.wrong("no_rope_layers", value, need);
    config.layers[i].rotary = *number == 1;
  }
  return {};
}

// Up to the window a model with it and one without give the same logits, and programs differ on
// which this one is: so the context ends there.
void end_context_at(std::int64_t window, std::string_view field, ModelConfig& config,
                    std::vector<std::string>& warnings) {
  if (config.context_length != 0 && config.context_length <= window) return;
  warnings.push_back(concat(field, " ", window,
                            " is not run for this model: mlx-lm ignores it, other programs do not; "
                            "the context ends there, where both agree"));
  config.context_length = window;
}

Status read_windows(const Fields& fields, const Architecture& architecture, ModelConfig& config,
                    std::vector<std::string>& warnings) {
  std::int64_t window = 0;
  QMLP_TRY(fields.optional_size("sliding_window", window));
  bool enabled = architecture.window == Architecture::Window::stated;
  if (architecture.window == Architecture::Window::if_enabled) {
    QMLP_TRY(fields.flag("use_sliding_window", enabled));
  }
  const Json* types = fields.find("layer_types");
  if (types == nullptr) {
    if (enabled && window != 0) end_context_at(window, "sliding_window", config, warnings);
    return {};
  }
  if (types->array() == nullptr) return fields.wrong("layer_types", *types, "an array");
  if (types->array()->size() != config.layers.size()) {
    return Error{Errc::corrupt_file,
                 concat(fields.what(), ": layer_types holds ", types->array()->size(),
                        " values, needs ", config.num_hidden_layers, ", one for each layer")};
  }
  bool any = false;
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    const Json& type = (*types->array())[i];
    const std::string* name = type.string();
    const bool sliding = name != nullptr && *name == "sliding_attention";
    if (name == nullptr || (!sliding && *name != "full_attention")) {
      return fields.unsupported("layer_types", type, "\"full_attention\", \"sliding_attention\"");
    }
    if (!sliding) continue;
    if (window == 0) {
      return fields.missing("sliding_window", "the tokens that a sliding_attention layer sees");
    }
    any = true;
    if (architecture.layer_windows) config.layers[i].window = window;
  }
  if (any && !architecture.layer_windows) {
    end_context_at(window, "sliding_window", config, warnings);
  }
  return {};
}

// Token ids as configs write them: an integer or an array of integers.
Status read_ids(const Fields& fields, std::string_view name, std::int64_t vocab_size,
                std::vector<std::int32_t>& ids, std::vector<std::string>& warnings) {
  const Json* value = fields.find(name);
  if (value == nullptr) return {};
  const JsonArray one{*value};
  for (const Json& id : value->array() != nullptr ? *value->array() : one) {
    const auto number = id.integer();
    if (!number) return fields.wrong(name, *value, "an integer or an array of integers");
    if (*number < 0 || *number >= vocab_size) {
      warnings.push_back(concat(name, ": id ", *number, " is outside the vocabulary of ",
                                vocab_size, " and is ignored"));
      continue;
    }
    const auto token = static_cast<std::int32_t>(*number);
    if (std::find(ids.begin(), ids.end(), token) == ids.end()) ids.push_back(token);
  }
  return {};
}

}  // namespace

Result<ModelConfig> parse_model_config(const Json& config, const Json* generation_config,
                                       std::string_view what, std::vector<std::string>& warnings) {
  if (config.object() == nullptr) {
    return Error{Errc::corrupt_file,
                 concat(what, ": is ", config.kind_name(), ", needs an object")};
  }
  const Fields fields(config, what);
  ModelConfig out;
  QMLP_ASSIGN(const Architecture* const architecture, read_architecture(fields));
  out.model_type = architecture->model_type;
  QMLP_TRY(refuse_other_models(fields));
  QMLP_TRY(fields.size("hidden_size", out.hidden_size));
  QMLP_TRY(fields.size("intermediate_size", out.intermediate_size));
  QMLP_TRY(fields.size("num_hidden_layers", out.num_hidden_layers, kMaxLayers));
  QMLP_TRY(fields.size("vocab_size", out.vocab_size));
  QMLP_TRY(read_heads(fields, *architecture, out));
  QMLP_TRY(read_size(fields, architecture->max_position_embeddings, "max_position_embeddings",
                     out.max_position_embeddings));
  QMLP_TRY(fields.positive("rms_norm_eps", out.rms_norm_eps));
  QMLP_TRY(read_tied(fields, *architecture, out.tie_word_embeddings));
  QMLP_TRY(read_biases(fields, *architecture, out));
  QMLP_TRY(read_rope(fields, *architecture, out));
  out.qk_norm = architecture->qk_norm;
  out.layers.resize(static_cast<std::size_t>(out.num_hidden_layers));
  if (architecture->rotary_layers) QMLP_TRY(read_rotary_layers(fields, out));
  QMLP_TRY(read_windows(fields, *architecture, out, warnings));
  if (architecture->read_scales != nullptr) QMLP_TRY(architecture->read_scales(fields, out));

  std::vector<std::int32_t> bos;
  QMLP_TRY(read_ids(fields, "bos_token_id", out.vocab_size, bos, warnings));
  if (!bos.empty()) out.bos_token_id = bos.front();
  QMLP_TRY(read_ids(fields, "eos_token_id", out.vocab_size, out.eos_token_ids, warnings));
  if (generation_config != nullptr) {
    if (generation_config->object() == nullptr) {
      return Error{Errc::corrupt_file, concat("generation_config.json: is ",
                                              generation_config->kind_name(), ", needs an object")};
    }
    const Fields generation(*generation_config, "generation_config.json");
    QMLP_TRY(read_ids(generation, "eos_token_id", out.vocab_size, out.eos_token_ids, warnings));
  }
  return out;
}

}  // namespace qmlp
