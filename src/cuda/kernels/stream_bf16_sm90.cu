#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/stream_launch.cuh"

namespace qmlp::cuda {

int launch_stream_bf16_sm90(const MatmulArgs& args, const DeviceFacts& device,
                            const LaunchTarget& target) {
  return with_format(args.format, [&]<int kBits, int kGroup>() {
    return launch_stream_tokens<Bf16, kBits, kGroup, true>(args, device, target);
  });
}

}  // namespace qmlp::cuda
