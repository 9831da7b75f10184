#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace qmlp::text {

// Valid UTF-8 in Unicode normalization form C; empty when the text is in that form already.
std::optional<std::string> to_nfc(std::string_view text);

}  // namespace qmlp::text
