#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace qmlp::text {

enum class NormalForm : std::uint8_t { nfc, nfd, nfkc, nfkd };

// Valid UTF-8 in a Unicode normalization form; empty when the text is in that form already.
std::optional<std::string> to_normal_form(std::string_view text, NormalForm form);

}  // namespace qmlp::text
