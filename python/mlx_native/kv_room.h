#pragma once

#include <vector>

#include "gpu.h"
#include "mlx/array.h"

// Where the keys and values of a cache lie on a GPU.
namespace qmlp_mlx {

// Gives a cache's new keys and values [batch, heads, end, width], two arrays of 16 bits, their
// memory: all but the rows from `offset` on, which the caller writes. `before` is null or what the
// cache held, two arrays of at least `offset` positions.
//
// Memory is in rooms that are longer than the arrays in them. An array ends where its cache ends;
// past it MLX's attention alone reads, whole rooms, and takes nothing from there, since they are
// zeroed and then hold finite rows. Rows that no array has covered yet are written where they are,
// if nobody else holds the array that ends before them, and stay as they are from then on. Whoever
// comes second, a copy of the cache or one that was trimmed, gets a room of its own with the rows
// up to `offset`, unless nobody else refers to the memory at all. `holders`: how many refer to a
// descriptor of `before` when only the op does: one for each of its outputs, which have a list of
// inputs each.
void place_in_rooms(gpu::Recording& on, const mlx::core::array* before, long holders, int offset,
                    mlx::core::array* keys_and_values);

}  // namespace qmlp_mlx
