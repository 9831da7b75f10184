#include "cuda/kernels/tile_split_launch.cuh"

namespace qmlp::cuda {

int launch_split_tile_bf16_sm90a(TileConfig config, const MatmulArgs& args,
                                 const DeviceFacts& device, const LaunchTarget& target) {
  return launch_split_tile<Bf16>(config, args, device, target);
}

}  // namespace qmlp::cuda
