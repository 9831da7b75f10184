#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convert/gguf_model.h"
#include "qmlp/status.h"

namespace qmlp {

// tokenizer.json, tokenizer_config.json and generation_config.json (names and contents) from the
// metadata of a GGUF file whose vocabulary is a byte-level BPE ("gpt2") or a BPE of SentencePiece
// ("llama"). Other vocabularies and unknown pre-tokenizers are refused by name.
struct GgufTokenizer {
  std::vector<std::pair<std::string, std::string>> files;
  std::int64_t num_tokens = 0;
  std::vector<std::int64_t> eos_token_ids;
  std::optional<std::int64_t> bos_token_id;
  std::vector<std::string> notes;
};
Result<GgufTokenizer> read_gguf_tokenizer(const GgufModel& file);

}  // namespace qmlp
