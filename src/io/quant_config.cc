#include "io/config.h"

#include <optional>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/fields.h"

namespace qmlp {
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
  if (required && bits_value == nullptr) return fields.missing("bits", "2, 3, 4, 5, 6 or 8");
  if (required && group_value == nullptr) return fields.missing("group_size", "32, 64 or 128");
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

Result<QuantOverride> read_override(const JsonMember& member, std::string_view where,
                                    const QuantConfig& global) {
  QuantOverride out;
  out.key = member.name;
  if (const auto flag = member.value.boolean()) {
    out.kind = *flag ? QuantOverride::Kind::standard : QuantOverride::Kind::unquantized;
    out.bits = global.bits;
    out.group_size = global.group_size;
    return out;
  }
  const std::string at = concat(where, ".", member.name);
  const Fields fields(member.value, at);
  QMLP_TRY(check_mode(fields));
  QMLP_TRY(read_bits_and_group(fields, false, out.bits, out.group_size));
  return out;
}

Status refuse_quantized_activations(const Fields& fields) {
  const Json* activations = fields.find("quantize_activations");
  if (activations == nullptr || activations->boolean() == false) return {};
  return fields.unsupported("quantize_activations", *activations, "false");
}

bool is_module_path(std::string_view key) {
  return key == "lm_head" || key.find('.') != std::string_view::npos;
}

// An entry of MLX's own form.
Result<QuantConfig> read_entry(const Json& value, std::string_view where) {
  QuantConfig out;
  out.present = true;
  const Fields fields(value, where);
  QMLP_TRY(check_mode(fields));
  QMLP_TRY(read_bits_and_group(fields, true, out.bits, out.group_size));
  QMLP_TRY(refuse_quantized_activations(fields));
  for (const JsonMember& member : value.object()->members()) {
    const bool is_module = member.value.object() != nullptr || member.value.boolean().has_value();
    if (!is_module && is_module_path(member.name)) {
      return fields.wrong(member.name, member.value, "an object, true or false");
    }
    if (!is_module || member.name == "quantize_activations") continue;
    QMLP_ASSIGN(QuantOverride override, read_override(member, where, out));
    out.overrides.push_back(std::move(override));
  }
  return out;
}

const QuantOverride* find_key(const QuantConfig& config, std::string_view key) {
  for (const QuantOverride& override : config.overrides) {
    if (override.key == key) return &override;
  }
  return nullptr;
}

// The first key at which two entries differ; empty when they say the same.
std::string difference(const QuantConfig& a, const QuantConfig& b) {
  const auto describe = [](int bits, int group_size) {
    return concat(bits, " bits, group ", group_size);
  };
  if (a.bits != b.bits || a.group_size != b.group_size) {
    return concat("the first says ", describe(a.bits, a.group_size), ", the second ",
                  describe(b.bits, b.group_size));
  }
  for (const auto& [from, to] : {std::pair(&a, &b), std::pair(&b, &a)}) {
    for (const QuantOverride& override : from->overrides) {
      const QuantOverride* other = find_key(*to, override.key);
      if (other == nullptr) return concat("only one has '", override.key, "'");
      if (other->kind != override.kind || other->bits != override.bits ||
          other->group_size != override.group_size) {
        return concat("'", override.key, "' is not the same in both");
      }
    }
  }
  return {};
}

}  // namespace

Result<QuantConfig> parse_quant_config(const Json& config, std::string_view what,
                                       std::vector<std::string>* warnings) {
  const Fields top(config, what);
  QMLP_TRY(refuse_quantized_activations(top));
  std::optional<QuantConfig> out;
  for (const char* name : {"quantization", "quantization_config"}) {
    const Json* value = top.find(name);
    if (value == nullptr || value->boolean() == false) continue;
    if (value->object() == nullptr) return top.wrong(name, *value, "an object");
    if (const Json* method = value->find("quant_method")) {
      if (!out) {
        return Error{Errc::unsupported,
                     concat(what, ": ", name, ".quant_method ", method->dump(),
                            " is not supported, only MLX's affine format: convert the model with "
                            "mlx_lm.convert, or start from its unquantized weights")};
      }
      if (warnings != nullptr) {
        warnings->push_back(concat("config.json: ", name, " names quant_method ", method->dump(),
                                   " and is ignored, since quantization is there too"));
      }
      continue;
    }
    QMLP_ASSIGN(QuantConfig entry, read_entry(*value, concat(what, ": ", name)));
    if (out) {
      const std::string unlike = difference(*out, entry);
      if (!unlike.empty()) {
        return Error{Errc::corrupt_file,
                     concat(what, ": quantization and quantization_config differ, ", unlike,
                            ", needs one of them, or both alike")};
      }
      continue;
    }
    out = std::move(entry);
  }
  return out.value_or(QuantConfig{});
}

std::string canonical_module_path(std::string_view key) {
  const auto strip = [&key](std::string_view prefix) {
    if (!key.starts_with(prefix)) return false;
    key.remove_prefix(prefix.size());
    return true;
  };
  const bool wrapped = strip("model.language_model.") || strip("language_model.");
  // Inside "model.language_model." the model's own "model." is gone; elsewhere it may be.
  if (key.starts_with("layers.") || (wrapped && key.starts_with("embed_tokens"))) {
    return concat("model.", key);
  }
  return std::string(key);
}

}  // namespace qmlp
