#pragma once

#include "cuda/layout.h"

namespace qmlp::cuda {

inline int group_size_of(const TileFormat& format) { return format.half[0].group_size; }

// Calls `launch.operator()<kBits, kGroup>()` for the format: kBits is 0 where the halves differ.
template <class Launch>
int with_format(const TileFormat& format, Launch launch) {
  const int bits = format.half[0].bits == format.half[1].bits ? format.half[0].bits : 0;
  const bool small = group_size_of(format) == 32;
  switch (bits) {
    case 2:
      return small ? launch.template operator()<2, 32>() : launch.template operator()<2, 64>();
    case 3:
      return small ? launch.template operator()<3, 32>() : launch.template operator()<3, 64>();
    case 4:
      return small ? launch.template operator()<4, 32>() : launch.template operator()<4, 64>();
    case 5:
      return small ? launch.template operator()<5, 32>() : launch.template operator()<5, 64>();
    case 6:
      return small ? launch.template operator()<6, 32>() : launch.template operator()<6, 64>();
    case 8:
      return small ? launch.template operator()<8, 32>() : launch.template operator()<8, 64>();
    case kDenseBits:
      return launch.template operator()<kDenseBits, 64>();
    default:
      return small ? launch.template operator()<0, 32>() : launch.template operator()<0, 64>();
  }
}

}  // namespace qmlp::cuda
