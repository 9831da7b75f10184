#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "convert/gguf_metadata.h"
#include "io/json.h"
#include "qmlp/status.h"

namespace qmlp {

// rope_scaling of config.json from the metadata and the tensors of rope factors.
struct GgufRope {
  std::optional<JsonObject> scaling;
  std::int64_t original_context = 0;           // 0: not stated
  std::vector<std::string_view> used_tensors;  // those that went into it
};
// rotary_dim: features of a head that are rotated. context: what the model was made for, 0 unknown.
Result<GgufRope> read_gguf_rope(const GgufMetadata& metadata, float theta, std::int64_t rotary_dim,
                                std::int64_t context);

// The parameters of rope type llama3 whose factors these are (by each rotated pair's frequency),
// within the rounding of f32. Null when there are none.
struct Llama3Rope {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  std::int64_t original_context = 8192;
};
std::optional<Llama3Rope> fit_llama3(std::span<const float> factors, float theta,
                                     std::int64_t original_context);

}  // namespace qmlp
