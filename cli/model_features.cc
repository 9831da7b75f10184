#include "model_features.h"

#include <algorithm>

#include "format.h"

namespace qmlp::cli {
namespace {

std::string number(double value) { return format("%.6g", value); }
std::string integer(std::int64_t value) { return std::to_string(value); }

std::string rope_line(const ModelConfig& config) {
  std::string line = std::string("rope ") + to_string(config.rope_kind);
  const RopeScaling& rope = config.rope;
  switch (config.rope_kind) {
    case RopeKind::standard:
      break;
    case RopeKind::linear:
    case RopeKind::dynamic:
      line += ", factor " + number(config.rope_factor);
      break;
    case RopeKind::llama3:
      line += ", factor " + number(config.rope_factor) + " past waves of " +
              integer(rope.original_context) + "/" + number(rope.low_freq_factor) + " to /" +
              number(rope.high_freq_factor);
      break;
    case RopeKind::yarn:
      line += ", factor " + number(config.rope_factor) + " of " + integer(rope.original_context) +
              ", beta " + number(rope.beta_fast) + " to " + number(rope.beta_slow) + ", mscale " +
              number(rope.mscale) + "/" + number(rope.mscale_all_dim);
      break;
    case RopeKind::longrope:
      line += ", long factors, context " + number(config.rope_factor) + " times " +
              integer(rope.original_context);
      break;
  }
  line += ", theta " + number(config.rope_theta);
  if (config.rotary_dim != config.head_dim) {
    line += ", " + integer(config.rotary_dim) + " of " + integer(config.head_dim) + " features";
  }
  if (config.rope_traditional) line += ", neighbouring pairs (traditional)";
  return line;
}

// "layers 3, 7, 11 (of 36)" with the ones that `has` names.
template <class Has>
std::vector<std::int64_t> layers_with(const ModelConfig& config, const Has& has) {
  std::vector<std::int64_t> layers;
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    if (has(config.layers[i])) layers.push_back(static_cast<std::int64_t>(i));
  }
  return layers;
}

std::string list(const std::vector<std::int64_t>& layers) {
  std::string text;
  for (const std::int64_t layer : layers) text += (text.empty() ? "" : ", ") + integer(layer);
  return text;
}

std::vector<std::int64_t> unrotated(const ModelConfig& config) {
  return layers_with(config, [](const LayerConfig& layer) { return !layer.rotary; });
}
std::vector<std::int64_t> windowed(const ModelConfig& config) {
  return layers_with(config, [](const LayerConfig& layer) { return layer.window != 0; });
}

std::string bias_line(const ModelConfig& config) {
  std::string names;
  const auto add = [&names](bool there, const char* name) {
    if (there) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  add(config.attention_bias, "q, k, v");
  add(config.attention_output_bias, "o");
  add(config.mlp_bias, "gate, up, down");
  return names.empty() ? "" : "linear biases on " + names;
}

std::string scale_line(const ModelConfig& config) {
  std::string line;
  const auto add = [&line](const char* name, double value, bool shown) {
    if (shown) line += (line.empty() ? "scales: " : ", ") + std::string(name) + " " + number(value);
  };
  add("embedding", config.embedding_scale, config.embedding_scale != 1.0);
  add("attention", config.attention_scale, config.attention_scale != 0.0);
  add("residual", config.residual_scale, config.residual_scale != 1.0);
  add("head input", config.head_input_scale, config.head_input_scale != 1.0);
  add("logits", config.logits_scale, config.logits_scale != 1.0);
  return line;
}

}  // namespace

std::vector<std::string> feature_lines(const ModelConfig& config) {
  std::vector<std::string> lines{rope_line(config)};
  const auto add = [&lines](std::string line) {
    if (!line.empty()) lines.push_back(std::move(line));
  };
  const auto plain = unrotated(config);
  if (!plain.empty()) add("no rope in layers " + list(plain));
  const auto windows = windowed(config);
  if (!windows.empty()) {
    add("a window of " + integer(config.layers[static_cast<std::size_t>(windows[0])].window) +
        " tokens in layers " + list(windows));
  }
  if (config.qk_norm) add("RMS norms of q and k");
  add(bias_line(config));
  add(scale_line(config));
  return lines;
}

void add_features(const ModelConfig& config, Json& json) {
  json.set("context_length", config.context_length);
  json.set("rope_theta", config.rope_theta);
  json.set("rope", to_string(config.rope_kind));
  json.set("rope_factor", config.rope_factor);
  json.set("rotary_dim", config.rotary_dim);
  json.set("rope_traditional", config.rope_traditional);
  json.set("layers_without_rope", Json::array_of(unrotated(config)));
  json.set("layers_with_window", Json::array_of(windowed(config)));
  std::int64_t window = 0;
  for (const LayerConfig& layer : config.layers) window = std::max(window, layer.window);
  json.set("window", window);
  json.set("attention_bias", config.attention_bias);
  json.set("attention_output_bias", config.attention_output_bias);
  json.set("mlp_bias", config.mlp_bias);
  json.set("qk_norm", config.qk_norm);
  json.set("embedding_scale", config.embedding_scale);
  json.set("attention_scale", config.attention_scale);
  json.set("residual_scale", config.residual_scale);
  json.set("head_input_scale", config.head_input_scale);
  json.set("logits_scale", config.logits_scale);
}

}  // namespace qmlp::cli
