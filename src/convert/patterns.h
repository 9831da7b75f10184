#pragma once

#include <string_view>

#include "qmlp/checkpoint.h"

namespace qmlp {

// Whether the pattern names the module: a short name such as "gate", or a path with '*' for any
// text, which may leave out the leading "model.".
bool matches(const QuantPattern& pattern, std::string_view module_path) noexcept;

}  // namespace qmlp
