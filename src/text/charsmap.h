#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"
#include "text/regex.h"

namespace qmlp::text {

// SentencePiece's compiled normalization rules: a double-array trie (darts-clone) from characters,
// or short sequences of them, to what replaces them.
class CharsMap {
 public:
  // Of the bytes of a model's normalizer_spec.precompiled_charsmap.
  static Result<CharsMap> read(std::string_view bytes);
  // Of the same in base64, as tokenizer.json has it.
  static Result<CharsMap> read_base64(std::string_view text);

  // Replaces what the rules say, as Hugging Face's tokenizers do: grapheme by grapheme. Valid
  // UTF-8 in and out; replacements that are none are refused when read.
  Status normalize(std::string& text, RegexScratch& scratch) const;
  // The same as SentencePiece itself does: the longest entry at each place.
  void normalize_longest(std::string& text) const;

 private:
  struct Entry {
    std::string_view replacement;
    std::size_t length;  // of what is replaced
  };
  // The shortest or longest entry that the text begins with.
  std::optional<Entry> find(std::string_view text, bool longest) const noexcept;

  std::vector<std::uint32_t> trie_;
  std::string replacements_;  // each ends in a zero byte
  std::optional<Regex> grapheme_;
};

}  // namespace qmlp::text
