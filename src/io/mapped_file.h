#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/aligned_buffer.h"
#include "qmlp/status.h"

namespace qmlp {

// The bytes of a regular file, mapped, or read into memory when mapping is unwanted or fails.
// A file that another process truncates while it is mapped raises SIGBUS in its readers.
class MappedFile {
 public:
  MappedFile() = default;
  static Result<MappedFile> open(const std::string& path, bool use_mmap = true);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  bool mapped() const noexcept { return mapped_; }

  // Lets the system drop the pages that lie wholly inside [offset, offset + size). They are read
  // again when touched. Does nothing for a file that was read into memory.
  void release(std::uint64_t offset, std::uint64_t size) const noexcept;

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
  AlignedBuffer buffer_;  // holds the bytes when they are not mapped
  bool mapped_ = false;
};

}  // namespace qmlp
