#include "cuda/kernels/stream_launch.cuh"

namespace qmlp::cuda {

int launch_stream_bf16_sm90(const MatmulArgs& args, const DeviceFacts& device,
                            cudaStream_t stream) {
  const HalfFormat* half = args.format.half;
  const int bits = half[0].bits == half[1].bits ? half[0].bits : 0;
  switch (bits) {
    case 2:
      return launch_stream_tokens<Bf16, 2, true>(args, device, stream);
    case 3:
      return launch_stream_tokens<Bf16, 3, true>(args, device, stream);
    case 4:
      return launch_stream_tokens<Bf16, 4, true>(args, device, stream);
    case 5:
      return launch_stream_tokens<Bf16, 5, true>(args, device, stream);
    case 6:
      return launch_stream_tokens<Bf16, 6, true>(args, device, stream);
    case 8:
      return launch_stream_tokens<Bf16, 8, true>(args, device, stream);
    default:
      return launch_stream_tokens<Bf16, 0, true>(args, device, stream);
  }
}

}  // namespace qmlp::cuda
