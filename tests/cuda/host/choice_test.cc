// How kernels would be launched on machines that are not here.
#include "cuda/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace qmlp::cuda {
namespace {

constexpr int kFormatWidths[] = {2, 3, 4, 5, 6, 8, kDenseBits};

DeviceFacts device_of(int num_sms, std::size_t smem_bytes) {
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.num_sms = num_sms;
  facts.smem_bytes = smem_bytes;
  return facts;
}
// H200, A100, a part of an H200, consumer cards of sm_120 and sm_86, an imagined one.
const DeviceFacts kDevices[] = {device_of(132, 232448), device_of(108, 166912),
                                device_of(78, 232448),  device_of(170, 101376),
                                device_of(28, 101376),  device_of(1, 166912)};
const DeviceFacts& h200() { return kDevices[0]; }

std::vector<TileFormat> all_formats() {
  std::vector<TileFormat> formats;
  for (const int group : {32, 64}) {
    for (const int first : kFormatWidths) {
      for (const int second : kFormatWidths) {
        formats.push_back({{{first, group}, {second, group}}});
      }
    }
  }
  return formats;
}

// Bytes of a launch, from what a kernel puts there: rings, their barriers, x and, where K is cut,
// sums of 16 bytes a lane and token block, in two turns.
std::size_t bytes_used(const StreamShape& shape, const StreamChoice& choice) {
  std::size_t rings = 0, sums = 0;
  for (int warp = 0; warp < choice.warps; ++warp) {
    for (int stage = 0; stage < choice.stages; ++stage) {
      for (int c = 0; c < choice.stage_chunks; ++c) {
        rings += static_cast<std::size_t>(shape.format.chunk_bytes());
      }
    }
    for (int b = 0; b < shape.token_blocks && shape.segments > 1; ++b) sums += 2 * 32 * 16;
  }
  const auto barriers = static_cast<std::size_t>(choice.warps * choice.stages * 8);
  return rings + (barriers + 127) / 128 * 128 + shape.x_bytes + sums;
}

std::string describe(const StreamShape& shape, const DeviceFacts& device) {
  return "bits " + std::to_string(shape.format.half[0].bits) + " and " +
         std::to_string(shape.format.half[1].bits) + ", group " +
         std::to_string(shape.format.half[0].group_size) + ", tiles " +
         std::to_string(shape.num_tiles) + ", chunks " + std::to_string(shape.num_chunks) +
         ", segments " + std::to_string(shape.segments) + ", token blocks " +
         std::to_string(shape.token_blocks) + ", x " + std::to_string(shape.x_bytes) +
         ", fixed stages " + std::to_string(shape.fixed_stages) + ", SMs " +
         std::to_string(device.num_sms) + ", shared memory " + std::to_string(device.smem_bytes);
}

constexpr std::int64_t kTiles[] = {1,    2,    36,    192,    576,
                                   1792, 3584, 16032, 131072, std::int64_t{1} << 28};
constexpr std::int64_t kChunks[] = {1, 2, 7, 9, 24, 64, 128, 448, 4096, std::int64_t{1} << 25};

// x goes to shared memory where this much is left beside it.
constexpr std::size_t kLeftBesideX = 95 << 10;

TEST(ChooseStream, EveryLaunchIsPossible) {
  int failures = 0;
  for (const DeviceFacts& device : kDevices) {
    const std::size_t most_x =
        device.smem_bytes > kLeftBesideX ? device.smem_bytes - kLeftBesideX : 0;
    for (const TileFormat& format : all_formats()) {
      const bool has_dense = format.half[0].bits == kDenseBits || format.half[1].bits == kDenseBits;
      for (const std::int64_t tiles : kTiles) {
        for (const std::int64_t chunks : kChunks) {
          for (const int segments : {1, 2, 4, 8}) {
            for (const int rows : {0, 1, 8, 16}) {
              const auto x = static_cast<std::size_t>(rows * (chunks * kChunkK * 2 + 16));
              if (x > most_x) continue;
              for (const int fixed_stages : {0, 4}) {
                const StreamShape shape{format,           tiles, chunks,      segments,
                                        rows > 8 ? 2 : 1, x,     fixed_stages};
                const StreamChoice choice = choose_stream(shape, device);
                const bool ok =
                    choice.shared_bytes <= device.smem_bytes - kStaticSharedBytes &&
                    bytes_used(shape, choice) <= choice.shared_bytes && choice.warps >= segments &&
                    choice.warps % segments == 0 && choice.warps <= 16 && choice.stages >= 1 &&
                    choice.stages <= 6 && choice.stage_chunks >= 1 &&
                    choice.stage_chunks <= kStreamStageChunks &&
                    (fixed_stages != 0 || has_dense || choice.stage_chunks == kStreamStageChunks) &&
                    (fixed_stages == 0 || choice.stages == fixed_stages) && choice.grid >= 1 &&
                    choice.grid <= device.num_sms && choice.grid <= tiles;
                if (ok) continue;
                if (++failures > 10) continue;
                ADD_FAILURE() << describe(shape, device) << ": warps " << choice.warps
                              << ", stages " << choice.stages << ", grid " << choice.grid
                              << ", shared " << choice.shared_bytes << ", used "
                              << bytes_used(shape, choice);
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(failures, 0);
}

// The same of a relay: rings, their barriers, x, a chain's sums and, where K is cut, two turns of
// its segments' sums.
TEST(ChooseRelay, EveryLaunchIsPossible) {
  int choices = 0, failures = 0;
  for (const DeviceFacts& device : kDevices) {
    for (const TileFormat& format : all_formats()) {
      for (const std::int64_t tiles : kTiles) {
        for (const std::int64_t chunks : kChunks) {
          for (const int segments : {1, 2, 4, 8}) {
            for (const int rows : {1, 8}) {
              const std::size_t x = shared_x_bytes(chunks, rows);
              const StreamShape shape{format, tiles, chunks, segments, 1, x, 0};
              const auto choice = choose_relay(shape, device);
              if (chunks < segments) {
                EXPECT_FALSE(choice) << describe(shape, device) << ": a segment without a stage";
                continue;
              }
              if (!choice) {
                // Refused where one stage a warp is too much: it needs that beside x.
                EXPECT_GT(x + 8 * 8 * static_cast<std::size_t>(format.chunk_bytes()) * 8 + 16384,
                          device.smem_bytes)
                    << describe(shape, device);
                continue;
              }
              ++choices;
              const int chains = choice->warps / choice->legs;
              const std::size_t rings =
                  static_cast<std::size_t>(choice->warps * choice->stages * kStreamStageChunks) *
                  static_cast<std::size_t>(format.chunk_bytes());
              const auto barriers = static_cast<std::size_t>(choice->warps * choice->stages * 8);
              const std::size_t used = rings + (barriers + 127) / 128 * 128 + x +
                                       static_cast<std::size_t>(chains) * 512 *
                                           static_cast<std::size_t>(segments > 1 ? 3 : 1);
              // Named barriers: 0, one a warp, one a team.
              const int barrier_ids = 1 + choice->warps + chains / segments;
              const bool ok = choice->shared_bytes <= device.smem_bytes - kStaticSharedBytes &&
                              used <= choice->shared_bytes && chains >= segments &&
                              chains % segments == 0 && choice->warps % choice->legs == 0 &&
                              choice->warps <= kRelayMaxWarps && barrier_ids <= 16 &&
                              choice->legs >= 1 && choice->stages >= 1 && choice->stages <= 32 &&
                              choice->grid >= 1 && choice->grid <= device.num_sms &&
                              choice->grid <= tiles;
              if (ok) continue;
              if (++failures > 10) continue;
              ADD_FAILURE() << describe(shape, device) << ": warps " << choice->warps << ", legs "
                            << choice->legs << ", stages " << choice->stages << ", grid "
                            << choice->grid << ", shared " << choice->shared_bytes << ", used "
                            << used;
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(failures, 0);
  EXPECT_GT(choices, 1000);
}

// Long chains of few tiles: what an H200 was measured to do faster so.
TEST(ChooseRelay, TakesLongChainsOfFewTiles) {
  struct Linear {
    const char* name;
    std::int64_t N, K;
    bool relay;
  };
  constexpr Linear kLinears[] = {
      {"SmolLM2 down", 576, 1536, false},     {"MiniCPM5 q", 1536, 1536, false},
      {"MiniCPM5 down", 1536, 4608, true},    {"Llama-8B q", 4096, 4096, false},
      {"Llama-8B k", 1024, 4096, true},       {"Llama-8B down", 4096, 14336, true},
      {"Llama-8B head", 128256, 4096, false}, {"Llama-70B k", 1024, 8192, true},
      {"Llama-70B down", 8192, 28672, false}};
  for (const Linear& linear : kLinears) {
    EXPECT_EQ(prefers_relay(tiles_of(linear.N, false), linear.K / kChunkK, 1, h200()), linear.relay)
        << linear.name;
  }
}

// With work for all, no SM is idle, and with little no CTA is.
TEST(ChooseStream, SpreadsTiles) {
  for (const DeviceFacts& device : kDevices) {
    for (const std::int64_t tiles : kTiles) {
      const StreamShape shape{{{{4, 64}, {4, 64}}}, tiles, 64, 1, 1, 8192, 0};
      const StreamChoice choice = choose_stream(shape, device);
      EXPECT_LE(choice.grid, tiles);
      if (tiles >= 16 * device.num_sms) {
        EXPECT_EQ(choice.grid, device.num_sms) << tiles;
      }
    }
  }
}

constexpr std::int64_t kTokens[] = {16, 16, 32, 32, 64, 128, 256};

const char* name_of(TileConfig config) {
  constexpr const char* kNames[] = {"t16", "t16_pair", "t32", "t32_pair", "t64", "t128", "t256"};
  return kNames[static_cast<int>(config)];
}

// Microseconds on an H200 (132 SMs): fused SwiGLU, 4 bits, group 64, bf16, cold weights; configs
// that were far behind were not always measured.
struct Measured {
  std::int64_t tiles, chunks, M;
  std::map<TileConfig, double> us;
};
using enum TileConfig;
const Measured kMeasured[] = {
    {192,
     9,
     16,
     {{t16, 3.00},
      {t16_pair, 3.28},
      {t32, 3.10},
      {t32_pair, 3.48},
      {t64, 3.45},
      {t128, 4.44},
      {t256, 7.02}}},
    {192,
     9,
     32,
     {{t16, 4.26}, {t16_pair, 3.34}, {t32, 3.44}, {t32_pair, 3.72}, {t64, 3.75}, {t128, 4.60}}},
    {192, 9, 64, {{t32, 4.59}, {t32_pair, 3.78}, {t64, 4.28}, {t128, 5.00}}},
    {192, 9, 128, {{t16_pair, 5.78}, {t32_pair, 4.81}, {t64, 5.39}, {t128, 6.02}}},
    {192, 9, 256, {{t32_pair, 6.25}, {t64, 6.46}, {t128, 7.08}}},
    {192, 9, 512, {{t32_pair, 9.43}, {t64, 8.20}, {t128, 8.73}, {t256, 10.2}}},
    {192, 9, 1024, {{t64, 13.13}, {t128, 13.81}, {t256, 13.46}}},
    {576, 24, 16, {{t16, 7.27}, {t16_pair, 6.24}, {t32, 7.69}, {t32_pair, 6.66}, {t64, 10.17}}},
    {576, 24, 32, {{t16, 9.0}, {t16_pair, 8.83}, {t32, 7.89}, {t32_pair, 6.73}, {t64, 9.35}}},
    {576, 24, 64, {{t32, 9.87}, {t32_pair, 9.56}, {t64, 9.40}, {t128, 13.6}}},
    {576, 24, 128, {{t32, 14.86}, {t64, 11.12}, {t128, 13.22}}},
    {576, 24, 256, {{t64, 19.03}, {t128, 20.01}, {t256, 22.34}}},
    {576, 24, 512, {{t64, 31.56}, {t128, 31.58}, {t256, 35.58}}},
    {576, 24, 1024, {{t64, 60.65}, {t128, 56.63}, {t256, 59.5}}},
    {1792, 64, 16, {{t16, 21.12}, {t32, 25.22}, {t64, 32.38}}},
    {1792, 64, 32, {{t16, 33.16}, {t32, 25.01}, {t64, 31.64}}},
    {1792, 64, 64, {{t32, 43.64}, {t64, 32.31}, {t128, 61.11}}},
    {1792, 64, 128, {{t64, 56.23}, {t128, 55.76}}},
    {1792, 64, 256, {{t64, 117.2}, {t128, 104.0}, {t256, 114.2}}},
    {1792, 64, 512, {{t64, 214.0}, {t128, 194.4}, {t256, 195.8}}},
    {1792, 64, 1024, {{t64, 437.0}, {t128, 402.5}, {t256, 399.6}}},
    {3584, 128, 16, {{t16, 72.14}, {t32, 81.06}}},
    {3584, 128, 32, {{t16, 131.0}, {t32, 92.84}, {t64, 113.7}}},
    {3584, 128, 64, {{t32, 170.8}, {t64, 118.3}}},
    {3584, 128, 128, {{t64, 223.0}, {t128, 198.3}}},
    {3584, 128, 256, {{t128, 380.9}, {t256, 383.2}}},
    {3584, 128, 512, {{t128, 748.6}, {t256, 742.6}}},
    {3584, 128, 1024, {{t128, 1526.0}, {t256, 1545.0}}},
};

TEST(ChooseTile, IsNearTheBestMeasured) {
  constexpr double kSlack = 1.12;
  for (const Measured& row : kMeasured) {
    const TileConfig chosen = choose_tile(row.M, row.tiles, row.chunks, h200());
    double best = 1e9;
    for (const auto& [config, us] : row.us) best = std::min(best, us);
    const auto found = row.us.find(chosen);
    ASSERT_NE(found, row.us.end())
        << name_of(chosen) << " was not measured: tiles " << row.tiles << ", M " << row.M;
    EXPECT_LE(found->second, kSlack * best) << name_of(chosen) << ": tiles " << row.tiles
                                            << ", chunks " << row.chunks << ", M " << row.M;
  }
}

// A block of tokens is never far larger than the tokens there are, where most of it would be idle.
TEST(ChooseTile, NoLargeBlocksForFewTokens) {
  for (const DeviceFacts& device : kDevices) {
    for (const std::int64_t tiles : kTiles) {
      for (const std::int64_t chunks : kChunks) {
        for (std::int64_t M = 1; M <= 64; ++M) {
          const TileConfig config = choose_tile(M, tiles, chunks, device);
          ASSERT_NE(config, t256) << "M " << M << ", tiles " << tiles << ", chunks " << chunks;
          if (M > 32) continue;
          ASSERT_LE(kTokens[static_cast<int>(config)], 64)
              << "M " << M << ", tiles " << tiles << ", chunks " << chunks;
        }
      }
    }
  }
}

TEST(ChooseTile, AnyShapeHasAConfig) {
  for (const DeviceFacts& device : kDevices) {
    for (const std::int64_t tiles : kTiles) {
      for (const std::int64_t chunks : kChunks) {
        for (const std::int64_t M : {std::int64_t{1}, std::int64_t{9}, std::int64_t{4095},
                                     std::int64_t{1} << 20, std::int64_t{1} << 31}) {
          const auto config = static_cast<int>(choose_tile(M, tiles, chunks, device));
          ASSERT_GE(config, 0);
          ASSERT_LT(config, kNumTileConfigs);
        }
      }
    }
  }
}

TEST(TilesOf, RoundsUp) {
  EXPECT_EQ(tiles_of(1, true), 1);
  EXPECT_EQ(tiles_of(8, true), 1);
  EXPECT_EQ(tiles_of(9, true), 2);
  EXPECT_EQ(tiles_of(16, false), 1);
  EXPECT_EQ(tiles_of(17, false), 2);
  EXPECT_EQ(tiles_of(14336, true), 1792);
  EXPECT_EQ(tiles_of(128256, false), 8016);
}

}  // namespace
}  // namespace qmlp::cuda
