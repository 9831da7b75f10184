#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "io/json.h"

namespace qmlp {

// A pre-tokenizer of byte-level BPE vocabularies that llama.cpp knows by name, as Hugging Face's
// tokenizer.json spells it.
struct PreTokenizer {
  std::string_view name;
  const char* split_regex;     // null: the byte-level step's own (GPT-2's)
  bool digits = false;         // every digit alone, before that
  bool nfc = false;            // text is normalized first
  bool ignore_merges = false;  // a whole word in the vocabulary is taken as it is
  bool adds_bos = false;       // unless the file says otherwise
};
// Null when the name is unknown.
const PreTokenizer* find_pre_tokenizer(std::string_view name) noexcept;
std::string known_pre_tokenizers();  // "gpt-2, default, ..."

Json pre_tokenizer_json(const PreTokenizer& pre);
Json byte_level_json(bool add_prefix_space, bool use_regex);

// A JSON object of these members.
Json json_object(std::initializer_list<std::pair<const char*, Json>> members);

}  // namespace qmlp
