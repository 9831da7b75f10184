#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "qmlp/checkpoint.h"
#include "qmlp/status.h"

namespace qmlp {

// The fields of config.json (and generation_config.json, null when there is none) that a forward
// needs. Refuses by name what it would change the answer to ignore: other model types, experts,
// unknown rope types, custom code. `what` names the file in messages.
Result<ModelConfig> parse_model_config(const Json& config, const Json* generation_config,
                                       std::string_view what, std::vector<std::string>& warnings);

// How config.json says that a module is stored.
struct QuantOverride {
  enum class Kind : std::uint8_t { spec, standard, unquantized };
  std::string key;  // as written
  Kind kind = Kind::spec;
  int bits = 0;
  int group_size = 0;
};

struct QuantConfig {
  bool present = false;
  int bits = 0;
  int group_size = 0;
  std::vector<QuantOverride> overrides;
};

// `quantization`, or a `quantization_config` of MLX's own form; both where they say the same.
// Refuses other quant methods, modes, widths and groups by name.
Result<QuantConfig> parse_quant_config(const Json& config, std::string_view what,
                                       std::vector<std::string>* warnings = nullptr);

// The module path that an override key may mean: the key without the prefixes that wrappers put
// before a language model, so that "language_model.model.layers.0..." names "model.layers.0...".
std::string canonical_module_path(std::string_view key);

}  // namespace qmlp
