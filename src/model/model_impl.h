#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels/model_args.h"
#include "qmlp/model.h"

namespace qmlp {

// Most tokens that one pass may carry; the plans are made for it.
constexpr std::int64_t kMaxPrefillChunk = 8192;

// One quantized_linear of the model.
struct LinearOp {
  std::size_t index = 0;        // in Model::ops()
  std::vector<std::byte> bias;  // activation type; empty: none
};

// Gate and up of one layer, fused and by halves of the same packed memory.
struct SwigluOp {
  std::size_t index = 0;
  std::vector<std::byte> gate_bias;
  std::vector<std::byte> up_bias;
  std::size_t gate_plan = 0;  // in Model::Impl::part_plans
  std::size_t up_plan = 0;
  PackedWeightPtr gate;
  PackedWeightPtr up;
};

struct Layer {
  std::vector<float> input_norm;  // values of the activation type, widened
  std::vector<float> post_attention_norm;
  std::vector<float> q_norm, k_norm;  // [head_dim]; empty: q and k are not normed
  LinearOp q, k, v, o;
  SwigluOp gate_up;
  LinearOp down;
};

struct Model::Impl {
  ModelConfig config;
  DType activations = DType::f32;
  Precision precision = Precision::match;
  DeviceFacts facts;
  const cpu::ModelKernels* kernels = nullptr;

  std::vector<Op> ops;
  std::vector<Plan> part_plans;
  std::vector<Layer> layers;
  PackedWeightPtr embedding;  // the head's own weight when tied
  std::vector<float> final_norm;
  LinearOp head;

  std::uint64_t packed_bytes = 0;
  std::uint64_t fingerprint = 0;  // of all that the bits of a KV cache depend on
};

}  // namespace qmlp
