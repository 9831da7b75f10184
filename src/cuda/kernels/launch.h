#pragma once

#include <cuda_runtime_api.h>

#include "cuda/choice.h"
#include "cuda/device/args.h"
#include "qmlp/plan.h"

// Launchers of the kernel files, one architecture each. They return a cudaError_t.
namespace qmlp::cuda {

enum class Element : std::uint8_t { bf16, f16 };

int launch_stream_sm80(Element element, const MatmulArgs& args, const DeviceFacts& device,
                       cudaStream_t stream);
int launch_stream_bf16_sm90(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream);
int launch_stream_f16_sm90(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream);
// x 16-byte aligned with rows a multiple of 16 bytes apart.
int launch_tile_bf16_sm90a(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                           cudaStream_t stream);
int launch_tile_f16_sm90a(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                          cudaStream_t stream);

// Whether a stream launch needs x in fragment order in global memory, and how many bytes.
std::size_t stream_fragment_bytes(std::int64_t M, std::int64_t num_chunks,
                                  const DeviceFacts& device) noexcept;

}  // namespace qmlp::cuda
