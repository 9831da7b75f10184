#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"
#include "text/vocabulary.h"

namespace qmlp::text {

// What tokenizer.json says, in the order in which text passes through it.
struct TokenizerFile {
  AddedTokenMatcher raw_tokens;         // looked for in the text as it comes
  bool nfc = false;                     // then the text between them is normalized
  AddedTokenMatcher normalized_tokens;  // and these are looked for
  AddedTokenMatcher all_tokens;         // both kinds, for the text of a chat template
  PreTokenizer pre_tokenizer;
  bool ignore_merges = false;  // a word that is a token is not made by merges
  std::unique_ptr<const Bpe> bpe;
  Vocabulary vocabulary;
};

// Reads the text of a tokenizer.json; messages begin with `name`. Everything that is not
// byte-level BPE as it is understood here is refused by name.
Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name);

}  // namespace qmlp::text
