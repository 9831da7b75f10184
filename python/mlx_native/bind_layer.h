#pragma once

#include <nanobind/nanobind.h>

namespace qmlp_mlx {

// KvRows and Layer, for qmlp.mlx._layers.
void bind_layer(nanobind::module_& m);

}  // namespace qmlp_mlx
