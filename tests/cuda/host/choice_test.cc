// How kernels would be launched on machines that are not here.
#include "cuda/choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
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
                    choice.stages <= 6 && choice.first_stages >= 1 &&
                    choice.first_stages <= choice.stages && choice.stage_chunks >= 1 &&
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

// CTAs that fill most SMs begin when the kernel before has ended, and load one stage before x;
// fewer find free SMs, begin before it ends and load all they can.
TEST(ChooseStream, LoadsOneStageBeforeXWhereMostSmsAreTaken) {
  const auto choose = [&](std::int64_t tiles, std::int64_t chunks, int segments) {
    const StreamShape shape{{{{4, 64}, {4, 64}}},      tiles, chunks, segments, 1,
                            shared_x_bytes(chunks, 1), 0};
    return choose_stream(shape, h200());
  };
  for (const auto& [tiles, chunks, segments, one] : {std::tuple{192, 9, 1, false},
                                                     {576, 24, 1, false},
                                                     {256, 64, 1, false},
                                                     {256, 64, 4, true},
                                                     {1792, 64, 1, true},
                                                     {3584, 128, 1, true}}) {
    const StreamChoice choice = choose(tiles, chunks, segments);
    EXPECT_GT(choice.stages, 1) << tiles;
    EXPECT_EQ(choice.first_stages, one ? 1 : choice.stages)
        << tiles << " tiles, grid " << choice.grid << ", stages " << choice.stages;
  }
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

// Few chains: no two CTAs fit on an SM. Many, and x so large that fewer than 16 warps' rings fit
// beside it: no more warps than whole rounds of tiles need.
TEST(ChooseStream, NoTwoChainsShareAWarpSchedulerAndRoundsAreWhole) {
  const DeviceFacts device = h200();
  for (const std::int64_t tiles : {36, 192, 576, 1056}) {
    const StreamShape shape{{{{2, 64}, {2, 64}}}, tiles, 24, 1, 1, 3088, 0};
    EXPECT_GT(2 * (choose_stream(shape, device).shared_bytes + 1024), device.smem_bytes + 1024)
        << tiles;
  }
  const std::size_t x = shared_x_bytes(128, 8);
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    const StreamShape shape{{{{bits, 64}, {bits, 64}}}, 3584, 128, 1, 1, x, 0};
    const StreamChoice choice = choose_stream(shape, device);
    const auto rounds = [&](int warps) { return (3584 + 132 * warps - 1) / (132 * warps); };
    EXPECT_TRUE(choice.warps == 16 || rounds(choice.warps - 1) > rounds(choice.warps))
        << bits << " bits: " << choice.warps << " warps";
  }
}

constexpr std::int64_t kTokens[] = {16, 16, 32, 32, 64, 128, 256};

const char* name_of(TileConfig config) {
  constexpr const char* kNames[] = {"t16", "t16_pair", "t32",  "t32_pair",
                                    "t64", "t128",     "t256", "t128_sequence"};
  return kNames[static_cast<int>(config)];
}

// Microseconds on an H200 (132 SMs): fused SwiGLU, group 64, bf16, cold weights; configs that were
// far behind were not always measured. The shapes are SmolLM2's, MiniCPM5's, Llama-8B's and
// Llama-70B's.
struct Measured {
  std::int64_t tiles, chunks, M;
  int bits;
  std::map<TileConfig, double> us;
};
using enum TileConfig;
// clang-format off
const Measured kMeasured[] = {
    {192, 9, 16, 4, {{t16, 2.9}, {t16_pair, 3.1}, {t32, 3.1}, {t32_pair, 3.4}, {t64, 3.5}, {t128, 4.3}}},
    {192, 9, 24, 4, {{t16, 3.6}, {t16_pair, 3.2}, {t32, 3.2}, {t32_pair, 3.5}, {t64, 3.6}, {t128, 4.5}}},
    {192, 9, 32, 4, {{t16, 4.26}, {t16_pair, 3.34}, {t32, 3.44}, {t32_pair, 3.72}, {t64, 3.75}}},
    {192, 9, 64, 4, {{t32, 4.59}, {t32_pair, 3.78}, {t64, 4.28}, {t128, 5.00}}},
    {192, 9, 128, 4, {{t16_pair, 5.78}, {t32_pair, 4.81}, {t64, 5.39}, {t128, 6.02}}},
    {192, 9, 256, 4, {{t32_pair, 6.25}, {t64, 6.46}, {t128, 7.08}}},
    {192, 9, 512, 4, {{t32_pair, 9.43}, {t64, 8.20}, {t128, 8.73}, {t256, 10.2}}},
    {192, 9, 1024, 4, {{t64, 13.13}, {t128, 13.81}, {t256, 13.46}}},
    {576, 24, 16, 2, {{t16, 6.2}, {t16_pair, 5.2}, {t32, 6.5}, {t32_pair, 6.3}, {t64, 8.9}}},
    {576, 24, 16, 4, {{t16, 6.4}, {t16_pair, 5.8}, {t32, 6.7}, {t32_pair, 6.7}, {t64, 9.4}}},
    {576, 24, 16, 6, {{t16, 7.0}, {t16_pair, 6.5}, {t32, 7.3}, {t32_pair, 7.2}, {t64, 10.0}}},
    {576, 24, 32, 4, {{t16, 8.2}, {t16_pair, 8.1}, {t32, 6.9}, {t32_pair, 6.6}, {t64, 8.7}}},
    {576, 24, 64, 4, {{t16, 12.0}, {t32, 9.1}, {t32_pair, 8.8}, {t64, 8.5}, {t128, 12.4}}},
    {576, 24, 128, 4, {{t32, 13.3}, {t32_pair, 14.5}, {t64, 10.2}, {t128, 12.0}}},
    {576, 24, 256, 4, {{t32, 21.5}, {t64, 18.0}, {t128, 19.3}, {t256, 21.6}}},
    {576, 24, 512, 4, {{t64, 31.56}, {t128, 31.58}, {t256, 35.58}}},
    {576, 24, 1024, 4, {{t64, 60.65}, {t128, 56.63}, {t256, 59.5}}},
    {1792, 64, 16, 2, {{t16, 18.3}, {t16_pair, 18.7}, {t32, 20.5}, {t32_pair, 21.1}, {t64, 27.7}}},
    {1792, 64, 16, 4, {{t16, 20.4}, {t16_pair, 20.2}, {t32, 22.9}, {t32_pair, 23.1}, {t64, 31.3}}},
    {1792, 64, 16, 5, {{t16, 25.1}, {t16_pair, 23.8}, {t32, 28.0}, {t32_pair, 27.0}, {t64, 36.2}}},
    {1792, 64, 16, 6, {{t16, 28.4}, {t16_pair, 25.2}, {t32, 31.4}, {t32_pair, 26.9}, {t64, 39.0}}},
    {1792, 64, 16, 8, {{t16, 31.0}, {t16_pair, 30.6}, {t32, 33.6}, {t32_pair, 32.4}, {t64, 40.0}}},
    {1792, 64, 32, 4, {{t16, 31.9}, {t16_pair, 38.3}, {t32, 22.2}, {t32_pair, 23.9}, {t64, 29.5}}},
    {1792, 64, 32, 5, {{t16, 41.4}, {t16_pair, 47.1}, {t32, 28.6}, {t32_pair, 27.8}, {t64, 37.1}}},
    {1792, 64, 32, 6, {{t16, 42.7}, {t16_pair, 48.1}, {t32, 31.8}, {t32_pair, 27.3}, {t64, 37.7}}},
    {1792, 64, 32, 8, {{t16, 45.7}, {t16_pair, 48.7}, {t32, 35.2}, {t32_pair, 32.2}, {t64, 39.1}}},
    {1792, 64, 64, 4, {{t32, 40.6}, {t32_pair, 46.7}, {t64, 30.7}, {t128, 58.7}}},
    {1792, 64, 64, 6, {{t32, 51.2}, {t32_pair, 56.0}, {t64, 39.4}, {t128, 63.8}}},
    {1792, 64, 128, 4, {{t32, 75.4}, {t64, 54.3}, {t128, 56.5}, {t256, 116.4}}},
    {1792, 64, 256, 4, {{t64, 102.1}, {t128, 101.4}, {t256, 106.3}}},
    {1792, 64, 512, 4, {{t64, 214.0}, {t128, 194.4}, {t256, 195.8}}},
    {1792, 64, 1024, 4, {{t64, 437.0}, {t128, 402.5}, {t256, 399.6}}},
    {3584, 128, 16, 3, {{t16, 67.9}, {t16_pair, 81.5}, {t32, 79.7}, {t32_pair, 91.6}, {t64, 103.0}}},
    {3584, 128, 16, 4, {{t16, 71.2}, {t16_pair, 79.9}, {t32, 80.8}, {t32_pair, 88.4}, {t64, 109.4}}},
    {3584, 128, 16, 6, {{t16, 94.6}, {t16_pair, 99.5}, {t32, 108.9}, {t32_pair, 110.5}, {t64, 128.4}}},
    {3584, 128, 32, 4, {{t16, 131.2}, {t32, 83.0}, {t32_pair, 97.4}, {t64, 106.3}}},
    {3584, 128, 32, 6, {{t16, 170.0}, {t32, 115.7}, {t32_pair, 117.6}, {t64, 134.4}}},
    {3584, 128, 64, 4, {{t32, 170.8}, {t64, 118.3}}},
    {3584, 128, 128, 4, {{t64, 223.0}, {t128, 198.3}}},
    {3584, 128, 256, 4, {{t128, 380.9}, {t256, 383.2}}},
    {3584, 128, 512, 4, {{t128, 748.6}, {t256, 742.6}}},
    {3584, 128, 1024, 4, {{t128, 1526.0}, {t256, 1545.0}}},
};
// clang-format on

TEST(ChooseTile, IsNearTheBestMeasured) {
  constexpr double kSlack = 1.12;
  for (const Measured& row : kMeasured) {
    const TileConfig chosen = choose_tile({row.M, row.tiles, row.chunks, 1, row.bits}, h200());
    double best = 1e9;
    for (const auto& [config, us] : row.us) best = std::min(best, us);
    const auto found = row.us.find(chosen);
    ASSERT_NE(found, row.us.end()) << name_of(chosen) << " was not measured: tiles " << row.tiles
                                   << ", M " << row.M << ", " << row.bits << " bits";
    EXPECT_LE(found->second, kSlack * best)
        << name_of(chosen) << ": tiles " << row.tiles << ", chunks " << row.chunks << ", M "
        << row.M << ", " << row.bits << " bits";
  }
}

// A block of tokens is never far larger than the tokens there are, where most of it would be idle.
TEST(ChooseTile, NoLargeBlocksForFewTokens) {
  for (const DeviceFacts& device : kDevices) {
    for (const std::int64_t tiles : kTiles) {
      for (const std::int64_t chunks : kChunks) {
        for (std::int64_t M = 1; M <= 64; ++M) {
          const TileConfig config = choose_tile({M, tiles, chunks, 1, 4}, device);
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
          for (const int segments : {1, 2, 4, 8}) {
            const TileConfig config = choose_tile({M, tiles, chunks, segments, 4}, device);
            ASSERT_GE(static_cast<int>(config), 0);
            ASSERT_LT(static_cast<int>(config), kNumTileConfigs);
            ASSERT_TRUE(segments == 1 || splits_k(config)) << name_of(config);
          }
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
