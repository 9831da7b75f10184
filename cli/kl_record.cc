#include "kl_record.h"

#include <algorithm>
#include <cstring>

#include "context.h"

namespace qmlp::cli {
namespace {

const SafetensorsEntry& entry(const SafetensorsFile& file, const std::string& name,
                              const std::string& dtype, std::size_t rank) {
  const auto& entries = file.header().entries;
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const SafetensorsEntry& e) {
    return e.name == name && e.dtype == dtype && e.shape.size() == rank;
  });
  if (found == entries.end()) {
    fail(Errc::corrupt_file, file.file().path() + ": holds no tensor '" + name + "' of type " +
                                 dtype + ", so it is no recording of qmlp kl");
  }
  return *found;
}

SafetensorsWriter create_recording(const std::string& path, std::int64_t count,
                                   std::int64_t vocab_size) {
  const auto rows = static_cast<std::uint64_t>(count);
  return value_or_throw(SafetensorsWriter::create(
      path,
      {{"window", "I64", {1}, 8},
       {"token_ids", "I32", {count}, rows * 4},
       {"logits", "F32", {count, vocab_size}, rows * static_cast<std::uint64_t>(vocab_size) * 4}}));
}

}  // namespace

LogitsRecorder::LogitsRecorder(const std::string& path, std::span<const std::int32_t> tokens,
                               std::int64_t window, std::int64_t vocab_size)
    : writer_(create_recording(path, static_cast<std::int64_t>(tokens.size()), vocab_size)) {
  value_or_throw(writer_.write(std::as_bytes(std::span(&window, 1))));
  value_or_throw(writer_.write(std::as_bytes(tokens)));
}

void LogitsRecorder::write(std::span<const float> logits) {
  value_or_throw(writer_.write(std::as_bytes(logits)));
}

void LogitsRecorder::finish() { value_or_throw(writer_.finish()); }

LogitsRecording::LogitsRecording(const std::string& path)
    : file_(value_or_throw(SafetensorsFile::open(path))) {
  const SafetensorsEntry& window = entry(file_, "window", "I64", 1);
  const SafetensorsEntry& ids = entry(file_, "token_ids", "I32", 1);
  const SafetensorsEntry& logits = entry(file_, "logits", "F32", 2);
  const std::int64_t count = ids.shape[0];
  vocab_size_ = logits.shape[1];
  if (window.shape[0] != 1 || logits.shape[0] != count || count < 1 || vocab_size_ < 1) {
    fail(Errc::corrupt_file, path + ": its window, token ids and logits do not fit together");
  }
  std::memcpy(&window_, file_.data(window).data(), 8);
  tokens_.resize(static_cast<std::size_t>(count));
  std::memcpy(tokens_.data(), file_.data(ids).data(), tokens_.size() * 4);
  logits_ = file_.data(logits);
  const bool ids_fit = std::all_of(tokens_.begin(), tokens_.end(),
                                   [&](std::int32_t id) { return id >= 0 && id < vocab_size_; });
  if (window_ < 1 || window_ > count || !ids_fit) {
    fail(Errc::corrupt_file, path + ": its window or a token id is out of range");
  }
}

void LogitsRecording::read(std::int64_t begin, std::span<float> out) const {
  std::memcpy(out.data(), logits_.data() + begin * vocab_size_ * 4, out.size_bytes());
}

}  // namespace qmlp::cli
