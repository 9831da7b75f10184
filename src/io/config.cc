#include "io/config.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"

namespace qmlp {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;
constexpr std::int64_t kMaxLayers = 100'000;

// Reads fields of one JSON object and says which field of which file was wrong.
class Fields {
 public:
  Fields(const Json& json, std::string_view what) : json_(json), what_(what) {}

  // Null also when the member is null, which configs write for "not set".
  const Json* find(std::string_view name) const {
    const Json* value = json_.find(name);
    return value == nullptr || value->is_null() ? nullptr : value;
  }
  Error wrong(std::string_view name, const Json& value, std::string_view need) const {
    return Error{Errc::corrupt_file,
                 concat(what_, ": ", name, " is ", value.dump(), ", needs ", need)};
  }
  Error unsupported(std::string_view name, const Json& value, std::string_view need) const {
    return Error{Errc::unsupported,
                 concat(what_, ": ", name, " ", value.dump(), " is not supported, only ", need)};
  }
  Error missing(std::string_view name) const {
    return Error{Errc::corrupt_file, concat(what_, ": ", name, " is missing")};
  }

  Status size(std::string_view name, std::int64_t& out, std::int64_t limit = kMaxSize) const {
    const Json* value = find(name);
    if (value == nullptr) return missing(name);
    return optional_size(name, out, limit);
  }
  Status optional_size(std::string_view name, std::int64_t& out,
                       std::int64_t limit = kMaxSize) const {
    const Json* value = find(name);
    if (value == nullptr) return {};
    const auto number = value->integer();
    if (!number || *number < 1 || *number > limit) {
      return wrong(name, *value, concat("an integer from 1 to ", limit));
    }
    out = *number;
    return {};
  }
  Status positive(std::string_view name, double& out) const {
    const Json* value = find(name);
    if (value == nullptr) return {};
    const auto number = value->number();
    if (!number || !(*number > 0.0) || !std::isfinite(*number)) {
      return wrong(name, *value, "a number above 0");
    }
    out = *number;
    return {};
  }
  Status flag(std::string_view name, bool& out) const {
    const Json* value = find(name);
    if (value == nullptr) return {};
    const auto number = value->boolean();
    if (!number) return wrong(name, *value, "true or false");
    out = *number;
    return {};
  }

 private:
  const Json& json_;
  std::string_view what_;
};

Status read_model_type(const Fields& fields, ModelConfig& out) {
  const Json* type = fields.find("model_type");
  if (type == nullptr) return fields.missing("model_type");
  if (type->string() == nullptr) return fields.wrong("model_type", *type, "a string");
  out.model_type = *type->string();
  if (out.model_type != "llama" && out.model_type != "mistral") {
    return fields.unsupported("model_type", *type, "\"llama\" and \"mistral\" without a window");
  }
  return {};
}

Status refuse_other_architectures(const Fields& fields, const ModelConfig& config) {
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
  if (const Json* types = fields.find("layer_types")) {
    if (types->array() == nullptr) return fields.wrong("layer_types", *types, "an array");
    for (const Json& type : *types->array()) {
      if (type.string() == nullptr || *type.string() != "full_attention") {
        return fields.unsupported("layer_types", type, "\"full_attention\"");
      }
    }
  }
  const Json* window = fields.find("sliding_window");
  if (window != nullptr && config.model_type == "mistral") {
    const auto size = window->integer();
    const bool covers_all =
        size && config.max_position_embeddings > 0 && *size >= config.max_position_embeddings;
    if (!covers_all) {
      return fields.unsupported("sliding_window", *window, "null (or the whole context)");
    }
  }
  if (const Json* act = fields.find("hidden_act")) {
    if (act->string() == nullptr || (*act->string() != "silu" && *act->string() != "swish")) {
      return fields.unsupported("hidden_act", *act, "\"silu\"");
    }
  }
  if (const Json* part = fields.find("partial_rotary_factor")) {
    if (part->number() != 1.0) return fields.unsupported("partial_rotary_factor", *part, "1.0");
  }
  return {};
}

// rope_scaling, or rope_parameters as newer configs name it (with rope_theta inside).
Status read_rope(const Fields& fields, std::string_view what, ModelConfig& out) {
  QMLP_TRY(fields.positive("rope_theta", out.rope_theta));
  QMLP_TRY(fields.flag("rope_traditional", out.rope_traditional));
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const Json* value = fields.find(name);
    if (value == nullptr) continue;
    if (value->object() == nullptr) return fields.wrong(name, *value, "an object or null");
    const std::string where = concat(what, ": ", name);
    const Fields rope(*value, where);
    QMLP_TRY(rope.positive("rope_theta", out.rope_theta));
    const Json* type = rope.find("rope_type");
    if (type == nullptr) type = rope.find("type");
    if (type == nullptr) continue;
    const std::string* kind = type->string();
    if (kind == nullptr) return rope.wrong("rope_type", *type, "a string");
    if (*kind == "default") continue;
    if (*kind != "linear") {
      return rope.unsupported("rope_type", *type, "\"default\" and \"linear\"");
    }
    if (rope.find("factor") == nullptr) return rope.missing("factor");
    QMLP_TRY(rope.positive("factor", out.rope_factor));
    out.rope_kind = RopeKind::linear;
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

Status check_heads(std::string_view what, ModelConfig& config) {
  if (config.head_dim == 0) {
    if (config.hidden_size % config.num_attention_heads != 0) {
      return Error{Errc::corrupt_file,
                   concat(what, ": hidden_size ", config.hidden_size, " is no multiple of ",
                          config.num_attention_heads, " heads, and head_dim is missing")};
    }
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
  if (config.num_key_value_heads == 0) config.num_key_value_heads = config.num_attention_heads;
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return Error{Errc::corrupt_file,
                 concat(what, ": num_key_value_heads ", config.num_key_value_heads,
                        " does not divide ", config.num_attention_heads, " attention heads")};
  }
  if (config.head_dim % 2 != 0) {
    return Error{Errc::corrupt_file,
                 concat(what, ": head_dim ", config.head_dim, " is odd, rope needs pairs")};
  }
  const auto width = checked_mul(config.head_dim, config.num_attention_heads);
  if (!width || *width > kMaxSize) {
    return Error{Errc::corrupt_file, concat(what, ": head_dim ", config.head_dim, " times ",
                                            config.num_attention_heads, " heads is too large")};
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
  QMLP_TRY(read_model_type(fields, out));
  QMLP_TRY(fields.optional_size("max_position_embeddings", out.max_position_embeddings));
  QMLP_TRY(refuse_other_architectures(fields, out));
  QMLP_TRY(fields.size("hidden_size", out.hidden_size));
  QMLP_TRY(fields.size("intermediate_size", out.intermediate_size));
  QMLP_TRY(fields.size("num_hidden_layers", out.num_hidden_layers, kMaxLayers));
  QMLP_TRY(fields.size("num_attention_heads", out.num_attention_heads));
  QMLP_TRY(fields.optional_size("num_key_value_heads", out.num_key_value_heads));
  QMLP_TRY(fields.optional_size("head_dim", out.head_dim));
  QMLP_TRY(fields.size("vocab_size", out.vocab_size));
  QMLP_TRY(check_heads(what, out));
  if (fields.find("rms_norm_eps") == nullptr) return fields.missing("rms_norm_eps");
  QMLP_TRY(fields.positive("rms_norm_eps", out.rms_norm_eps));
  QMLP_TRY(read_rope(fields, what, out));
  QMLP_TRY(fields.flag("attention_bias", out.attention_bias));
  QMLP_TRY(fields.flag("mlp_bias", out.mlp_bias));
  QMLP_TRY(fields.flag("tie_word_embeddings", out.tie_word_embeddings));

  std::vector<std::int32_t> bos;
  QMLP_TRY(read_ids(fields, "bos_token_id", out.vocab_size, bos, warnings));
  if (!bos.empty()) out.bos_token_id = bos.front();
  QMLP_TRY(read_ids(fields, "eos_token_id", out.vocab_size, out.eos_token_ids, warnings));
  if (generation_config != nullptr) {
    const Fields generation(*generation_config, "generation_config.json");
    QMLP_TRY(read_ids(generation, "eos_token_id", out.vocab_size, out.eos_token_ids, warnings));
  }
  return out;
}

namespace {

Status check_mode(const Fields& fields) {
  const Json* mode = fields.find("mode");
  if (mode == nullptr || (mode->string() != nullptr && *mode->string() == "affine")) return {};
  return fields.unsupported("mode", *mode, "\"affine\"");
}

// MLX's affine defaults hold where an override leaves a field out; nothing is inherited.
constexpr int kDefaultBits = 4;
constexpr int kDefaultGroup = 64;

Status read_bits_and_group(const Fields& fields, bool required, int& bits, int& group_size) {
  const Json* bits_value = fields.find("bits");
  const Json* group_value = fields.find("group_size");
  if (required && bits_value == nullptr) return fields.missing("bits");
  if (required && group_value == nullptr) return fields.missing("group_size");
  bits = kDefaultBits;
  group_size = kDefaultGroup;
  if (bits_value != nullptr) {
    const auto number = bits_value->integer().value_or(0);
    if (number < 2 || number > 8 || number == 7) {
      return fields.unsupported("bits", *bits_value, "2, 3, 4, 5, 6 and 8");
    }
    bits = static_cast<int>(number);
  }
  if (group_value != nullptr) {
    const auto number = group_value->integer().value_or(0);
    if (number != 32 && number != 64 && number != 128) {
      return fields.unsupported("group_size", *group_value, "32, 64 and 128");
    }
    group_size = static_cast<int>(number);
  }
  return {};
}

}  // namespace

Result<QuantConfig> parse_quant_config(const Json& config, std::string_view what) {
  const Fields top(config, what);
  const char* name = "quantization";
  const Json* value = top.find(name);
  if (value == nullptr) {
    name = "quantization_config";
    value = top.find(name);
    const Json* method = value != nullptr ? value->find("quant_method") : nullptr;
    if (method != nullptr) {
      return Error{Errc::unsupported,
                   concat(what, ": quantization_config.quant_method ", method->dump(),
                          " is not supported, only MLX's affine format: convert the model with "
                          "mlx_lm.convert, or start from its unquantized weights")};
    }
  }
  QuantConfig out;
  if (value == nullptr || value->boolean() == false) return out;
  if (value->object() == nullptr) return top.wrong(name, *value, "an object");
  out.present = true;
  const std::string where = concat(what, ": ", name);
  const Fields fields(*value, where);
  QMLP_TRY(check_mode(fields));
  QMLP_TRY(read_bits_and_group(fields, true, out.bits, out.group_size));
  if (const Json* activations = fields.find("quantize_activations")) {
    if (activations->boolean() != false) {
      return fields.unsupported("quantize_activations", *activations, "false");
    }
  }
  for (const JsonMember& member : value->object()->members()) {
    const bool is_module = member.value.object() != nullptr || member.value.boolean().has_value();
    if (!is_module || member.name == "quantize_activations") continue;
    QuantOverride override;
    override.key = member.name;
    if (const auto flag = member.value.boolean()) {
      override.kind = *flag ? QuantOverride::Kind::standard : QuantOverride::Kind::unquantized;
      override.bits = out.bits;
      override.group_size = out.group_size;
    } else {
      const std::string at = concat(where, ".", member.name);
      const Fields nested(member.value, at);
      QMLP_TRY(check_mode(nested));
      QMLP_TRY(read_bits_and_group(nested, false, override.bits, override.group_size));
    }
    out.overrides.push_back(std::move(override));
  }
  return out;
}

std::string canonical_module_path(std::string_view key) {
  const auto strip = [&key](std::string_view prefix) {
    if (key.substr(0, prefix.size()) != prefix) return false;
    key.remove_prefix(prefix.size());
    return true;
  };
  const bool wrapped = strip("model.language_model.") || strip("language_model.");
  // Inside "model.language_model." the model's own "model." is gone; elsewhere it may be.
  const auto starts = [&key](std::string_view prefix) {
    return key.substr(0, prefix.size()) == prefix;
  };
  if (starts("layers.") || (wrapped && starts("embed_tokens"))) {
    return concat("model.", key);
  }
  return std::string(key);
}

}  // namespace qmlp
