#include "text/quote.h"

#include <cstdio>

#include "text/utf8.h"

namespace qmlp::text {

std::string quote(std::string_view text) {
  constexpr std::size_t kLongest = 60;
  std::string out = "'";
  while (!text.empty()) {
    if (out.size() > kLongest) {
      out += "...";
      break;
    }
    const Utf8Unit unit = first_utf8_unit(text);
    const bool control = unit.code < 0x20 || (unit.code >= 0x7F && unit.code < 0xA0) ||
                         unit.code == 0x2028 || unit.code == 0x2029;
    if (unit.state == Utf8State::valid && !control) {
      out += text.substr(0, unit.length);
    } else {
      for (const char c : text.substr(0, unit.length)) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\x%02X",
                      static_cast<unsigned>(static_cast<unsigned char>(c)));
        out += escape;
      }
    }
    text.remove_prefix(unit.length);
  }
  return out + '\'';
}

}  // namespace qmlp::text
