#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "io/descriptor.h"
#include "qmlp/status.h"

namespace qmlp {

// A regular file, open for reading.
struct InputFile {
  std::string path;
  Descriptor descriptor;
  std::uint64_t size = 0;    // when it was opened
  std::uint64_t device = 0;  // with the inode tells it from another file of the same name
  std::uint64_t inode = 0;

  static Result<InputFile> open(const std::string& path);
  // Fills `out` with the bytes from `offset` on; an error when the file ends before.
  Status read(std::uint64_t offset, std::span<std::byte> out) const;
};

}  // namespace qmlp
