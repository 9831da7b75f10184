#pragma once

#include <string>
#include <string_view>

namespace qmlp::text {

// The text of a file or a caller for a one-line message: in quotes, shortened, with control
// characters and bytes that are no UTF-8 as escapes.
std::string quote(std::string_view text);

}  // namespace qmlp::text
