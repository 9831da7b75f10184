#pragma once

#include <cuda_runtime_api.h>

#include "cuda/choice.h"
#include "cuda/device/args.h"
#include "qmlp/cuda.h"
#include "qmlp/plan.h"

// Launchers of the kernel files, one architecture each. They return a cudaError_t.
namespace qmlp::cuda {

// A cudaStream_t, or a caller's recorder.
using LaunchTarget = CudaStream;
constexpr cudaError_t kRecorderRefused = cudaErrorCallRequiresNewerDriver;  // no launch gives that

enum class Element : std::uint8_t { bf16, f16 };

int launch_stream_sm80(Element element, const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target);
int launch_stream_bf16_sm90(const MatmulArgs& args, const DeviceFacts& device,
                            const LaunchTarget& target);
int launch_stream_f16_sm90(const MatmulArgs& args, const DeviceFacts& device,
                           const LaunchTarget& target);
int launch_relay_bf16_sm90(const RelayChoice& shape, const MatmulArgs& args,
                           const DeviceFacts& device, const LaunchTarget& target);
int launch_relay_f16_sm90(const RelayChoice& shape, const MatmulArgs& args,
                          const DeviceFacts& device, const LaunchTarget& target);
// x 16-byte aligned with rows a multiple of 16 bytes apart.
int launch_tile_bf16_sm90a(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                           const LaunchTarget& target);
int launch_tile_f16_sm90a(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                          const LaunchTarget& target);
// The same where K has segments, at most as many as chunks; the config is one that splits. Needs
// partial_bytes of scratch.
int launch_split_tile_bf16_sm90a(TileConfig config, const MatmulArgs& args,
                                 const DeviceFacts& device, const LaunchTarget& target);
int launch_split_tile_f16_sm90a(TileConfig config, const MatmulArgs& args,
                                const DeviceFacts& device, const LaunchTarget& target);

// Whether a stream launch needs x in fragment order in global memory, and how many bytes.
std::size_t stream_fragment_bytes(std::int64_t M, std::int64_t num_chunks,
                                  const DeviceFacts& device) noexcept;

}  // namespace qmlp::cuda
