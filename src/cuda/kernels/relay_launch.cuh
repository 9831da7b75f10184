#pragma once

#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/relay.cuh"
#include "cuda/kernels/stream_launch.cuh"

namespace qmlp::cuda {

template <class T>
int launch_relay(const RelayChoice& shape, const MatmulArgs& args, const DeviceFacts& device,
                 const LaunchTarget& target) {
  return with_format(args.format, [&]<int kBits, int kGroup>() {
    return for_token_tiles(args, kRelayRows, [&](const MatmulArgs& part, unsigned count) {
      return launch_kernel(relay_kernel<T, kBits, kGroup>,
                           {dim3(static_cast<unsigned>(shape.grid), count),
                            static_cast<unsigned>(shape.warps) * 32, shape.shared_bytes, true},
                           device, target, part, shape.stages, shape.legs);
    });
  });
}

}  // namespace qmlp::cuda
