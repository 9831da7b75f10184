#include "io/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
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
  SafetensorsWriter writer;
  writer.path_ = path;
  writer.total_ = header.size() + data_bytes;
  writer.file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (writer.file_ < 0) return system_error(path, "cannot create", errno);
#ifdef __linux__
  // Asking for the space first tells of a full disk before the work is done.
  if (::fallocate(writer.file_, 0, 0, static_cast<off_t>(writer.total_)) != 0 &&
      (errno == ENOSPC || errno == EFBIG || errno == EDQUOT)) {
    return system_error(path, concat("cannot write ", writer.total_, " bytes"), errno);
  }
#endif
  QMLP_TRY(writer.write(std::as_bytes(std::span<const char>(header))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      total_(other.total_),
      written_(other.written_) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ >= 0) ::close(file_);
}

Status SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > total_ - written_) {
    return Error{Errc::internal, concat(path_, ": more bytes written than declared")};
  }
  QMLP_TRY(write_all(file_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path_));
  written_ += bytes.size();
  return {};
}

Status SafetensorsWriter::finish() {
  if (written_ != total_) {
    return Error{Errc::internal,
                 concat(path_, ": ", written_, " bytes written, ", total_, " declared")};
  }
  return flush_and_close(std::exchange(file_, -1), path_);
}

}  // namespace qmlp
