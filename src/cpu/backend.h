#pragma once

#include "plan/backend.h"

namespace qmlp::cpu {

const plan::Backend& backend() noexcept;

}  // namespace qmlp::cpu
