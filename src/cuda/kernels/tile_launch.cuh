#pragma once

#include <algorithm>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/tile.cuh"

namespace qmlp::cuda {

// x as a tensor map: boxes of kTokens rows by 64 elements, 128-byte swizzle, zeros outside.
template <class T>
cudaError_t make_x_map(CUtensorMap* map, const MatmulArgs& args, int tokens) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found) !=
        cudaSuccess) {
      return Encode{nullptr};
    }
    return reinterpret_cast<Encode>(entry);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(args.K), static_cast<cuuint64_t>(args.M)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(args.x_stride) * 2};
  const cuuint32_t box[2] = {kChunkK, static_cast<cuuint32_t>(tokens)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(
      map, __is_same(T, Bf16) ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      2, const_cast<void*>(args.x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T, int kTokens, int kBits>
int launch_tile_kernel(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  const auto kernel = tile_kernel<T, kTokens, kBits>;
  CUtensorMap x_map;
  if (const cudaError_t e = make_x_map<T>(&x_map, args, kTokens); e != cudaSuccess) return e;
  const int ring_bytes = kCtaTiles * static_cast<int>(args.format.offset(kStageChunks));
  constexpr int kReserved = 3072;  // alignment slack and the barriers
  const int room = static_cast<int>(device.smem_bytes) - kReserved;
  constexpr int kXBytes = tile_x_bytes<kTokens>();
  TileArgs tile_args{args, 0, 2, 8};
  // Six stages of x hide its copies; what is left over goes to weights.
  while (tile_args.weight_stages < kMaxStages &&
         room - (tile_args.weight_stages + 1) * ring_bytes >= 6 * kXBytes) {
    ++tile_args.weight_stages;
  }
  if (room - tile_args.weight_stages * ring_bytes < 2 * kXBytes) tile_args.weight_stages = 1;
  tile_args.x_stages =
      std::min(kMaxXStages, (room - tile_args.weight_stages * ring_bytes) / kXBytes);
  if (tile_args.x_stages < 1) return cudaErrorInvalidConfiguration;
  const std::size_t shared_bytes = static_cast<std::size_t>(tile_args.x_stages) * kXBytes +
                                   static_cast<std::size_t>(tile_args.weight_stages) * ring_bytes +
                                   1024;
  if (const cudaError_t e = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
      e != cudaSuccess) {
    return e;
  }
  const std::int64_t total =
      (args.num_tiles + kCtaTiles - 1) / kCtaTiles * ((args.M + kTokens - 1) / kTokens);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<std::int64_t>(total, device.num_sms)));
  config.blockDim = dim3(kTileThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &dependent;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, tile_args, x_map);
}

template <class T, int kBits>
int launch_tile_tokens(const MatmulArgs& args, const DeviceFacts& device, cudaStream_t stream) {
  if (args.M <= 64) return launch_tile_kernel<T, 64, kBits>(args, device, stream);
  if (args.M <= 128) return launch_tile_kernel<T, 128, kBits>(args, device, stream);
  return launch_tile_kernel<T, 256, kBits>(args, device, stream);
}

}  // namespace qmlp::cuda
