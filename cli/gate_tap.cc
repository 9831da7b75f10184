#include "gate_tap.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <unistd.h>

#include "context.h"
#include "io/safetensors_writer.h"

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
    const char* dtype = layer.dtype == DType::f32   ? "F32"
                        : layer.dtype == DType::f16 ? "F16"
                                                    : "BF16";
    tensors.push_back({"model.layers." + std::to_string(index) + ".mlp.gate_proj",
                       dtype,
                       {layer.rows, layer.cols},
                       layer.bytes.size()});
  }
  const std::string temporary = path + ".tmp" + std::to_string(::getpid());
  const auto write_all = [&]() -> Status {
    auto writer = SafetensorsWriter::create(temporary, std::move(tensors));
    if (!writer) return writer.error();
    for (const auto& [index, layer] : layers_) {
      if (const Status status = writer->write(layer.bytes); !status) return status;
    }
    return writer->finish();
  };
  Status status = write_all();
  if (status && std::rename(temporary.c_str(), path.c_str()) != 0) {
    status = Error{Errc::io, path + ": " + std::strerror(errno)};
  }
  if (!status) {
    ::unlink(temporary.c_str());
    throw Exception(status.error());
  }
}

}  // namespace qmlp::cli
