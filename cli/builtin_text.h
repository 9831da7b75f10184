#pragma once

#include <string_view>

namespace qmlp::cli {

// Prose, code, numbers and several scripts: more than 1,000 tokens in any common vocabulary.
std::string_view builtin_text();

}  // namespace qmlp::cli
