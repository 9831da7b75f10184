#include "gate_tap.h"

#include "io/safetensors.h"
#include "io/safetensors_writer.h"
#include "qmlp/exceptions.h"

namespace qmlp::cli {

void GateTap::record(const TapEvent& event) {
  if (event.tap != Tap::gate) return;
  const MatrixView& values = event.values;
  Rows& layer = layers_[event.layer];
  layer.cols = values.cols;
  layer.dtype = values.dtype;
  layer.rows += values.rows;
  const auto element = static_cast<std::int64_t>(size_of(values.dtype));
  for (std::int64_t r = 0; r < values.rows; ++r) {
    const std::byte* row = values.data + r * values.row_stride * element;
    layer.bytes.insert(layer.bytes.end(), row, row + values.cols * element);
  }
}

void GateTap::write(const std::string& path) const {
  std::vector<SafetensorsOutput> tensors;
  for (const auto& [index, layer] : layers_) {
    tensors.push_back({"model.layers." + std::to_string(index) + ".mlp.gate_proj",
                       safetensors_name(layer.dtype),
                       {layer.rows, layer.cols},
                       layer.bytes.size()});
  }
  auto writer = value_or_throw(SafetensorsWriter::create(path, tensors));
  for (const auto& [index, layer] : layers_) value_or_throw(writer.write(layer.bytes));
  value_or_throw(writer.finish());
}

}  // namespace qmlp::cli
