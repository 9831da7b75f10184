#pragma once

#include "cuda/kernels/combine.cuh"
#include "cuda/kernels/rows.h"
#include "cuda/kernels/tile_launch.cuh"

// Tile kernels of weights whose K is cut into segments, at least one chunk each.
namespace qmlp::cuda {

// Segments apart, and the kernel that adds them.
template <class T, int kTokens, int kGroups, int kBits, int kGroup>
int launch_apart(const MatmulArgs& args, const DeviceFacts& device, const LaunchTarget& target) {
  CUtensorMap x_map;
  if (const cudaError_t e = make_x_map<T>(&x_map, args, kTokens); e != cudaSuccess) return e;
  auto* const partials = reinterpret_cast<float4*>(args.scratch);
  const std::int64_t units = (args.num_tiles + kUnitTiles - 1) / kUnitTiles;
  const std::int64_t blocks = (args.M + kTokens - 1) / kTokens * args.segments;
  // Warpgroups that never have a unit need no ring.
  const int groups = choose_round_units(kTokens, kGroups, units, blocks, device);
  const std::int64_t pieces = (units + groups - 1) / groups;
  const std::int64_t grid = std::min<std::int64_t>(pieces * blocks, device.num_sms);
  const TileRings rings =
      tile_rings(args.format, device, 1, groups * tile_stage_chunks(kBits, kGroup),
                 split_x_ring(TileSplit::apart, kTokens) * tile_x_chunk_bytes(kTokens));
  if (rings.stages < 1) return cudaErrorInvalidConfiguration;
  if (const cudaError_t e = launch_kernel(
          split_tile_kernel<T, kTokens, kGroups, kBits, kGroup, TileSplit::apart>,
          {dim3(static_cast<unsigned>(grid)), 128 * (kGroups + 1), rings.shared_bytes, true},
          device, target,
          SplitTileArgs{{args, rings.stages}, partials, static_cast<int>(pieces), 0}, x_map);
      e != cudaSuccess) {
    return e;
  }
  const dim3 combine_grid(
      static_cast<unsigned>((args.num_tiles + kCombineWarps - 1) / kCombineWarps),
      static_cast<unsigned>((args.M + 7) / 8));
  return launch_kernel(combine_kernel<T>, {combine_grid, 32 * kCombineWarps, 0, true}, device,
                       target, args.epilogue, partials, static_cast<int>(args.num_tiles), args.M,
                       args.segments);
}

// Segments one after another, 128 tokens a unit.
template <class T, int kBits, int kGroup>
int launch_sequence(const MatmulArgs& args, const DeviceFacts& device, const LaunchTarget& target) {
  constexpr int kTokens = 128, kGroups = 2;
  CUtensorMap x_map;
  if (const cudaError_t e = make_x_map<T>(&x_map, args, kTokens); e != cudaSuccess) return e;
  const std::int64_t total = tile_units(args, kTokens);
  const std::int64_t grid = std::min<std::int64_t>(total, device.num_sms);
  const int groups = static_cast<int>(std::min<std::int64_t>(kGroups, (total + grid - 1) / grid));
  const int waiting = args.segments > 2 ? groups * 64 * kTokens * 4 : 0;
  const TileRings rings = tile_rings(
      args.format, device, 1, groups * tile_stage_chunks(kBits, kGroup),
      split_x_ring(TileSplit::sequence, kTokens) * tile_x_chunk_bytes(kTokens) + waiting);
  if (rings.stages < 1) return cudaErrorInvalidConfiguration;
  return launch_kernel(
      split_tile_kernel<T, kTokens, kGroups, kBits, kGroup, TileSplit::sequence>,
      {dim3(static_cast<unsigned>(grid)), 128 * (kGroups + 1), rings.shared_bytes, true}, device,
      target, SplitTileArgs{{args, rings.stages}, nullptr, 0, waiting}, x_map);
}

template <class T>
int launch_split_tile(TileConfig config, const MatmulArgs& args, const DeviceFacts& device,
                      const LaunchTarget& target) {
  const bool words = word_stores_suffice(args.epilogue);
  return with_format(args.format, [&]<int kBits, int kGroup>() -> int {
    constexpr bool kComputed = is_computed(kBits);
    if (config == TileConfig::t128_sequence && words) {
      return launch_sequence<T, kBits, kGroup>(args, device, target);
    }
    const auto launch = [&](const MatmulArgs& part) -> int {
      switch (config) {
        case TileConfig::t32:
          return launch_apart<T, 32, 4, kBits, kGroup>(part, device, target);
        case TileConfig::t64:
          return launch_apart < T, 64, kComputed ? 4 : 2, kBits, kGroup > (part, device, target);
        case TileConfig::t128:
        case TileConfig::t128_sequence:
          return launch_apart<T, 128, 2, kBits, kGroup>(part, device, target);
        default:
          return cudaErrorInvalidConfiguration;
      }
    };
    const std::int64_t rows = partial_rows(args.M, args.num_tiles, args.segments);
    for (std::int64_t m = 0; m < args.M; m += rows) {
      if (const int e = launch(rows_of(args, m, rows)); e != cudaSuccess) return e;
    }
    return cudaSuccess;
  });
}

}  // namespace qmlp::cuda
