#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "io/fields.h"
#include "qmlp/checkpoint.h"
#include "qmlp/status.h"

namespace qmlp {

// What a model_type fixes, and which fields of config.json it reads. This table is the one place
// that knows models by name: config.cc turns a row and a config.json into a ModelConfig, and the
// forward reads that alone. A new model of the Llama family is a new row here, and a case in
// tests/python/architectures.py.
struct Architecture {
  enum class Field : std::uint8_t { no, optional, required };
  // By a field of config.json (attention_bias, mlp_bias), or fixed.
  enum class Bias : std::uint8_t { none, always, stated, required };
  enum class Tied : std::uint8_t { by_default, not_by_default, required };
  // When `sliding_window` holds without layer_types naming layers.
  enum class Window : std::uint8_t { ignored, stated, if_enabled };

  std::string_view model_type;
  Bias qkv_bias = Bias::stated;
  Bias output_bias = Bias::stated;
  Bias mlp_bias = Bias::stated;
  Tied tied = Tied::by_default;
  Field head_dim = Field::optional;  // no: always hidden_size / num_attention_heads
  Field num_key_value_heads = Field::optional;
  Field max_position_embeddings = Field::optional;
  Field rope_traditional = Field::optional;
  double rope_theta = 10000.0;  // where config.json states none; 0: it must
  bool partial_rotary = false;  // reads partial_rotary_factor
  bool qk_norm = false;
  bool rotary_layers = false;    // reads no_rope_layers and no_rope_layer_interval
  bool layer_windows = false;    // layers that layer_types calls sliding have a window
  bool stacked = false;          // one qkv_proj and one gate_up_proj a layer
  bool head_falls_back = false;  // untied without lm_head: the head is the embedding
  Window window = Window::ignored;
  // Multipliers; null: none.
  Status (*read_scales)(const Fields& fields, ModelConfig& config) = nullptr;
  unsigned rope_kinds = 0;  // bit i: RopeKind i

  bool takes(RopeKind kind) const noexcept {
    return (rope_kinds >> static_cast<unsigned>(kind) & 1u) != 0;
  }
};

std::span<const Architecture> architectures() noexcept;
const Architecture* find_architecture(std::string_view model_type) noexcept;
// Why a known model type has no row, such as "a mixture of experts"; empty for an unknown one.
std::string_view why_unsupported(std::string_view model_type) noexcept;

}  // namespace qmlp
