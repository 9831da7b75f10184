#pragma once

#include <vector>

#include "qmlp/checkpoint.h"

namespace qmlp {

// Everything about a model's rotary embedding that does not depend on the position. Computed in
// double by pinned functions, so that tables made from it have the same bits on every machine.
struct RotaryFrequencies {
  std::vector<double> frequencies;  // of each pair: radians a position
  double divisor = 1.0;             // positions are divided by it
  double scale = 1.0;               // rotated features are multiplied by it
};
RotaryFrequencies rotary_frequencies(const ModelConfig& config);

// cos(angle) * scale and sin(angle) * scale of every pair at `position`, rounded to f32: the angle
// is position / divisor * frequency. Each span holds one value for each pair.
void rotary_row(const RotaryFrequencies& rotary, std::int64_t position, float* cosines,
                float* sines);

}  // namespace qmlp
