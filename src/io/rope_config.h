#pragma once

#include "io/architecture.h"
#include "io/fields.h"
#include "qmlp/checkpoint.h"

namespace qmlp {

// The rotary embedding: rope_theta, rope_traditional, partial_rotary_factor, rope_scaling, and
// rope_parameters, in which newer configs put all of them. Needs head_dim and
// max_position_embeddings; fills context_length too.
Status read_rope(const Fields& fields, const Architecture& architecture, ModelConfig& config);

}  // namespace qmlp
