#pragma once

#include "plan/backend.h"

namespace qmlp::cuda {

const plan::Backend& backend() noexcept;

}  // namespace qmlp::cuda
