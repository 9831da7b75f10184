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
// Llama-70B's, at 4 bits some of their linears too.
struct Measured {
  std::int64_t tiles, chunks, M;
  int bits;
  std::map<TileConfig, double> us;
};
using enum TileConfig;
// clang-format off
const Measured kMeasured[] = {
    // Two units of 12 CTAs belong to two blocks of tokens with t32: two rounds.
    {36, 24, 512, 4, {{t32, 8.41}, {t32_pair, 6.34}}},
    {16, 24, 16, 4, {{t16, 4.18}, {t32, 4.30}, {t64, 4.93}, {t128, 5.95}, {t256, 8.65}}},
    {16, 24, 64, 4, {{t16, 4.24}, {t32, 4.76}, {t64, 6.07}, {t128, 7.11}}},
    {16, 24, 256, 4, {{t16, 4.27}, {t32, 4.76}, {t64, 6.11}, {t128, 8.59}}},
    {96, 24, 16, 4, {{t16, 4.30}, {t32, 4.41}, {t64, 5.00}, {t128, 5.97}, {t256, 8.84}}},
    {96, 24, 64, 4, {{t16, 4.81}, {t16_pair, 4.65}, {t32, 4.74}, {t64, 6.14}, {t128, 7.14}, {t256, 9.99}}},
    {96, 24, 256, 4, {{t16, 7.06}, {t16_pair, 7.72}, {t32, 6.31}, {t32_pair, 6.78}, {t64, 6.81}, {t128, 8.76}}},
    {96, 72, 16, 4, {{t16, 9.81}, {t32, 10.09}, {t64, 11.82}, {t128, 14.92}}},
    {96, 72, 64, 4, {{t16, 10.23}, {t32, 10.44}, {t64, 13.02}, {t128, 15.95}}},
    {96, 72, 256, 4, {{t16, 15.75}, {t32, 13.70}, {t64, 13.66}, {t128, 17.59}}},
    {192, 9, 16, 2, {{t16, 2.81}, {t32, 2.90}, {t64, 3.34}, {t128, 4.30}}},
    {192, 9, 16, 4, {{t16, 2.86}, {t32, 2.94}, {t64, 3.27}, {t128, 4.21}}},
    {192, 9, 16, 5, {{t16, 3.09}, {t32, 3.19}, {t64, 3.50}, {t128, 4.26}, {t256, 6.66}}},
    {192, 9, 16, 6, {{t16, 3.00}, {t32, 3.17}, {t64, 3.51}, {t128, 4.19}}},
    {192, 9, 16, 8, {{t16, 3.05}, {t32, 3.18}, {t64, 3.46}, {t128, 4.24}}},
    {192, 9, 24, 4, {{t16, 3.6}, {t16_pair, 3.2}, {t32, 3.2}, {t32_pair, 3.5}, {t64, 3.6}, {t128, 4.5}}},
    {192, 9, 32, 2, {{t16, 3.48}, {t16_pair, 3.22}, {t32, 3.21}, {t64, 3.61}, {t128, 4.39}, {t256, 6.36}}},
    {192, 9, 32, 4, {{t16, 3.52}, {t16_pair, 3.23}, {t32, 3.25}, {t64, 3.58}, {t128, 4.41}, {t256, 6.69}}},
    {192, 9, 32, 5, {{t16, 3.74}, {t16_pair, 3.37}, {t32, 3.42}, {t64, 3.77}, {t128, 4.47}, {t256, 6.63}}},
    {192, 9, 32, 6, {{t16, 3.66}, {t16_pair, 3.44}, {t32, 3.36}, {t64, 3.81}, {t128, 4.45}, {t256, 6.78}}},
    {192, 9, 32, 8, {{t16, 3.68}, {t16_pair, 3.34}, {t32, 3.35}, {t64, 3.70}, {t128, 4.46}, {t256, 6.89}}},
    {192, 9, 33, 4, {{t16, 4.13}, {t16_pair, 3.38}, {t32, 3.78}, {t32_pair, 3.66}, {t64, 3.71}, {t128, 4.59}, {t256, 6.95}}},
    {192, 9, 64, 2, {{t16, 4.08}, {t16_pair, 3.82}, {t32, 3.76}, {t32_pair, 3.61}, {t64, 4.04}, {t128, 4.81}, {t256, 6.28}}},
    {192, 9, 64, 4, {{t16, 4.27}, {t16_pair, 3.93}, {t32, 3.86}, {t32_pair, 3.60}, {t64, 4.07}, {t128, 4.76}, {t256, 6.66}}},
    {192, 9, 64, 5, {{t16, 4.40}, {t16_pair, 4.03}, {t32, 4.04}, {t32_pair, 3.80}, {t64, 4.20}, {t128, 4.98}, {t256, 6.35}}},
    {192, 9, 64, 6, {{t16, 4.38}, {t16_pair, 4.06}, {t32, 3.99}, {t32_pair, 3.80}, {t64, 4.23}, {t128, 4.92}, {t256, 6.82}}},
    {192, 9, 64, 8, {{t16, 4.47}, {t16_pair, 4.30}, {t32, 3.95}, {t32_pair, 3.66}, {t64, 4.14}, {t128, 4.83}, {t256, 6.64}}},
    {192, 9, 128, 2, {{t16, 4.72}, {t16_pair, 4.73}, {t32, 4.38}, {t32_pair, 4.24}, {t64, 4.60}, {t128, 5.80}, {t256, 7.13}}},
    {192, 9, 128, 4, {{t16, 4.82}, {t16_pair, 4.97}, {t32, 4.67}, {t32_pair, 4.39}, {t64, 4.70}, {t128, 5.74}, {t256, 7.22}}},
    {192, 9, 128, 5, {{t16, 5.17}, {t16_pair, 5.34}, {t32, 4.77}, {t32_pair, 4.54}, {t64, 4.80}, {t128, 5.92}, {t256, 7.12}}},
    {192, 9, 128, 6, {{t16, 5.14}, {t16_pair, 5.43}, {t32, 4.74}, {t32_pair, 4.58}, {t64, 4.86}, {t128, 5.88}, {t256, 7.19}}},
    {192, 9, 128, 8, {{t16, 5.15}, {t16_pair, 5.72}, {t32, 4.77}, {t32_pair, 4.77}, {t64, 4.77}, {t128, 5.86}, {t256, 7.22}}},
    {192, 9, 256, 4, {{t16, 7.55}, {t16_pair, 7.51}, {t32, 5.31}, {t32_pair, 5.42}, {t64, 5.53}, {t128, 6.39}, {t256, 8.94}}},
    {192, 9, 512, 4, {{t16, 12.38}, {t16_pair, 11.64}, {t32, 8.56}, {t32_pair, 8.57}, {t64, 6.56}, {t128, 7.33}, {t256, 9.46}}},
    {192, 9, 1024, 4, {{t16, 22.30}, {t16_pair, 21.94}, {t32, 14.32}, {t32_pair, 13.66}, {t64, 11.15}, {t128, 12.62}, {t256, 11.60}}},
    {256, 64, 16, 4, {{t16, 9.41}, {t32, 9.55}, {t64, 12.02}}},
    {256, 64, 64, 4, {{t16, 12.26}, {t32, 10.80}, {t64, 11.96}, {t128, 16.71}}},
    {256, 64, 256, 4, {{t16, 33.69}, {t32, 20.29}, {t64, 18.56}, {t128, 19.00}, {t256, 31.49}}},
    {576, 24, 16, 2, {{t16, 5.27}, {t16_pair, 5.07}, {t32, 5.50}, {t32_pair, 6.06}, {t64, 8.58}}},
    {576, 24, 16, 4, {{t16, 5.75}, {t16_pair, 5.77}, {t32, 6.05}, {t32_pair, 6.43}, {t64, 9.22}, {t128, 12.34}}},
    {576, 24, 16, 5, {{t16, 6.07}, {t16_pair, 6.18}, {t32, 6.60}, {t32_pair, 6.78}, {t64, 9.41}, {t128, 12.45}}},
    {576, 24, 16, 6, {{t16, 6.04}, {t16_pair, 6.36}, {t32, 6.38}, {t32_pair, 7.03}, {t64, 9.70}, {t128, 12.73}}},
    {576, 24, 16, 8, {{t16, 6.68}, {t16_pair, 7.04}, {t32, 6.92}, {t32_pair, 7.72}, {t64, 10.19}, {t128, 13.97}}},
    {576, 24, 32, 2, {{t16, 6.17}, {t16_pair, 7.22}, {t32, 5.63}, {t32_pair, 5.74}, {t64, 7.85}, {t128, 11.62}}},
    {576, 24, 32, 4, {{t16, 7.16}, {t16_pair, 7.74}, {t32, 6.07}, {t32_pair, 6.46}, {t64, 8.22}, {t128, 12.13}}},
    {576, 24, 32, 5, {{t16, 7.29}, {t16_pair, 8.57}, {t32, 6.83}, {t32_pair, 6.80}, {t64, 8.63}, {t128, 12.35}}},
    {576, 24, 32, 6, {{t16, 7.42}, {t16_pair, 8.21}, {t32, 6.59}, {t32_pair, 7.03}, {t64, 8.77}, {t128, 12.19}}},
    {576, 24, 32, 8, {{t16, 8.72}, {t16_pair, 9.24}, {t32, 7.08}, {t32_pair, 7.81}, {t64, 9.33}, {t128, 13.73}}},
    {576, 24, 33, 4, {{t16, 7.71}, {t16_pair, 8.93}, {t32, 7.82}, {t32_pair, 10.83}, {t64, 8.42}, {t128, 12.34}}},
    {576, 24, 64, 2, {{t16, 10.10}, {t16_pair, 10.02}, {t32, 6.86}, {t32_pair, 7.77}, {t64, 7.31}, {t128, 11.46}}},
    {576, 24, 64, 4, {{t16, 10.52}, {t16_pair, 10.91}, {t32, 8.06}, {t32_pair, 8.51}, {t64, 7.99}, {t128, 11.73}}},
    {576, 24, 64, 5, {{t16, 12.32}, {t16_pair, 11.75}, {t32, 8.24}, {t32_pair, 8.75}, {t64, 8.42}, {t128, 11.20}}},
    {576, 24, 64, 6, {{t16, 11.89}, {t16_pair, 11.55}, {t32, 8.04}, {t32_pair, 8.96}, {t64, 8.55}, {t128, 11.40}}},
    {576, 24, 64, 8, {{t16, 12.55}, {t16_pair, 14.22}, {t32, 9.06}, {t32_pair, 9.98}, {t64, 9.05}, {t128, 12.92}}},
    {576, 24, 128, 2, {{t16, 16.81}, {t16_pair, 18.39}, {t32, 11.59}, {t32_pair, 11.53}, {t64, 9.21}, {t128, 10.38}}},
    {576, 24, 128, 4, {{t16, 17.23}, {t16_pair, 18.81}, {t32, 12.60}, {t32_pair, 12.68}, {t64, 9.82}, {t128, 10.38}}},
    {576, 24, 128, 5, {{t16, 20.96}, {t16_pair, 23.13}, {t32, 13.87}, {t32_pair, 13.37}, {t64, 10.87}, {t128, 10.84}}},
    {576, 24, 128, 6, {{t16, 20.33}, {t16_pair, 22.54}, {t32, 13.60}, {t32_pair, 13.40}, {t64, 11.23}, {t128, 10.67}}},
    {576, 24, 128, 8, {{t16, 20.60}, {t16_pair, 21.87}, {t32, 14.71}, {t32_pair, 15.40}, {t64, 11.44}, {t128, 10.88}}},
    {576, 24, 256, 4, {{t16, 31.51}, {t16_pair, 32.40}, {t32, 20.42}, {t32_pair, 22.44}, {t64, 16.59}, {t128, 17.95}, {t256, 19.87}}},
    {576, 24, 512, 4, {{t16, 62.79}, {t16_pair, 61.75}, {t32, 37.85}, {t32_pair, 40.62}, {t64, 29.19}, {t128, 28.77}, {t256, 33.39}}},
    {576, 24, 1024, 4, {{t32, 71.83}, {t32_pair, 71.84}, {t64, 51.08}, {t128, 53.21}, {t256, 55.36}}},
    {1792, 64, 16, 2, {{t16, 17.43}, {t32, 19.64}, {t64, 26.95}}},
    {1792, 64, 16, 4, {{t16, 20.87}, {t32, 20.73}, {t64, 30.06}}},
    {1792, 64, 16, 5, {{t16, 25.43}, {t16_pair, 24.11}, {t32, 27.99}, {t32_pair, 27.34}, {t64, 36.43}}},
    {1792, 64, 16, 6, {{t16, 28.67}, {t16_pair, 26.11}, {t32, 31.13}, {t32_pair, 27.76}, {t64, 38.20}}},
    {1792, 64, 16, 8, {{t16, 31.78}, {t16_pair, 32.79}, {t32, 33.70}, {t32_pair, 34.12}, {t64, 39.66}}},
    {1792, 64, 32, 2, {{t16, 31.50}, {t32, 20.42}, {t64, 26.11}}},
    {1792, 64, 32, 4, {{t16, 32.35}, {t32, 22.12}, {t64, 27.94}}},
    {1792, 64, 32, 5, {{t16, 44.47}, {t16_pair, 45.48}, {t32, 29.74}, {t32_pair, 29.19}, {t64, 37.24}, {t128, 58.39}}},
    {1792, 64, 32, 6, {{t16, 46.63}, {t16_pair, 45.98}, {t32, 33.34}, {t32_pair, 29.16}, {t64, 39.30}, {t128, 59.64}}},
    {1792, 64, 32, 8, {{t16, 49.44}, {t16_pair, 57.40}, {t32, 35.47}, {t32_pair, 34.35}, {t64, 39.54}, {t128, 68.43}}},
    {1792, 64, 33, 4, {{t16, 50.69}, {t32, 43.06}, {t64, 26.66}}},
    {1792, 64, 64, 2, {{t16, 56.69}, {t32, 34.81}, {t64, 28.02}, {t128, 58.95}}},
    {1792, 64, 64, 4, {{t32, 37.79}, {t64, 27.58}, {t128, 59.77}}},
    {1792, 64, 64, 5, {{t32, 50.29}, {t32_pair, 53.81}, {t64, 39.62}, {t128, 61.44}}},
    {1792, 64, 64, 6, {{t16_pair, 90.31}, {t32, 53.50}, {t32_pair, 53.79}, {t64, 41.46}, {t128, 62.96}}},
    {1792, 64, 64, 8, {{t16_pair, 90.04}, {t32, 56.45}, {t32_pair, 62.02}, {t64, 42.13}, {t128, 71.74}}},
    {1792, 64, 128, 2, {{t32, 67.61}, {t64, 49.52}, {t128, 51.40}}},
    {1792, 64, 128, 4, {{t32, 74.48}, {t64, 50.20}, {t128, 48.03}}},
    {1792, 64, 128, 5, {{t32, 99.51}, {t32_pair, 101.86}, {t64, 66.27}, {t128, 55.77}}},
    {1792, 64, 128, 6, {{t32, 103.06}, {t32_pair, 106.13}, {t64, 68.27}, {t128, 55.75}}},
    {1792, 64, 128, 8, {{t32, 116.05}, {t32_pair, 107.47}, {t64, 71.09}, {t128, 61.24}, {t256, 132.12}}},
    {1792, 64, 256, 4, {{t32, 152.13}, {t64, 97.85}, {t128, 89.09}, {t256, 97.74}}},
    {1792, 64, 512, 4, {{t32, 287.62}, {t64, 198.35}, {t128, 196.65}, {t256, 175.20}}},
    {1792, 64, 1024, 4, {{t32, 562.61}, {t64, 394.94}, {t128, 376.40}, {t256, 342.65}}},
    {3584, 128, 16, 2, {{t16, 57.36}, {t32, 69.73}, {t64, 95.92}}},
    {3584, 128, 16, 3, {{t16, 67.9}, {t16_pair, 81.5}, {t32, 79.7}, {t32_pair, 91.6}, {t64, 103.0}}},
    {3584, 128, 16, 4, {{t16, 71.53}, {t32, 71.64}, {t64, 106.89}}},
    {3584, 128, 16, 6, {{t16, 99.70}, {t32, 109.38}, {t64, 133.06}}},
    {3584, 128, 32, 2, {{t16, 131.85}, {t32, 70.19}, {t64, 96.44}}},
    {3584, 128, 32, 4, {{t16, 134.62}, {t32, 76.33}, {t64, 102.75}}},
    {3584, 128, 32, 6, {{t16, 202.87}, {t32, 118.51}, {t64, 140.72}}},
    {3584, 128, 64, 4, {{t32, 149.11}, {t64, 103.22}, {t128, 216.12}}},
    {3584, 128, 128, 4, {{t32, 311.96}, {t64, 194.03}, {t128, 171.75}}},
    {3584, 128, 256, 4, {{t32, 576.36}, {t64, 392.27}, {t128, 365.80}, {t256, 315.54}}},
    {3584, 128, 512, 4, {{t32, 1202.38}, {t64, 813.71}, {t128, 705.90}, {t256, 677.07}}},
    {3584, 128, 1024, 4, {{t128, 1526.0}, {t256, 1545.0}}},
};
// clang-format on

TEST(ChooseTile, IsNearTheBestMeasured) {
  constexpr double kSlack = 1.09;
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
