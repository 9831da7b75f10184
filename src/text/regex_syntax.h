#pragma once

#include <string>
#include <string_view>

#include "qmlp/status.h"

namespace qmlp::text {

// A pattern of Hugging Face's regex engine (Oniguruma) as a PCRE2 pattern with the same meaning
// under UTF, UCP and a line-feed newline. Constructs whose meaning differs, or that no tokenizer is
// known to use, are refused by name. Groups do not capture.
Result<std::string> to_pcre2_syntax(std::string_view pattern);

// The members of \p{N} as the inside of a PCRE2 class, as Hugging Face's Digits takes them.
std::string digits_class();

}  // namespace qmlp::text
