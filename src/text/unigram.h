#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp::text {

// SentencePiece's unigram model: the pieces of a word whose scores add up to the most. Built once,
// then immutable.
class Unigram {
 public:
  static constexpr std::int32_t kNone = -1;

  struct Token {
    std::string_view text;
    double score = 0.0;
    std::int32_t id = 0;
    bool usable = true;  // false: text never becomes this token
  };
  struct Parts {
    std::vector<Token> tokens;
    std::int32_t unknown_id = kNone;  // required
    std::int32_t byte_ids[256];       // what unknown characters fall back to, kNone without
  };
  static Result<Unigram> build(const Parts& parts);

  // Working memory of one thread.
  class Scratch {
   private:
    friend class Unigram;
    struct Node {
      double score;
      std::int32_t begin;  // where the best last piece begins, kNone before any is known
      std::int32_t id;
    };
    std::vector<Node> nodes_;
    std::vector<std::int32_t> reversed_;
  };

  // Appends the tokens of one word of valid UTF-8. Of equal paths the one found first from the
  // left is kept, as in Hugging Face's tokenizers. O(n) in the word's length times the longest
  // token's.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

 private:
  struct Slot {
    std::uint64_t key;  // of a node and the byte that leads on from it
    std::int32_t node;
  };
  std::int32_t child(std::int32_t node, char byte) const noexcept;
  void add_unknown(std::string_view text, std::vector<std::int32_t>& reversed) const;

  std::vector<Slot> slots_;  // open addressing, a power of two
  int shift_ = 0;
  std::vector<std::int32_t> ids_;  // by node, kNone where no token ends
  std::vector<double> scores_;     // by node
  double unknown_score_ = 0.0;
  std::int32_t unknown_id_ = kNone;
  std::int32_t byte_ids_[256] = {};
};

}  // namespace qmlp::text
