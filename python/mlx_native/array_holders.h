#pragma once

#include "mlx/array.h"

namespace qmlp_mlx {

// The number of holders of an array's descriptor: other arrays that stand for the same one, in
// Python or as inputs of what is still to be evaluated.
long holders_of(const mlx::core::array& a);

}  // namespace qmlp_mlx
