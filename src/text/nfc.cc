#include "text/nfc.h"

namespace qmlp::text {

std::optional<std::string> to_nfc(std::string_view) { return std::nullopt; }

}  // namespace qmlp::text
