#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/json.h"
#include "qmlp/quant.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"
#include "qmlp/types.h"

namespace qmlp {

// A weight as its source stores it. The view borrows from the source or from `owned`.
struct NativeWeight {
  QuantizedTensorView view;
  QuantizedTensor owned;
};

// A linear or embedding weight of a source, [N, K].
struct SourceMatrix {
  std::string path;  // module path, such as "model.layers.0.mlp.gate_proj"
  std::int64_t N = 0;
  std::int64_t K = 0;
  QuantSpec spec;  // that it is written in unless a pattern says otherwise
  // The weight as the source stores it: of `spec`, but scales and biases may be wider.
  std::function<Result<NativeWeight>()> read;
  // Where the source's form is none of ours, in place of `read`: rows [begin, end) as f32.
  std::function<void(std::int64_t begin, std::int64_t end, float* values)> decode;
  std::function<void()> release;  // the source's pages are no longer needed; may be empty
};

// A norm weight or a linear bias.
struct SourceVector {
  std::string name;  // tensor name, such as "model.norm.weight"
  DType dtype = DType::f32;
  std::vector<float> values;
};

// A model to write: what the converter needs, whatever it came from.
struct SourceModel {
  JsonObject config;  // of config.json, without quantization entries
  std::vector<SourceMatrix> matrices;
  std::vector<SourceVector> vectors;
  std::vector<std::pair<std::string, std::string>> files;  // name and contents, beside the weights
  std::vector<std::string> notes;
  std::shared_ptr<const void> owner;  // what the readers borrow from
};

Result<SourceModel> open_gguf_source(const std::string& path);
Result<SourceModel> open_checkpoint_source(const std::string& path);

}  // namespace qmlp
