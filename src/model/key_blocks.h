#pragma once

#include <cstdint>

#include "cpu/kernels/model_args.h"

namespace qmlp {

// One head's keys, between rows [positions, head_dim] and the cache's blocks of 16 positions.
template <class Element>
void copy_keys(Element* blocks, Element* rows, std::int64_t positions, std::int64_t head_dim,
               bool to_rows) noexcept {
  for (std::int64_t p = 0; p < positions; ++p) {
    Element* column =
        blocks + p / cpu::kCacheBlock * cpu::kCacheBlock * head_dim + p % cpu::kCacheBlock;
    Element* row = rows + p * head_dim;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      Element& in_block = column[d * cpu::kCacheBlock];
      if (to_rows) {
        row[d] = in_block;
      } else {
        in_block = row[d];
      }
    }
  }
}

}  // namespace qmlp
