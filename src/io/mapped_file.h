#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/aligned_buffer.h"
#include "qmlp/status.h"

namespace qmlp {

// The bytes of a regular file, mapped, or read into memory when mapping is unwanted or fails.
// Reading what another process has cut off a mapped file raises SIGBUS; check_size() tells before
// that, when the cut is older than the call.
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
  // An error when the mapped file is shorter by now than its bytes. A file that was renamed over or
  // deleted is none: its bytes stay.
  Status check_size() const;

  // Lets the system drop the pages that lie wholly inside [offset, offset + size). They are read
  // again when touched. Does nothing for a file that was read into memory.
  void release(std::uint64_t offset, std::uint64_t size) const noexcept;

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
  AlignedBuffer buffer_;  // holds the bytes when they are not mapped
  bool mapped_ = false;
  std::uint64_t device_ = 0;  // of the mapped file, with its inode: tells it from a successor
  std::uint64_t inode_ = 0;
};

}  // namespace qmlp
