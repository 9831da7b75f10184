#pragma once

#include "base/host_device.h"

namespace qmlp::cuda {

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
