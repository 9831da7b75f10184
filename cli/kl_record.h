#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "io/safetensors_writer.h"

namespace qmlp::cli {

// A run's logits as a safetensors file: `window` I64 [1], `token_ids` I32 [n], `logits` F32 [n,
// vocab].
class LogitsRecorder {
 public:
  LogitsRecorder(const std::string& path, std::span<const std::int32_t> tokens, std::int64_t window,
                 std::int64_t vocab_size);
  void write(std::span<const float> logits);
  void finish();

 private:
  SafetensorsWriter writer_;
};

class LogitsRecording {
 public:
  explicit LogitsRecording(const std::string& path);
  const std::vector<std::int32_t>& tokens() const noexcept { return tokens_; }
  std::int64_t window() const noexcept { return window_; }
  std::int64_t vocab_size() const noexcept { return vocab_size_; }
  // Copies the logits of positions [begin, begin + out.size() / vocab_size).
  void read(std::int64_t begin, std::span<float> out) const;

 private:
  SafetensorsFile file_;
  std::span<const std::byte> logits_;
  std::vector<std::int32_t> tokens_;
  std::int64_t window_ = 0;
  std::int64_t vocab_size_ = 0;
};

}  // namespace qmlp::cli
