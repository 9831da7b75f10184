#include "io/safetensors_writer.h"

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/json.h"

namespace qmlp {
namespace {

constexpr std::size_t kDataAlignment = 64;

std::string header_bytes(const std::vector<SafetensorsOutput>& tensors, std::uint64_t& data_bytes) {
  JsonObject metadata;
  metadata.set("format", "mlx");
  JsonObject root;
  root.append("__metadata__", Json(std::move(metadata)));
  std::uint64_t offset = 0;
  for (const SafetensorsOutput& tensor : tensors) {
    JsonArray shape;
    for (const std::int64_t dim : tensor.shape) shape.emplace_back(dim);
    JsonObject entry;
    entry.set("dtype", tensor.dtype);
    entry.set("shape", Json(std::move(shape)));
    entry.set("data_offsets", Json(JsonArray{Json(offset), Json(offset + tensor.bytes)}));
    root.append(tensor.name, Json(std::move(entry)));
    offset += tensor.bytes;
  }
  data_bytes = offset;
  std::string text = Json(std::move(root)).dump();
  while ((8 + text.size()) % kDataAlignment != 0) text += ' ';
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(text.size() >> (8 * i));
  return out + text;
}

}  // namespace

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path,
                                                    const std::vector<SafetensorsOutput>& tensors) {
  std::uint64_t data_bytes = 0;
  const std::string header = header_bytes(tensors, data_bytes);
  QMLP_ASSIGN(OutputFile file, OutputFile::create(path));
  SafetensorsWriter writer(std::move(file), header.size() + data_bytes);
  QMLP_TRY(writer.file_.reserve(writer.total_));
  QMLP_TRY(writer.write(std::as_bytes(std::span(header))));
  return writer;
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > total_ - written_) {
    return Error{Errc::internal, concat(file_.name(), ": more bytes written than declared")};
  }
  QMLP_TRY(file_.write(bytes));
  written_ += bytes.size();
  return {};
}

Status SafetensorsWriter::finish() {
  if (written_ != total_) {
    return Error{Errc::internal,
                 concat(file_.name(), ": ", written_, " bytes written, ", total_, " declared")};
  }
  return file_.commit();
}

}  // namespace qmlp
