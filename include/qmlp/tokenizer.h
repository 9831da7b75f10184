#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

// What a chat template is told beside the messages.
struct ChatOptions {
  bool add_generation_prompt = true;    // end where the assistant's answer starts
  std::optional<bool> enable_thinking;  // for templates that ask; empty: their default
  std::string tools;                    // JSON array of tool definitions, empty for none
};

// A BPE or unigram tokenizer read from a checkpoint folder's tokenizer.json and
// tokenizer_config.json. Immutable and safe to share between threads.
class Tokenizer {
 public:
  static Result<std::shared_ptr<const Tokenizer>> open(const std::string& checkpoint_path);
  ~Tokenizer();

  std::int64_t vocab_size() const noexcept;

  // Token ids of UTF-8 text. Text that spells a special token stays text. Adds no special tokens.
  // What the vocabulary lacks gives the model's unk_token, or nothing if it has none, as in
  // Hugging Face's tokenizers. Error: invalid UTF-8, with the byte offset.
  Result<std::vector<std::int32_t>> encode(std::string_view text) const;
  // The same between the special tokens that the tokenizer puts around a text (bos, seldom eos): a
  // prompt without a chat template.
  Result<std::vector<std::int32_t>> encode_prompt(std::string_view text) const;
  // The prompt of a conversation in the model's own template. Only the template can write special
  // tokens; roles, contents and tools cannot. Error: the template is not one that is understood
  // here (use a raw prompt), or refuses the messages.
  Result<std::vector<std::int32_t>> encode_chat(std::span<const ChatMessage> messages,
                                                const ChatOptions& options = {}) const;

  // The bytes of one token within a text; special tokens give their text. Error: the vocabulary
  // has no such id.
  Result<std::string> token_bytes(std::int32_t id) const;
  // The bytes of a text. Where a text's first word start stands for no space, it gives none.
  Result<std::string> decode(std::span<const std::int32_t> ids) const;
  bool is_special(std::int32_t id) const noexcept;
  std::optional<std::int32_t> token_id(std::string_view token) const;  // exact token text

 private:
  friend class Detokenizer;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// Turns a stream of token bytes into complete UTF-8: holds back a character until its bytes are all
// there, and replaces bytes that can never complete with U+FFFD.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // the text that became complete
  std::string finish();                      // what is still held back, replaced

 private:
  std::string held_;
};

// Turns a stream of token ids into text as it becomes complete: what Tokenizer::decode gives, with
// U+FFFD for bytes that are no character. The tokenizer must outlive it.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer);
  std::string push(std::int32_t id);  // the text that became complete; nothing for an unknown id
  std::string finish();               // what is still held back, replaced

 private:
  const Tokenizer* tokenizer_;
  Utf8Stream utf8_;
  std::size_t strip_;  // characters that the start of the text may still lose
  bool first_ = true;
};

}  // namespace qmlp
