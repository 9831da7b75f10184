#include "cuda/kernels/relay_launch.cuh"

namespace qmlp::cuda {

int launch_relay_bf16_sm90(const RelayChoice& shape, const MatmulArgs& args,
                           const DeviceFacts& device, const LaunchTarget& target) {
  return launch_relay<Bf16>(shape, args, device, target);
}

}  // namespace qmlp::cuda
