#pragma once

#include "cuda/layout.h"

namespace qmlp::cuda {

// Calls `launch.operator()<kBits, kGroup>()` for the format's group.
template <int kBits, class Launch>
int with_group(const TileFormat& format, Launch launch) {
  return format.half[0].group_size == 32 ? launch.template operator()<kBits, 32>()
                                         : launch.template operator()<kBits, 64>();
}

// The same for its width too: kBits is 0 where the halves differ.
template <class Launch>
int with_format(const TileFormat& format, Launch launch) {
  const int bits = format.half[0].bits == format.half[1].bits ? format.half[0].bits : 0;
  switch (bits) {
    case 2:
      return with_group<2>(format, launch);
    case 3:
      return with_group<3>(format, launch);
    case 4:
      return with_group<4>(format, launch);
    case 5:
      return with_group<5>(format, launch);
    case 6:
      return with_group<6>(format, launch);
    case 8:
      return with_group<8>(format, launch);
    case kDenseBits:
      return launch.template operator()<kDenseBits, 64>();
    default:
      return with_group<0>(format, launch);
  }
}

}  // namespace qmlp::cuda
