#pragma once

#include <cstdint>

#include "qmlp/tensor.h"

namespace qmlp::cli {

// Fills x [M, K] with activations as a language model has them: normal values, a few channels 15 to
// 60 times larger in every row, lone spikes and exact zeros. The same seed gives the same values.
void fill_activations(const MutableMatrixView& x, std::uint64_t seed);

}  // namespace qmlp::cli
