#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/json.h"
#include "qmlp/status.h"
#include "text/added_tokens.h"
#include "text/file_reader.h"

namespace qmlp::text {

struct TokenizerFile;

// One added token as both files spell it; `where` is its place for messages.
Result<AddedToken> read_added_token(const FileReader& reader, const Json& value, std::int64_t id,
                                    const std::string& where);

// What tokenizer_config.json says of tokens and of the chat template; the file may be missing.
struct TokenizerConfig {
  static Result<TokenizerConfig> open(const std::string& checkpoint_path);

  // Puts bos and eos around texts where tokenizer.json has no post-processor and this file asks
  // for them. `bos_by_default`: bos also when it says nothing.
  Status add_bos_and_eos(bool bos_by_default, TokenizerFile& file) const;

  std::string path;
  std::vector<std::pair<std::string, std::string>> special_tokens;  // "bos_token" and the like
  std::vector<AddedToken> added_tokens;                             // added_tokens_decoder
  std::optional<bool> add_bos;
  bool add_eos = false;
  // Of a SentencePiece model: whether text gets a space in front, and whether each text between
  // special tokens does.
  std::optional<bool> add_prefix_space;
  bool legacy = false;
  Json chat_template;  // as the file has it
};

}  // namespace qmlp::text
