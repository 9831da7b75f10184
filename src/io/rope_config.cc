#include "io/rope_config.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>

#include "base/concat.h"
#include "base/try.h"

namespace qmlp {
namespace {

struct KindName {
  std::string_view name;
  RopeKind kind;
};
constexpr KindName kKinds[] = {
    {"default", RopeKind::standard},   {"linear", RopeKind::linear},
    {"llama3", RopeKind::llama3},      {"yarn", RopeKind::yarn},
    {"deepseek_yarn", RopeKind::yarn}, {"telechat3-yarn", RopeKind::yarn},
    {"dynamic", RopeKind::dynamic},    {"longrope", RopeKind::longrope},
    {"su", RopeKind::longrope},
};

std::optional<RopeKind> find_kind(std::string_view name) {
  for (const KindName& known : kKinds) {
    if (known.name == name) return known.kind;
  }
  return std::nullopt;
}

std::string kind_list(const Architecture& architecture) {
  std::string list;
  for (const KindName& known : kKinds) {
    if (known.name != to_string(known.kind) || !architecture.takes(known.kind)) continue;
    list += concat(list.empty() ? "" : ", ", "\"", known.name, "\"");
  }
  return list;
}

// The kind that an object of rope settings names, by either of two fields; empty when by none.
Result<std::optional<RopeKind>> read_kind(const Fields& rope, const Architecture& architecture) {
  std::optional<RopeKind> found;
  for (const char* name : {"type", "rope_type"}) {
    const Json* value = rope.find(name);
    if (value == nullptr) continue;
    if (value->string() == nullptr) return rope.wrong(name, *value, "a string");
    const auto kind = find_kind(*value->string());
    if (!kind || !architecture.takes(*kind)) {
      return rope.unsupported(name, *value,
                              concat(kind_list(architecture), " for ", architecture.model_type));
    }
    if (found && *found != *kind) {
      return rope.wrong(name, *value, concat("the same as type, \"", to_string(*found), "\""));
    }
    found = kind;
  }
  return found;
}

Status read_long_factors(const Fields& rope, std::int64_t pairs, std::vector<double>& out) {
  const Json* value = rope.find("long_factor");
  const std::string need = concat("a number or ", pairs, " numbers above 0, one for each pair");
  if (value == nullptr) return rope.missing("long_factor", need);
  if (value->number()) {
    out.assign(static_cast<std::size_t>(pairs), *value->number());
  } else if (value->array() != nullptr) {
    for (const Json& factor : *value->array()) {
      if (!factor.number()) return rope.wrong("long_factor", *value, need);
      out.push_back(*factor.number());
    }
  }
  const bool good =
      static_cast<std::int64_t>(out.size()) == pairs &&
      std::all_of(out.begin(), out.end(), [](double f) { return f > 0.0 && std::isfinite(f); });
  if (good) return {};
  if (value->array() != nullptr) {
    return Error{Errc::corrupt_file, concat(rope.what(), ": long_factor holds ",
                                            value->array()->size(), " values, needs ", need)};
  }
  return rope.wrong("long_factor", *value, need);
}

// What one object of rope settings says. Both that a config may have must say the same.
struct Scaling {
  RopeKind kind = RopeKind::standard;
  double factor = 1.0;
  RopeScaling rope;
};

bool operator==(const Scaling& a, const Scaling& b) {
  return a.kind == b.kind && a.factor == b.factor &&
         a.rope.original_context == b.rope.original_context &&
         a.rope.low_freq_factor == b.rope.low_freq_factor &&
         a.rope.high_freq_factor == b.rope.high_freq_factor &&
         a.rope.beta_fast == b.rope.beta_fast && a.rope.beta_slow == b.rope.beta_slow &&
         a.rope.mscale == b.rope.mscale && a.rope.mscale_all_dim == b.rope.mscale_all_dim &&
         a.rope.long_factors == b.rope.long_factors;
}

constexpr const char* kOriginal = "original_max_position_embeddings";

Status read_llama3(const Fields& rope, Scaling& out) {
  QMLP_TRY(rope.positive("factor", out.factor));
  out.rope.original_context = 8192;
  QMLP_TRY(rope.optional_size(kOriginal, out.rope.original_context));
  QMLP_TRY(rope.optional_positive("low_freq_factor", out.rope.low_freq_factor));
  QMLP_TRY(rope.optional_positive("high_freq_factor", out.rope.high_freq_factor));
  if (out.rope.high_freq_factor > out.rope.low_freq_factor) return {};
  const Json* high = rope.find("high_freq_factor");
  return rope.wrong("high_freq_factor", high != nullptr ? *high : Json(4.0),
                    "a number above low_freq_factor");
}

Status read_yarn(const Fields& rope, const ModelConfig& config, Scaling& out) {
  QMLP_TRY(rope.positive("factor", out.factor));
  // Left out, mlx-lm takes 4096 and other programs the model's context: only where both agree is
  // there an answer.
  if (config.max_position_embeddings == 4096) out.rope.original_context = 4096;
  QMLP_TRY(rope.optional_size(kOriginal, out.rope.original_context));
  if (out.rope.original_context == 0) {
    return rope.missing(kOriginal, "the length that the model was first trained with");
  }
  QMLP_TRY(rope.optional_positive("beta_fast", out.rope.beta_fast));
  QMLP_TRY(rope.optional_positive("beta_slow", out.rope.beta_slow));
  for (const auto& [name, value] : {std::pair("mscale", &out.rope.mscale),
                                    std::pair("mscale_all_dim", &out.rope.mscale_all_dim)}) {
    const Json* number = rope.find(name);
    if (number == nullptr) continue;
    *value = number->number().value_or(-1.0);
    if (!(*value >= 0.0) || !std::isfinite(*value)) {
      return rope.wrong(name, *number, "a number of at least 0");
    }
  }
  return {};
}

Status read_longrope(const Fields& rope, const Fields& top, const ModelConfig& config,
                     Scaling& out) {
  // Configs name the trained length at the top, inside, or both.
  std::int64_t inside = 0;
  QMLP_TRY(top.optional_size(kOriginal, out.rope.original_context));
  QMLP_TRY(rope.optional_size(kOriginal, inside));
  if (inside != 0 && out.rope.original_context != 0 && inside != out.rope.original_context) {
    return rope.wrong(kOriginal, *rope.find(kOriginal),
                      concat(out.rope.original_context, ", as at the top of the file"));
  }
  if (inside != 0) out.rope.original_context = inside;
  if (out.rope.original_context < 2) {
    return rope.missing(kOriginal, "the length that the model was first trained with, 2 or more");
  }
  if (config.max_position_embeddings == 0) {
    return top.missing("max_position_embeddings", "the model's context, for longrope's scale");
  }
  out.factor = static_cast<double>(config.max_position_embeddings) /
               static_cast<double>(out.rope.original_context);
  return read_long_factors(rope, config.rotary_dim / 2, out.rope.long_factors);
}

Result<std::optional<Scaling>> read_scaling(const Fields& rope, const Fields& top,
                                            const Architecture& architecture,
                                            const ModelConfig& config) {
  QMLP_ASSIGN(const std::optional<RopeKind> kind, read_kind(rope, architecture));
  if (!kind) {
    for (const char* name : {"factor", "long_factor", "short_factor"}) {
      if (rope.find(name) == nullptr) continue;
      return rope.missing("rope_type", concat("one of ", kind_list(architecture)));
    }
    return std::optional<Scaling>();
  }
  Scaling out;
  out.kind = *kind;
  switch (*kind) {
    case RopeKind::standard:
      break;
    case RopeKind::linear:
      QMLP_TRY(rope.positive("factor", out.factor));
      break;
    case RopeKind::dynamic:
      QMLP_TRY(rope.positive("factor", out.factor));
      if (config.max_position_embeddings == 0) {
        return top.missing("max_position_embeddings",
                           "the context from which dynamic rope changes");
      }
      break;
    case RopeKind::llama3:
      QMLP_TRY(read_llama3(rope, out));
      break;
    case RopeKind::yarn:
      QMLP_TRY(read_yarn(rope, config, out));
      break;
    case RopeKind::longrope:
      QMLP_TRY(read_longrope(rope, top, config, out));
      break;
  }
  return std::optional<Scaling>(out);
}

// A number that may stand at the top, in rope_parameters or in rope_scaling, once or alike.
Status read_shared(const std::vector<const Fields*>& places, std::string_view name,
                   std::optional<double>& out) {
  const Fields* first = nullptr;
  for (const Fields* place : places) {
    if (place->find(name) == nullptr) continue;
    double value = 0.0;
    QMLP_TRY(place->positive(name, value));
    if (out && *out != value) {
      return place->wrong(
          name, *place->find(name),
          concat("the same as in ", first->what(), ", ", first->find(name)->dump()));
    }
    if (!out) first = place;
    out = value;
  }
  return {};
}

Status set_rotary_dim(const std::vector<const Fields*>& places, const Architecture& architecture,
                      ModelConfig& config) {
  config.rotary_dim = config.head_dim;
  std::optional<double> part;
  QMLP_TRY(read_shared(places, "partial_rotary_factor", part));
  if (part && *part != 1.0) {
    if (!architecture.partial_rotary || *part > 1.0) {
      const Fields* place = *std::find_if(places.begin(), places.end(), [](const Fields* fields) {
        return fields->find("partial_rotary_factor") != nullptr;
      });
      return place->unsupported(
          "partial_rotary_factor", *place->find("partial_rotary_factor"),
          architecture.partial_rotary ? "0 to 1" : concat("1.0 for ", architecture.model_type));
    }
    config.rotary_dim = static_cast<std::int64_t>(static_cast<double>(config.head_dim) * *part);
  }
  if (config.rotary_dim >= 2 && config.rotary_dim % 2 == 0) return {};
  return Error{Errc::corrupt_file,
               concat(places.front()->what(), ": head_dim ", config.head_dim,
                      part ? concat(" times partial_rotary_factor rotates ", config.rotary_dim,
                                    " features, needs an even number")
                           : std::string(" is odd, rope needs pairs"))};
}

std::int64_t context_length(const ModelConfig& config) {
  const auto stated = static_cast<double>(config.max_position_embeddings);
  double context = stated;
  if (config.rope_kind == RopeKind::linear) context *= std::max(config.rope_factor, 1.0);
  if (config.rope_kind == RopeKind::yarn && stated > 0.0) {
    context =
        std::max(context, static_cast<double>(config.rope.original_context) * config.rope_factor);
  }
  return static_cast<std::int64_t>(std::min(context, 0x1p53));
}

}  // namespace

const char* to_string(RopeKind kind) noexcept {
  switch (kind) {
    case RopeKind::standard:
      return "default";
    case RopeKind::linear:
      return "linear";
    case RopeKind::llama3:
      return "llama3";
    case RopeKind::yarn:
      return "yarn";
    case RopeKind::dynamic:
      return "dynamic";
    case RopeKind::longrope:
      return "longrope";
  }
  return "unknown";
}

Status read_rope(const Fields& fields, const Architecture& architecture, ModelConfig& config) {
  const std::string what(fields.what());
  std::vector<Fields> objects;
  std::vector<std::string> names;
  names.reserve(2);  // Fields borrow them
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const Json* value = fields.find(name);
    if (value == nullptr) continue;
    if (value->object() == nullptr) return fields.wrong(name, *value, "an object or null");
    names.push_back(concat(what, ": ", name));
    objects.emplace_back(*value, names.back());
  }
  std::vector<const Fields*> places{&fields};
  for (const Fields& object : objects) places.push_back(&object);

  std::optional<double> theta;
  QMLP_TRY(read_shared(places, "rope_theta", theta));
  config.rope_theta = theta.value_or(architecture.rope_theta);
  if (!theta && config.rope_theta == 0.0) return fields.missing("rope_theta", "a number above 1");
  if (!(config.rope_theta > 1.0)) {
    return fields.wrong("rope_theta", Json(config.rope_theta), "a number above 1");
  }

  QMLP_TRY(fields.flag("rope_traditional", config.rope_traditional));
  if (config.rope_traditional && architecture.rope_traditional == Architecture::Field::no) {
    return fields.unsupported("rope_traditional", Json(true),
                              concat("false for ", architecture.model_type));
  }
  QMLP_TRY(set_rotary_dim(places, architecture, config));

  std::optional<Scaling> scaling;
  for (const Fields& object : objects) {
    QMLP_ASSIGN(const std::optional<Scaling> found,
                read_scaling(object, fields, architecture, config));
    if (!found) continue;
    if (scaling && !(*scaling == *found)) {
      return Error{Errc::corrupt_file,
                   concat(what,
                          ": rope_scaling and rope_parameters differ, needs one of them, or "
                          "both alike")};
    }
    scaling = found;
  }
  if (scaling) {
    config.rope_kind = scaling->kind;
    config.rope_factor = scaling->factor;
    config.rope = scaling->rope;
  }
  // mlx-lm's longrope pairs halves whatever the config says.
  if (config.rope_kind == RopeKind::longrope) config.rope_traditional = false;
  config.context_length = context_length(config);
  return {};
}

}  // namespace qmlp
