#pragma once

#include <string_view>

#include "qmlp/status.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_file.h"

namespace qmlp::text {

// Reads the bytes of a SentencePiece model (tokenizer.model) of the BPE type; messages begin with
// `name`. `config` tells where spaces are put before text and which tokens were added.
Result<TokenizerFile> parse_spm_file(std::string_view bytes, std::string_view name,
                                     const TokenizerConfig& config);

}  // namespace qmlp::text
