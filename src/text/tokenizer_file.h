#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qmlp/status.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/decoder.h"
#include "text/normalizer.h"
#include "text/pretokenizer.h"
#include "text/unigram.h"
#include "text/vocabulary.h"

namespace qmlp::text {

// What tokenizer.json says, in the order in which text passes through it.
struct TokenizerFile {
  AddedTokenMatcher raw_tokens;         // looked for in the text as it comes
  Normalizer normalizer;                // then the text between them is normalized
  AddedTokenMatcher normalized_tokens;  // and these are looked for
  AddedTokenMatcher all_tokens;         // both kinds, for the text of a chat template
  PreTokenizer pre_tokenizer;
  bool ignore_merges = false;      // a word that is a token is not made by merges
  std::unique_ptr<const Bpe> bpe;  // one of the two
  std::unique_ptr<const Unigram> unigram;
  Vocabulary vocabulary;
  // Added tokens whose text differs in normalized text, by id: a decoder gets that form.
  std::vector<std::pair<std::int32_t, std::string>> normalized_texts;
  Decoder decoder;
  std::vector<std::int32_t> before;  // what the post-processor puts around a text
  std::vector<std::int32_t> after;
  bool has_post_processor = false;

  // What a token of the vocabulary adds to a text; `first`: the text starts with it.
  std::string token_bytes(std::int32_t id, bool first) const;
};

// Reads the text of a tokenizer.json; messages begin with `name`. What is not understood is
// refused by name. `more`: added tokens that another file names.
Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name,
                                           std::span<const AddedToken> more = {});

}  // namespace qmlp::text
