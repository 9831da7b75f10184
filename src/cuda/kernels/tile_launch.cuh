#pragma once

#include <algorithm>

#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/launch_kernel.cuh"
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

template <class T, int kTokens, int kGroups, int kCtas, int kBits, int kGroup, bool kWords>
int launch_tile_kernel(const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target) {
  const auto kernel = tile_kernel<T, kTokens, kGroups, kCtas, kBits, kGroup, kWords>;
  CUtensorMap x_map;
  if (const cudaError_t e = make_x_map<T>(&x_map, args, kTokens); e != cudaSuccess) return e;
  const std::int64_t total =
      (args.num_tiles + kUnitTiles - 1) / kUnitTiles * ((args.M + kTokens - 1) / kTokens);
  const std::int64_t grid = std::min<std::int64_t>(total, device.num_sms * kCtas);
  // Warpgroups that never have a unit need no ring.
  const int groups = static_cast<int>(std::min<std::int64_t>(kGroups, (total + grid - 1) / grid));
  const int ring_bytes = 4 * groups * tile_stage_chunks(kBits, kGroup) * args.format.chunk_bytes();
  constexpr int kXBytes = tile_x_ring(kTokens) * tile_x_chunk_bytes(kTokens);
  constexpr int kAlignment = 1024;
  const int room =
      static_cast<int>((device.smem_bytes - kStaticSharedBytes) / kCtas) - 1024 - kAlignment;
  const int stages = (room - kXBytes) / ring_bytes;
  if (stages < 1) return cudaErrorInvalidConfiguration;
  const TileArgs tile_args{args, std::min(kMaxWeightStages, stages)};
  const auto shared_bytes =
      static_cast<std::size_t>(kXBytes + tile_args.weight_stages * ring_bytes + kAlignment);
  return launch_kernel(kernel,
                       {dim3(static_cast<unsigned>(grid)), 128 * (kGroups + 1), shared_bytes, true},
                       device, target, tile_args, x_map);
}

template <class T, int kBits, int kGroup>
int launch_tile_tokens(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target) {
  const auto launch = [&]<int kTokens, int kGroups, int kCtas>() {
    return launch_tile_kernel<T, kTokens, kGroups, kCtas, kBits, kGroup, true>(args, device,
                                                                               target);
  };
  // Where registers are short, fragments are held by halves of a chunk, and that is safe only when
  // decoding computes them: ptxas lets the load of the next chunk overwrite fragments that are its
  // own words while wgmma still reads them (tools/check_wgmma.py looks for that).
  constexpr bool kComputed = kBits != 0 && kBits != kDenseBits;
  switch (config) {
    case TileConfig::t16_pair:
      if constexpr (kComputed) return launch.template operator()<16, 2, 2>();
      [[fallthrough]];
    case TileConfig::t16:
      return launch.template operator()<16, 4, 1>();
    case TileConfig::t32_pair:
      if constexpr (kComputed) return launch.template operator()<32, 2, 2>();
      [[fallthrough]];
    case TileConfig::t32:
      return launch.template operator()<32, 4, 1>();
    case TileConfig::t64:
      return launch.template operator() < 64, kComputed ? 4 : 2, 1 > ();
    case TileConfig::t128:
      return launch.template operator()<128, 2, 1>();
    case TileConfig::t256:
      return launch.template operator()<256, 2, 1>();
  }
  return cudaErrorInvalidConfiguration;
}

// What few models need goes through one kernel, which reads widths at run time.
template <class T>
int launch_tile_elements(const MatmulArgs& args, const DeviceFacts& device,
                         const LaunchTarget& target) {
  return with_group<0>(args.format, [&]<int kBits, int kGroup>() {
    return launch_tile_kernel<T, 64, 2, 1, kBits, kGroup, false>(args, device, target);
  });
}

}  // namespace qmlp::cuda
