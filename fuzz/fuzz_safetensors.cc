// Bytes as a whole safetensors file.
#include <cstddef>
#include <cstdint>
#include <span>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  const auto header = qmlp::parse_safetensors(bytes, "fuzz");
  if (!header) return 0;
  // What was accepted must lie inside the file.
  unsigned sum = 0;
  for (const qmlp::SafetensorsEntry& entry : header->entries) {
    for (const std::byte byte : bytes.subspan(entry.begin, entry.end - entry.begin)) {
      sum += static_cast<unsigned>(byte);
    }
  }
  return sum == ~0u ? -1 : 0;  // -1 keeps an input out of the corpus; here it keeps the sum alive
}
