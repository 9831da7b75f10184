#include "cuda/choice.h"

#include <algorithm>
#include <cmath>

#include "base/checked.h"
#include "cuda/rounds.h"

namespace qmlp::cuda {

std::optional<RelayChoice> choose_relay(const StreamShape& shape,
                                        const DeviceFacts& device) noexcept {
  const std::int64_t segments = shape.segments;
  // The warps of a segment without a stage would look for their next one for ever.
  if (shape.num_chunks < segments) return std::nullopt;
  const std::int64_t teams = std::min(ceil_div(shape.num_tiles, std::int64_t{device.num_sms}),
                                      std::max<std::int64_t>(1, kRelayMaxWarps / 2 / segments));
  const std::int64_t chains = teams * segments;
  const std::int64_t stages = ceil_div(ceil_div(shape.num_chunks, segments), kStreamStageChunks);
  const std::int64_t legs = std::min(
      {std::int64_t{kRelayMaxLegs}, kRelayMaxWarps / chains, std::max<std::int64_t>(1, stages)});
  RelayChoice choice{};
  choice.legs = static_cast<int>(legs);
  choice.warps = static_cast<int>(chains * legs);
  choice.grid =
      static_cast<int>(std::min(ceil_div(shape.num_tiles, teams), std::int64_t{device.num_sms}));
  choice.stages = static_cast<int>(std::clamp<std::int64_t>(ceil_div(stages, legs), 1, 3));
  const std::size_t stage_bytes = static_cast<std::size_t>(kStreamStageChunks) *
                                  static_cast<std::size_t>(shape.format.chunk_bytes());
  const std::size_t sums = static_cast<std::size_t>(chains) * (segments > 1 ? 3 : 1) * 512;
  for (; choice.stages > 0; --choice.stages) {
    choice.shared_bytes =
        static_cast<std::size_t>(choice.warps * choice.stages) * (stage_bytes + 8) + 128 +
        shape.x_bytes + sums;
    if (choice.shared_bytes + kStaticSharedBytes <= device.smem_bytes) return choice;
  }
  return std::nullopt;
}

bool prefers_relay(std::int64_t num_tiles, std::int64_t num_chunks, int segments,
                   const DeviceFacts& device) noexcept {
  const std::int64_t chains = ceil_div(num_tiles, std::int64_t{device.num_sms});
  return segments == 1 && chains <= 2 && num_chunks >= 64 * chains &&
         num_chunks % kStreamStageChunks == 0;
}

StreamChoice choose_stream(const StreamShape& shape, const DeviceFacts& device) noexcept {
  const int segments = shape.segments;
  StreamChoice choice{};
  choice.stage_chunks = kStreamStageChunks;
  // Rings with their barriers, and the exchange of segments' sums, 16 bytes a lane, twice.
  const auto bytes = [&](int warps, int stages) {
    const auto stage = static_cast<std::size_t>(choice.stage_chunks) *
                       static_cast<std::size_t>(shape.format.chunk_bytes());
    const std::size_t exchange =
        segments > 1 ? 2 * 512 * static_cast<std::size_t>(shape.token_blocks) : 0;
    return static_cast<std::size_t>(warps) *
               (static_cast<std::size_t>(stages) * (stage + 8) + exchange) +
           128;
  };
  const std::size_t room = device.smem_bytes - shape.x_bytes - kStaticSharedBytes;
  const std::int64_t sms = device.num_sms;
  const std::int64_t streams = shape.num_tiles * segments;
  const auto stream_stages =
      static_cast<int>(ceil_div(shape.num_chunks, std::int64_t{kStreamStageChunks} * segments));
  const bool bytes_bind = streams > 8 * sms;
  if (bytes_bind) {
    // Every SM busy, with as many warps as hide each other's latencies.
    choice.warps = 16;
    choice.stages = 2;
  } else if (streams > 4 * sms) {
    choice.warps = 8;
    choice.stages = 3;
  } else {
    // One chain of sums binds: few CTAs, small ones.
    choice.warps = std::max(4, segments);
    choice.stages = std::clamp(stream_stages + 1, 2, 4);
  }
  if (shape.fixed_stages != 0) {
    choice.stages = shape.fixed_stages;
  } else {
    while (choice.stages > 2 && bytes(choice.warps, choice.stages) > room) --choice.stages;
  }
  while (choice.warps > segments && bytes(choice.warps, choice.stages) > room) {
    choice.warps -= segments;
  }
  while (choice.stages > 1 && shape.fixed_stages == 0 &&
         bytes(choice.warps, choice.stages) > room) {
    --choice.stages;
  }
  while (choice.stage_chunks > 1 && bytes(choice.warps, choice.stages) > room) {
    choice.stage_chunks /= 2;
  }
  std::int64_t teams = choice.warps / segments;
  if (bytes_bind && choice.warps < 16) {
    // Whole rounds: a last one of few tiles takes as long as the others.
    teams = ceil_div(shape.num_tiles, sms * ceil_div(shape.num_tiles, sms * teams));
    choice.warps = static_cast<int>(teams) * segments;
    while (shape.fixed_stages == 0 && choice.stages < 3 &&
           bytes(choice.warps, choice.stages + 1) <= room) {
      ++choice.stages;
    }
  }
  choice.grid = static_cast<int>(std::min(ceil_div(shape.num_tiles, teams), sms));
  // CTAs that find no free SM beside the kernel before begin when it has ended, and then x, which
  // all sums wait for, must not stand behind every stage of every ring. Rings without bulk copies
  // belong to kernels that never begin before.
  const bool x_first = shape.fixed_stages == 0 && choice.grid * 4 > sms * 3;
  choice.first_stages = x_first ? 1 : choice.stages;
  choice.shared_bytes = bytes(choice.warps, choice.stages) + shape.x_bytes;
  // One to an SM: the next kernel's CTAs then take the SMs that this one leaves free, where two
  // chains would slow each other.
  if (!bytes_bind) choice.shared_bytes = std::max(choice.shared_bytes, device.smem_bytes / 2);
  return choice;
}

namespace {

constexpr std::int64_t kUnitTiles = 4;  // of a tile kernel's warpgroup

// A model of a CTA's time in SM cycles: rounds of up to `groups` units, each chunk of a round bound
// by one warpgroup's latency or by what the SM's units share, and an epilogue a round. Fitted to an
// H200.
struct TileModel {
  TileConfig config;
  std::int64_t tokens, groups, ctas;
  std::int64_t latency, unit_cycles, epilogue;
};
constexpr TileModel kTileModels[] = {
    {TileConfig::t16, 16, 4, 1, 180, 130, 400},   {TileConfig::t16_pair, 16, 2, 2, 185, 125, 1000},
    {TileConfig::t32, 32, 4, 1, 205, 140, 800},   {TileConfig::t32_pair, 32, 2, 2, 245, 150, 950},
    {TileConfig::t64, 64, 4, 1, 240, 200, 1500},  {TileConfig::t128, 128, 2, 1, 355, 335, 2600},
    {TileConfig::t256, 256, 2, 1, 670, 645, 6000}};
constexpr int kStart = 5400, kStartBeside = 3400;  // where the kernel before leaves room, less
// Chunks of the longest stream that two CTAs an SM take: their rings are shallow, but so are those
// of one CTA's four warpgroups where codes are wide.
constexpr std::int64_t kPairStream = 32, kPairStreamWide = 64;

// Of wide codes even four rings of one CTA are shallow, and wait longer; seen up to 32 tokens.
constexpr std::int64_t kLongStream = 32;

// The units of each round of a CTA, given to `take`.
template <class Take>
void for_rounds(std::int64_t groups, int units, int blocks, GridPlace place, Take take) noexcept {
  const auto each = [&](auto rounds) {
    for (; !rounds.done(); rounds.next()) take(rounds.size());
  };
  return groups == 4 ? each(UnitRounds<4>::of_cta(units, blocks, place))
                     : each(UnitRounds<2>::of_cta(units, blocks, place));
}

double tile_cost(const TileModel& model, const TileShape& shape, std::int64_t sms) noexcept {
  const std::int64_t units = ceil_div(shape.num_tiles, kUnitTiles);
  const std::int64_t blocks = ceil_div(shape.M, model.tokens), total = units * blocks;
  const std::int64_t grid = std::min(total, sms * model.ctas);
  const std::int64_t beside = grid > sms ? model.ctas : 1;  // CTAs of this kernel on an SM
  const bool waits_longer =
      shape.bits > 4 && shape.num_chunks > kLongStream && model.ctas == 1 && model.tokens <= 32;
  const std::int64_t unit_cycles = model.unit_cycles * (waits_longer ? 11 : 10) / 10;
  const auto round = [&](std::int64_t active) {
    const std::int64_t chunk = std::max(model.latency, active * beside * unit_cycles);
    return active == 0 ? 0.0 : static_cast<double>(shape.num_chunks * chunk + model.epilogue);
  };
  const bool next_fits = model.ctas > 1 || grid <= sms / 2;
  // CTAs of one unit more come first, on SMs that the kernel before has left.
  const std::int64_t least = total / grid, more = total % grid;
  const auto start = [&](bool is_first) { return next_fits || is_first ? kStartBeside : kStart; };
  double cost = 0.0;
  if (least < 2 * model.groups) {
    // Few rounds: those that begin one block of tokens and end another count.
    for (int cta = 0; cta < grid; ++cta) {
      double cycles = start(cta < more);
      for_rounds(model.groups, static_cast<int>(units), static_cast<int>(blocks),
                 {cta, static_cast<int>(grid)}, [&](int size) { cycles += round(size); });
      cost = std::max(cost, cycles);
    }
  } else {
    const auto cycles_of = [&](std::int64_t count) {
      const std::int64_t whole_rounds = count / model.groups;
      return static_cast<double>(whole_rounds) * round(model.groups) + round(count % model.groups);
    };
    cost = cycles_of(least) + start(false);
    if (more != 0) cost = std::max(cost, cycles_of(least + 1) + start(true));
  }
  return cost;
}

// The same for K of several segments. Apart, there are as many units more, of fewer chunks, and a
// kernel that adds their sums; a sequence is t128 with half its ring of x, so that a CTA of one
// unit waits for x, and with a stop for each segment.
struct SplitModel {
  TileConfig config;
  std::int64_t tokens, groups;
  std::int64_t latency, unit_cycles, epilogue;
};
constexpr SplitModel kApartModels[] = {{TileConfig::t32, 32, 4, 200, 145, 500},
                                       {TileConfig::t64, 64, 4, 240, 220, 700},
                                       {TileConfig::t128, 128, 2, 320, 370, 1200}};
constexpr SplitModel kSequenceModel = {TileConfig::t128_sequence, 128, 2, 560, 370, 2200};
constexpr std::int64_t kSegmentStop = 300;  // cycles
constexpr double kCombine = 2000.0;
constexpr double kPartialBytesACycle = 2600.0;  // written and read again

// Units of a round and the rounds of the busiest CTA.
struct RoundShape {
  std::int64_t units;
  double rounds, cycles;  // of a chunk of all of them
};
RoundShape round_shape(const SplitModel& model, std::int64_t most, std::int64_t units,
                       std::int64_t blocks, std::int64_t sms) noexcept {
  RoundShape best{};
  for (std::int64_t n = 1; n <= most; ++n) {
    const double all = static_cast<double>(ceil_div(units, n)) * static_cast<double>(blocks);
    const double rounds = std::ceil(all / static_cast<double>(sms));
    const double cycles =
        rounds * static_cast<double>(std::max(model.latency, n * model.unit_cycles));
    if (best.units == 0 || cycles < best.cycles ||
        (cycles == best.cycles && rounds < best.rounds)) {
      best = {n, rounds, cycles};
    }
  }
  return best;
}

TileConfig choose_split_tile(std::int64_t M, std::int64_t num_tiles, std::int64_t num_chunks,
                             int segments, const DeviceFacts& device) noexcept {
  const std::int64_t units = ceil_div(num_tiles, kUnitTiles), sms = device.num_sms;
  const RoundShape sequence = round_shape(kSequenceModel, kSequenceModel.groups, units,
                                          ceil_div(M, kSequenceModel.tokens), sms);
  TileConfig best = kSequenceModel.config;
  double least =
      static_cast<double>(num_chunks) * sequence.cycles +
      sequence.rounds * static_cast<double>(kSequenceModel.epilogue + segments * kSegmentStop);
  for (const SplitModel& model : kApartModels) {
    const RoundShape shape =
        round_shape(model, model.groups, units, ceil_div(M, model.tokens) * segments, sms);
    const double partials =
        2.0 * static_cast<double>(M) * static_cast<double>(partial_row_bytes(num_tiles, segments));
    const double cost =
        static_cast<double>(ceil_div(num_chunks, std::int64_t{segments})) * shape.cycles +
        shape.rounds * static_cast<double>(model.epilogue) + kCombine +
        partials / kPartialBytesACycle;
    if (cost < least) {
      least = cost;
      best = model.config;
    }
  }
  return best;
}

}  // namespace

int choose_round_units(int tokens, int most, std::int64_t units, std::int64_t blocks,
                       const DeviceFacts& device) noexcept {
  for (const SplitModel& model : kApartModels) {
    if (model.tokens != tokens) continue;
    return static_cast<int>(round_shape(model, most, units, blocks, device.num_sms).units);
  }
  return 1;
}

TileConfig choose_tile(const TileShape& shape, const DeviceFacts& device) noexcept {
  const auto [M, num_tiles, num_chunks, segments, bits] = shape;
  if (segments > 1) return choose_split_tile(M, num_tiles, num_chunks, segments, device);
  const std::int64_t sms = device.num_sms;
  const std::int64_t longest_pair = bits == 0 ? 0 : bits > 4 ? kPairStreamWide : kPairStream;
  const TileModel* best = nullptr;
  double least = 0.0;
  for (const TileModel& model : kTileModels) {
    const std::int64_t total = ceil_div(num_tiles, kUnitTiles) * ceil_div(M, model.tokens);
    if (model.ctas > 1 && (num_chunks > longest_pair || total <= sms / 2)) continue;
    const double cost = tile_cost(model, shape, sms);
    if (best == nullptr || cost < least) {
      best = &model;
      least = cost;
    }
  }
  return best->config;
}

}  // namespace qmlp::cuda
