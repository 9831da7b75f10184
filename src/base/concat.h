#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace qmlp {

inline void append_part(std::string& out, std::string_view part) { out += part; }
template <std::integral Integer>
void append_part(std::string& out, Integer part) {
  out += std::to_string(part);
}

// One string of text and integers, for messages: concat(name, ": holds ", bytes, " bytes").
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string out;
  (append_part(out, parts), ...);
  return out;
}

}  // namespace qmlp
