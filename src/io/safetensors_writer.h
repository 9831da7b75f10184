#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/output_file.h"
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
// The file appears when it is finished, as an OutputFile does.
class SafetensorsWriter {
 public:
  static Result<SafetensorsWriter> create(const std::string& path,
                                          const std::vector<SafetensorsOutput>& tensors);

  Status write(std::span<const std::byte> bytes);
  // Checks that every declared byte was written, then puts the file in place.
  Status finish();
  std::uint64_t file_bytes() const noexcept { return total_; }

 private:
  SafetensorsWriter(OutputFile file, std::uint64_t total) : file_(std::move(file)), total_(total) {}

  OutputFile file_;
  std::uint64_t total_ = 0;  // of the finished file
  std::uint64_t written_ = 0;
};

}  // namespace qmlp
