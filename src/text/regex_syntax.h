#pragma once

#include <string>
#include <string_view>

#include "qmlp/status.h"
#include "text/regex.h"

namespace qmlp::text {

// A pattern of Hugging Face's regex engine (Oniguruma) as a PCRE2 pattern with the same meaning
// under UTF, UCP and a line-feed newline. Constructs whose meaning differs, or that no tokenizer is
// known to use, are refused by name. Groups do not capture.
Result<std::string> to_pcre2_syntax(std::string_view pattern);

// A pattern of Hugging Face's regex engine, compiled.
Result<Regex> compile_pattern(std::string_view pattern);

// What Hugging Face's pre-tokenizers take for a digit, a letter of a word and white space, each as
// the inside of a PCRE2 class.
std::string digits_class();
std::string word_class();
std::string space_class();
// And for one character of punctuation, as a PCRE2 pattern.
std::string punctuation_pattern();

}  // namespace qmlp::text
