#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/stream_launch.cuh"

// Any GPU from compute capability 8.0 on; widths are read at run time.
namespace qmlp::cuda {
namespace {

template <class T>
int launch(const MatmulArgs& args, const DeviceFacts& device, const LaunchTarget& target) {
  return with_group<0>(args.format, [&]<int kBits, int kGroup>() {
    return launch_stream_tokens<T, kBits, kGroup, false>(args, device, target);
  });
}

}  // namespace

int launch_stream_sm80(Element element, const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target) {
  if (element == Element::bf16) return launch<Bf16>(args, device, target);
  return launch<F16>(args, device, target);
}

std::size_t stream_fragment_bytes(std::int64_t M, std::int64_t num_chunks,
                                  const DeviceFacts& device) noexcept {
  const std::int64_t rows = M <= 8 ? 8 : 16;
  if (shared_x_bytes(num_chunks, std::min(M, rows)) <= max_shared_x(device)) return 0;
  const std::size_t block = static_cast<std::size_t>(num_chunks * kChunkK * 2 * rows);
  return block * static_cast<std::size_t>((M + rows - 1) / rows);
}

}  // namespace qmlp::cuda
