// Bytes as a GGUF file, opened by a path as the converter does: the file, then the model, its
// config.json and tokenizer, and the values of its small matrices.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "convert/source.h"

namespace {

constexpr std::int64_t kSmall = 1 << 16;  // elements; a larger matrix adds time alone

void decode(const qmlp::SourceModel& model) {
  for (const qmlp::SourceMatrix& matrix : model.matrices) {
    if (matrix.N * matrix.K > kSmall) continue;
    if (matrix.decode) {
      std::vector<float> values(static_cast<std::size_t>(matrix.N * matrix.K));
      matrix.decode(0, matrix.N, values.data());
    } else {
      const auto weight = matrix.read();
      (void)weight;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int fd = memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0) return 0;
  if (write(fd, data, size) == static_cast<ssize_t>(size)) {
    const auto model = qmlp::open_gguf_source("/proc/self/fd/" + std::to_string(fd));
    if (model) decode(*model);
  }
  close(fd);
  return 0;
}
