#include "convert/sentencepiece_merges.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>

namespace qmlp {
namespace {

struct Candidate {
  double score = 0.0;
  std::size_t left_characters = 0;
  std::size_t right_characters = 0;
  std::int64_t piece_id = 0;
  std::int64_t left_id = 0;
  std::int64_t right_id = 0;
  PieceMerge merge;
};

bool before(const Candidate& a, const Candidate& b) {
  return std::tie(b.score, b.left_characters, b.right_characters, a.piece_id, a.left_id,
                  a.right_id) < std::tie(a.score, a.left_characters, a.right_characters, b.piece_id,
                                         b.left_id, b.right_id);
}

bool begins_character(char c) { return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u; }

}  // namespace

std::vector<PieceMerge> sentencepiece_merges(const std::vector<ScoredPiece>& pieces) {
  std::unordered_map<std::string_view, std::int64_t> ids;
  for (const ScoredPiece& piece : pieces) ids.emplace(piece.text, piece.id);
  std::vector<Candidate> candidates;
  for (const ScoredPiece& piece : pieces) {
    const auto characters = static_cast<std::size_t>(
        std::count_if(piece.text.begin(), piece.text.end(), begins_character));
    if (characters > kMaxPieceCharacters) continue;
    std::size_t left_characters = 0;
    for (std::size_t cut = 1; cut < piece.text.size(); ++cut) {
      if (!begins_character(piece.text[cut])) continue;
      ++left_characters;
      const PieceMerge merge{piece.text.substr(0, cut), piece.text.substr(cut)};
      const auto left = ids.find(merge.left);
      if (left == ids.end()) continue;
      const auto right = ids.find(merge.right);
      if (right == ids.end()) continue;
      candidates.push_back({piece.score, left_characters, characters - left_characters, piece.id,
                            left->second, right->second, merge});
    }
  }
  std::sort(candidates.begin(), candidates.end(), before);
  std::vector<PieceMerge> out;
  out.reserve(candidates.size());
  for (const Candidate& candidate : candidates) out.push_back(candidate.merge);
  return out;
}

}  // namespace qmlp
