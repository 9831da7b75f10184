// Bytes as JSON text. What is accepted must survive being written and read again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "io/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto json = qmlp::Json::parse(text, "fuzz");
  if (!json) return 0;
  const std::string once = json->dump();
  const auto again = qmlp::Json::parse(once, "fuzz");
  if (!again || again->dump() != once) std::abort();
  return 0;
}
