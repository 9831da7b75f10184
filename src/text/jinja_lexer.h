#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp::text::jinja {

enum class TokenKind : std::uint8_t {
  text,             // between tags
  statement_begin,  // {%
  statement_end,
  output_begin,  // {{
  output_end,
  name,
  integer,
  string,
  symbol,
  end,
};

struct Token {
  TokenKind kind;
  std::string text;  // a string's value, without quotes and escapes
  std::size_t at;    // byte of the template
};

// The tokens of a template, ending in `end`.
Result<std::vector<Token>> tokenize(std::string_view source);

// "chat template: WHAT at byte AT is not understood here, ..."
Error refuse(std::string_view what, std::size_t at);

}  // namespace qmlp::text::jinja
