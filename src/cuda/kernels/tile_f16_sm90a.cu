#include "cuda/kernels/tile_launch.cuh"

namespace qmlp::cuda {

int launch_tile_f16_sm90a(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  const HalfFormat* half = args.format.half;
  const int bits = half[0].bits == half[1].bits ? half[0].bits : 0;
  switch (bits) {
    case 2:
      return launch_tile_tokens<F16, 2>(args, device, stream);
    case 3:
      return launch_tile_tokens<F16, 3>(args, device, stream);
    case 4:
      return launch_tile_tokens<F16, 4>(args, device, stream);
    case 5:
      return launch_tile_tokens<F16, 5>(args, device, stream);
    case 6:
      return launch_tile_tokens<F16, 6>(args, device, stream);
    case 8:
      return launch_tile_tokens<F16, 8>(args, device, stream);
    default:
      return launch_tile_tokens<F16, 0>(args, device, stream);
  }
}

}  // namespace qmlp::cuda
