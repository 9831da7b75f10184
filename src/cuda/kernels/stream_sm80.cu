#include "cuda/kernels/stream_launch.cuh"

// Any GPU from compute capability 8.0 on; widths are read at run time.
namespace qmlp::cuda {

int launch_stream_sm80(Element element, const MatmulArgs& args, const DeviceFacts& device,
                       cudaStream_t stream) {
  if (element == Element::bf16) return launch_stream_tokens<Bf16, 0, false>(args, device, stream);
  return launch_stream_tokens<F16, 0, false>(args, device, stream);
}

std::size_t stream_fragment_bytes(std::int64_t M, std::int64_t num_chunks,
                                  const DeviceFacts&) noexcept {
  if (M <= 1 && shared_x_bytes(num_chunks, 1, true) <= kMaxSharedX) return 0;
  const int token_blocks = M <= 8 ? 1 : 2;
  const std::size_t one = shared_x_bytes(num_chunks, token_blocks, false);
  if (one <= kMaxSharedX) return 0;
  return one * static_cast<std::size_t>((M + token_blocks * 8 - 1) / (token_blocks * 8));
}

}  // namespace qmlp::cuda
