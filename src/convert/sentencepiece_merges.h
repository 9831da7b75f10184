#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace qmlp {

// A piece that takes part in merges.
struct ScoredPiece {
  std::string_view text;  // UTF-8
  std::int64_t id = 0;
  double score = 0.0;
};

// One step of a BPE: left and right become one piece.
struct PieceMerge {
  std::string_view left;
  std::string_view right;
};

// The longest piece, in characters, that merges are looked for.
inline constexpr std::size_t kMaxPieceCharacters = 256;

// The merges whose order gives what SentencePiece's BPE does with these pieces, which always joins
// the two neighbours whose union has the best score: each way to put a piece together of two
// others, by falling score. Of equal scores the longer left part comes first, then the longer right
// one, as in Hugging Face's converter; pieces are in order of their ids.
std::vector<PieceMerge> sentencepiece_merges(const std::vector<ScoredPiece>& pieces);

}  // namespace qmlp
