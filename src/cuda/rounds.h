#pragma once

#include "base/host_device.h"

namespace qmlp::cuda {

// A CTA of a grid, for code that runs on a CPU.
struct GridPlace {
  int cta, ctas;
  int index() const { return cta; }
  int size() const { return ctas; }
};

// A CTA's even share of all units in the order (token block, unit), cut into rounds: neighbouring
// units of one token block, one for each of kGroups warpgroups. CTAs that read the same weights do
// it at about the same time. The first CTAs have what is left over: they begin first, on SMs that
// the kernel before has left. `grid` says which CTA of how many: index() and size().
template <int kGroups>
struct UnitRounds {
  int units;  // of a token block
  int at, end, unit, block;

  template <class Grid>
  QMLP_HOST_DEVICE static UnitRounds of_cta(int units, int blocks, Grid grid) {
    const int total = units * blocks, cta = grid.index();
    const int share = total / grid.size(), more = total - share * grid.size();
    UnitRounds rounds;
    rounds.units = units;
    rounds.at = cta * share + (cta < more ? cta : more);
    rounds.end = rounds.at + share + (cta < more ? 1 : 0);
    rounds.block = rounds.at / units;
    rounds.unit = rounds.at - rounds.block * units;
    return rounds;
  }
  QMLP_HOST_DEVICE bool done() const { return at >= end; }
  QMLP_HOST_DEVICE int size() const {
    const int most = units - unit < end - at ? units - unit : end - at;
    return most < kGroups ? most : kGroups;
  }
  QMLP_HOST_DEVICE void next() {
    const int n = size();
    at += n;
    unit += n;
    if (unit == units) unit = 0, ++block;
  }
};

// Which units a CTA of the tile kernels takes where segments of K are summed apart: every block,
// the units that share rows and segment of x, is cut into `pieces` rounds of neighbouring units, as
// even as they can be, and CTAs share the rounds of all blocks out, the first ones one more where
// some are left over: they begin first. So no CTA needs two rounds for what others do in one, as it
// would where its units end one block and begin the next.
struct PieceRounds {
  int units, pieces;  // of a block
  int at, end;        // rounds of all blocks
  int block, piece, unit, unit_end;

  // 1 <= pieces <= units.
  QMLP_HOST_DEVICE static PieceRounds of_share(int units, int pieces, int blocks, unsigned share,
                                               unsigned shares) {
    const long long total = static_cast<long long>(pieces) * blocks;
    PieceRounds rounds = {};
    rounds.units = units;
    rounds.pieces = pieces;
    const auto least = static_cast<int>(total / shares), more = static_cast<int>(total % shares);
    const auto cta = static_cast<int>(share);
    rounds.at = cta * least + (cta < more ? cta : more);
    rounds.end = rounds.at + least + (cta < more ? 1 : 0);
    rounds.block = rounds.at / pieces;
    rounds.piece = rounds.at - rounds.block * pieces;
    rounds.find_units();
    return rounds;
  }
  QMLP_HOST_DEVICE bool done() const { return at >= end; }
  QMLP_HOST_DEVICE int size() const { return unit_end - unit; }
  QMLP_HOST_DEVICE void next() {
    ++at;
    if (++piece == pieces) piece = 0, ++block;
    find_units();
  }

 private:
  QMLP_HOST_DEVICE void find_units() {
    unit = static_cast<int>(static_cast<long long>(units) * piece / pieces);
    unit_end = static_cast<int>(static_cast<long long>(units) * (piece + 1) / pieces);
  }
};

}  // namespace qmlp::cuda
