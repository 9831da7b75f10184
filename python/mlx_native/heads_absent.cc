#include "heads.h"

// For builds without CUDA, whose layers never meet a GPU stream.
namespace qmlp_mlx {

void* heads_function(bool) { return nullptr; }
void* carry_function() { return nullptr; }

}  // namespace qmlp_mlx
