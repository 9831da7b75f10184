#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qmlp/status.h"

namespace qmlp {

struct SafetensorsOutput {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;
};

// Writes one safetensors file front to back: the header at once, then each tensor's bytes in the
// declared order, in as many pieces as the caller likes. The data start at a multiple of 64 bytes.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path,
                                          const std::vector<SafetensorsOutput>& tensors);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  Status write(std::span<const std::byte> bytes);
  // Checks that every declared byte was written and flushes them to the device.
  Status finish();
  std::uint64_t file_bytes() const noexcept { return total_; }

 private:
  SafetensorsWriter() = default;

  std::string path_;
  int file_ = -1;
  std::uint64_t total_ = 0;  // of the finished file
  std::uint64_t written_ = 0;
};

}  // namespace qmlp
