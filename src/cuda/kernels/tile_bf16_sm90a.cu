#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/tile_launch.cuh"

namespace qmlp::cuda {

int launch_tile_bf16_sm90a(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                           const LaunchTarget& target) {
  if (!word_stores_suffice(args.epilogue)) return launch_tile_elements<Bf16>(args, device, target);
  return with_format(args.format, [&]<int kBits, int kGroup>() {
    return launch_tile_tokens<Bf16, kBits, kGroup>(config, args, device, target);
  });
}

}  // namespace qmlp::cuda
