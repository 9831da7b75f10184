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

inline std::int64_t tile_units(const MatmulArgs& args, int tokens) {
  return (args.num_tiles + kUnitTiles - 1) / kUnitTiles * ((args.M + tokens - 1) / tokens);
}

// The rings of a CTA: weights, in stages of `group_chunks` chunks of four tiles, get what
// `other_bytes` leave.
struct TileRings {
  int stages;  // of weights; less than one where there is no room
  std::size_t shared_bytes;
};
inline TileRings tile_rings(const TileFormat& format, const DeviceFacts& device, int ctas,
                            int group_chunks, int other_bytes) {
  const int ring_bytes = 4 * group_chunks * format.chunk_bytes();
  constexpr int kAlignment = 1024;
  const int room =
      static_cast<int>((device.smem_bytes - kStaticSharedBytes) / ctas) - 1024 - kAlignment;
  const int stages = std::min(kMaxWeightStages, (room - other_bytes) / ring_bytes);
  return {stages, static_cast<std::size_t>(other_bytes + stages * ring_bytes + kAlignment)};
}

template <class T, int kTokens, int kGroups, int kCtas, int kBits, int kGroup, bool kWords>
int launch_tile_kernel(const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target) {
  CUtensorMap x_map;
  if (const cudaError_t e = make_x_map<T>(&x_map, args, kTokens); e != cudaSuccess) return e;
  const std::int64_t total = tile_units(args, kTokens);
  const std::int64_t grid = std::min<std::int64_t>(total, device.num_sms * kCtas);
  // Warpgroups that never have a unit need no ring.
  const int groups = static_cast<int>(std::min<std::int64_t>(kGroups, (total + grid - 1) / grid));
  const TileRings rings =
      tile_rings(args.format, device, kCtas, groups * tile_stage_chunks(kBits, kGroup),
                 tile_x_ring(kTokens) * tile_x_chunk_bytes(kTokens));
  if (rings.stages < 1) return cudaErrorInvalidConfiguration;
  return launch_kernel(
      tile_kernel<T, kTokens, kGroups, kCtas, kBits, kGroup, kWords>,
      {dim3(static_cast<unsigned>(grid)), 128 * (kGroups + 1), rings.shared_bytes, true}, device,
      target, TileArgs{args, rings.stages}, x_map);
}

// Where registers are short, fragments are held by halves of a chunk, and that is safe only when
// decoding computes them: ptxas lets the load of the next chunk overwrite fragments that are its
// own words while wgmma still reads them (tools/check_wgmma.py looks for that).
constexpr bool is_computed(int bits) { return bits != 0 && bits != kDenseBits; }

template <class T, int kBits, int kGroup>
int launch_tile_tokens(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                       const LaunchTarget& target) {
  const auto launch = [&]<int kTokens, int kGroups, int kCtas>() {
    return launch_tile_kernel<T, kTokens, kGroups, kCtas, kBits, kGroup, true>(args, device,
                                                                               target);
  };
  constexpr bool kComputed = is_computed(kBits);
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
    case TileConfig::t128_sequence:
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
