// Bytes as a GGUF file, opened by a path as the converter does.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "convert/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int fd = memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0) return 0;
  if (write(fd, data, size) == static_cast<ssize_t>(size)) {
    const auto file = qmlp::GgufFile::open("/proc/self/fd/" + std::to_string(fd));
    (void)file;
  }
  close(fd);
  return 0;
}
