// How K of several segments is shared out among CTAs that are not here.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "cuda/choice.h"
#include "cuda/rounds.h"

namespace qmlp::cuda {
namespace {

DeviceFacts device_of(int num_sms) {
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.num_sms = num_sms;
  facts.smem_bytes = 232448;
  return facts;
}

// Every unit of every block once, in rounds that a CTA's warpgroups can take, no CTA with more
// rounds than even shares need, and those that are left over with the first CTAs.
TEST(PieceRounds, TakeEveryUnitOnceInEvenShares) {
  for (const int units : {1, 2, 3, 16, 24, 33, 64, 127, 128, 2004}) {
    for (const int blocks : {1, 2, 4, 7, 8, 64}) {
      for (const int sms : {1, 7, 78, 132}) {
        for (const int most : {1, 2, 3, 4}) {
          const int pieces = (units + most - 1) / most;
          const auto shares = static_cast<unsigned>(std::min(pieces * blocks, sms));
          const int even = (pieces * blocks + sms - 1) / sms;
          std::set<std::pair<int, int>> taken;
          int rounds_before = even;
          for (unsigned share = 0; share < shares; ++share) {
            int rounds = 0;
            for (auto round = PieceRounds::of_share(units, pieces, blocks, share, shares);
                 !round.done(); round.next(), ++rounds) {
              ASSERT_GE(round.size(), 1);
              ASSERT_LE(round.size(), most);
              ASSERT_LT(round.block, blocks);
              ASSERT_LE(round.unit + round.size(), units);
              for (int i = 0; i < round.size(); ++i) {
                ASSERT_TRUE(taken.emplace(round.block, round.unit + i).second)
                    << "block " << round.block << ", unit " << round.unit + i << " twice";
              }
            }
            ASSERT_GE(rounds, 1);
            ASSERT_LE(rounds, rounds_before);
            rounds_before = rounds;
          }
          ASSERT_EQ(taken.size(), static_cast<std::size_t>(units) * static_cast<unsigned>(blocks))
              << units << " units, " << blocks << " blocks, " << sms << " SMs, pieces of " << most;
        }
      }
    }
  }
}

// The same of the instances that do not cut K: units in order, rounds within a block of tokens.
TEST(UnitRounds, TakeEveryUnitOnceInEvenShares) {
  for (const int units : {1, 2, 3, 9, 24, 144, 448, 2004}) {
    for (const int blocks : {1, 2, 5, 16}) {
      for (const int sms : {1, 7, 132, 264}) {
        const int ctas = std::min(units * blocks, sms);
        int next = 0, most_before = units * blocks;
        for (int cta = 0; cta < ctas; ++cta) {
          int own = 0;
          for (auto round = UnitRounds<4>::of_cta(units, blocks, GridPlace{cta, ctas});
               !round.done(); round.next()) {
            ASSERT_GE(round.size(), 1);
            ASSERT_LE(round.size(), 4);
            ASSERT_EQ(round.block * units + round.unit, next);
            ASSERT_LE(round.unit + round.size(), units);
            next += round.size();
            own += round.size();
          }
          ASSERT_LE(own, most_before);
          ASSERT_GE(own, units * blocks / ctas);
          most_before = own;
        }
        ASSERT_EQ(next, units * blocks) << units << " units, " << blocks << " blocks, " << sms;
      }
    }
  }
}

// 64 units of four segments on 132 SMs: one round of two, not two of one for some.
TEST(ChooseRoundUnits, PrefersOneRound) {
  const DeviceFacts h200 = device_of(132);
  EXPECT_EQ(choose_round_units(32, 4, 64, 2, h200), 1);
  EXPECT_EQ(choose_round_units(32, 4, 64, 4, h200), 2);
  EXPECT_EQ(choose_round_units(32, 4, 64, 8, h200), 4);
  EXPECT_EQ(choose_round_units(128, 2, 64, 8, h200), 2);
  EXPECT_EQ(choose_round_units(64, 4, 16, 4, h200), 1);
  for (const int tokens : {32, 64, 128}) {
    for (const int most : {1, 2, 4}) {
      for (const int units : {1, 5, 64, 2004}) {
        for (const int blocks : {1, 8, 100}) {
          const int n = choose_round_units(tokens, most, units, blocks, h200);
          ASSERT_GE(n, 1);
          ASSERT_LE(n, most);
        }
      }
    }
  }
}

// Microseconds on an H200 (132 SMs) of linears of 4 bits, group 64, bf16, cold weights. Apart,
// shares were not cut by whole rounds then, which costs some rows up to a fifth.
struct Measured {
  std::int64_t N, K;
  int segments;
  std::int64_t M;
  std::map<TileConfig, double> us;
};
using enum TileConfig;
const Measured kMeasured[] = {
    {4096, 14336, 2, 16, {{t32, 22.79}, {t64, 34.97}, {t128, 53.86}, {t128_sequence, 93.82}}},
    {4096, 14336, 2, 64, {{t32, 28.00}, {t64, 25.82}, {t128, 44.12}, {t128_sequence, 57.93}}},
    {4096, 14336, 2, 128, {{t32, 44.66}, {t64, 34.65}, {t128, 37.36}, {t128_sequence, 64.46}}},
    {4096, 14336, 2, 256, {{t32, 82.45}, {t64, 55.68}, {t128, 52.82}, {t128_sequence, 70.86}}},
    {4096, 14336, 2, 512, {{t32, 158.7}, {t64, 110.2}, {t128, 107.7}, {t128_sequence, 83.83}}},
    {4096, 14336, 4, 16, {{t32, 16.71}, {t64, 21.52}, {t128, 33.27}, {t128_sequence, 93.30}}},
    {4096, 14336, 4, 32, {{t32, 18.50}, {t64, 22.32}, {t128, 32.14}, {t128_sequence, 77.62}}},
    {4096, 14336, 4, 64, {{t32, 26.75}, {t64, 21.63}, {t128, 30.67}, {t128_sequence, 59.31}}},
    {4096, 14336, 4, 128, {{t32, 43.24}, {t64, 32.49}, {t128, 29.62}, {t128_sequence, 66.24}}},
    {4096, 14336, 4, 256, {{t32, 83.78}, {t64, 59.70}, {t128, 55.60}, {t128_sequence, 72.37}}},
    {4096, 14336, 4, 512, {{t32, 164.7}, {t64, 120.4}, {t128, 109.1}, {t128_sequence, 85.57}}},
    {4096, 14336, 8, 16, {{t32, 17.28}, {t64, 19.46}, {t128, 34.91}, {t128_sequence, 92.95}}},
    {4096, 14336, 8, 64, {{t32, 27.87}, {t64, 22.61}, {t128, 30.28}, {t128_sequence, 68.55}}},
    {4096, 14336, 8, 256, {{t32, 93.28}, {t64, 65.77}, {t128, 63.16}, {t128_sequence, 79.64}}},
    {4096, 14336, 8, 512, {{t32, 204.1}, {t64, 136.1}, {t128, 128.8}, {t128_sequence, 94.41}}},
    {4096, 4096, 4, 16, {{t32, 7.18}, {t64, 8.15}, {t128, 12.68}, {t128_sequence, 25.81}}},
    {4096, 4096, 4, 32, {{t32, 8.41}, {t64, 10.63}, {t128, 12.90}, {t128_sequence, 23.97}}},
    {4096, 4096, 4, 64, {{t32, 11.83}, {t64, 9.93}, {t128, 12.75}, {t128_sequence, 21.12}}},
    {4096, 4096, 4, 128, {{t32, 16.53}, {t64, 14.46}, {t128, 12.92}, {t128_sequence, 19.18}}},
    {4096, 4096, 4, 256, {{t32, 29.45}, {t64, 23.66}, {t128, 20.88}, {t128_sequence, 20.64}}},
    {4096, 4096, 4, 512, {{t32, 56.66}, {t64, 44.23}, {t128, 40.45}, {t128_sequence, 29.14}}},
    {4096, 4096, 4, 1024, {{t32, 113.4}, {t64, 88.11}, {t128, 81.44}, {t128_sequence, 56.18}}},
    {1024, 4096, 4, 16, {{t32, 5.08}, {t64, 5.53}, {t128, 7.79}, {t128_sequence, 16.37}}},
    {1024, 4096, 4, 64, {{t32, 6.07}, {t64, 5.85}, {t128, 7.22}, {t128_sequence, 17.68}}},
    {1024, 4096, 4, 128, {{t32, 9.62}, {t64, 7.72}, {t128, 8.09}, {t128_sequence, 19.30}}},
    {1024, 4096, 4, 512, {{t32, 18.00}, {t64, 14.63}, {t128, 14.48}, {t128_sequence, 19.11}}},
    {1024, 4096, 8, 64, {{t32, 6.47}, {t64, 5.81}, {t128, 8.18}, {t128_sequence, 20.97}}},
    {1024, 4096, 8, 512, {{t32, 19.99}, {t64, 16.44}, {t128, 15.98}, {t128_sequence, 22.38}}},
};

TEST(ChooseSplitTile, IsNearTheBestMeasured) {
  constexpr double kSlack = 1.12;
  for (const Measured& row : kMeasured) {
    const TileConfig chosen = choose_tile(
        {row.M, tiles_of(row.N, false), row.K / kChunkK, row.segments, 4}, device_of(132));
    double best = 1e9;
    for (const auto& [config, us] : row.us) best = std::min(best, us);
    const auto found = row.us.find(chosen);
    ASSERT_NE(found, row.us.end()) << static_cast<int>(chosen);
    EXPECT_LE(found->second, kSlack * best)
        << "config " << static_cast<int>(chosen) << ": N " << row.N << ", K " << row.K
        << ", segments " << row.segments << ", M " << row.M;
  }
}

// Scratch for sums of segments grows with M up to a bound, never shrinks, and holds every launch.
TEST(PartialBytes, GrowToABound) {
  for (const std::int64_t tiles : {1, 64, 256, 8016, 131072}) {
    EXPECT_EQ(partial_bytes(1024, tiles, 1), 0u);
    for (const int segments : {2, 4, 8}) {
      std::size_t before = 0;
      for (std::int64_t M = 1; M < 100000; M += M < 300 ? 1 : 997) {
        const std::int64_t rows = partial_rows(M, tiles, segments);
        ASSERT_GE(rows, std::min<std::int64_t>(M, 128));
        ASSERT_LE(rows, M);
        // Blocks of 8 rows of the first and the last launch, four sums a lane, a warp a tile.
        const auto blocks = static_cast<std::size_t>((rows + 7) / 8);
        const std::size_t bytes = partial_bytes(M, tiles, segments);
        ASSERT_EQ(bytes, blocks * static_cast<std::size_t>(tiles * segments) * 32 * 16);
        ASSERT_GE(bytes, before);
        ASSERT_LE(bytes,
                  std::max(std::size_t{32} << 20,
                           static_cast<std::size_t>(128 * partial_row_bytes(tiles, segments))));
        ASSERT_LE(blocks, 65535u);  // of a grid
        before = bytes;
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::cuda
