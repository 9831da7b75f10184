#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qmlp::text {

// Byte-pair merges over token ids. Words are bytes (byte-level tokenizers) or UTF-8 characters
// (SentencePiece's). Built once, then immutable.
class Bpe {
 public:
  struct Merge {
    std::int32_t left;
    std::int32_t right;
    std::int32_t result;
  };
  static constexpr std::int32_t kNone = -1;

  struct Parts {
    std::vector<Merge> merges;  // best first; of a repeated pair the last counts
    // The rank of each merge where several share one; empty: its place in `merges`.
    std::vector<std::uint32_t> ranks;
    // Of bytes that stand for themselves; with characters, of the tokens that a character without
    // one falls back to, byte by byte. kNone where the vocabulary lacks a byte.
    std::int32_t byte_ids[256];
    bool of_characters = false;
    std::vector<std::pair<char32_t, std::int32_t>> characters;
    std::int32_t unknown_id = kNone;  // stands for what the vocabulary lacks; kNone drops it
    bool fuse_unknown = false;        // one unknown_id for a run of such bytes or characters
    // No merge joins U+2581, a word's start, to another character before it.
    bool words_apart = false;
  };
  explicit Bpe(const Parts& parts);

  // Working memory of one thread.
  class Scratch {
   private:
    friend class Bpe;
    struct Symbol {
      std::int32_t id;
      std::int32_t previous;
      std::int32_t next;
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t at;
      std::int32_t left;
      std::int32_t right;
    };
    std::vector<std::int32_t> ids_;
    std::vector<Symbol> symbols_;
    std::vector<Candidate> queue_;
  };

  // Appends the tokens of one word: starts from its bytes or characters and merges the best-ranked
  // pair, the leftmost of equals, until none is left. O(n log n) in the word's length.
  void encode_word(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

 private:
  struct Slot {
    std::uint64_t pair;
    std::uint32_t rank;
    std::int32_t result;
  };
  struct CharacterSlot {
    char32_t code;
    std::int32_t id;
  };

  const Slot* find(std::int32_t left, std::int32_t right) const noexcept;
  std::int32_t find_character(char32_t code) const noexcept;
  void start_bytes(std::string_view word, std::vector<std::int32_t>& ids) const;
  void start_characters(std::string_view word, std::vector<std::int32_t>& ids) const;
  void encode_part(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  std::vector<Slot> slots_;  // open addressing, a power of two
  int shift_ = 0;
  std::vector<CharacterSlot> characters_;  // likewise
  int character_shift_ = 0;
  std::int32_t byte_ids_[256];
  bool of_characters_;
  bool words_apart_;
  std::int32_t unknown_id_;
  bool fuse_unknown_;
};

}  // namespace qmlp::text
