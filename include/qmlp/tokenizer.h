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

// A byte-level BPE tokenizer read from a checkpoint folder's tokenizer.json and
// tokenizer_config.json. Immutable and safe to share between threads.
class Tokenizer {
 public:
  static Result<std::shared_ptr<const Tokenizer>> open(const std::string& checkpoint_path);
  ~Tokenizer();

  std::int64_t vocab_size() const noexcept;

  // Token ids of UTF-8 text. Text that spells a special token stays text. Adds no special tokens.
  // A byte that the vocabulary lacks gives the model's unk_token, or nothing if it has none, as in
  // Hugging Face's tokenizers. Error: invalid UTF-8, with the byte offset.
  Result<std::vector<std::int32_t>> encode(std::string_view text) const;
  // The prompt of a conversation in the model's own template, ending where the assistant's answer
  // starts. Only the template can write special tokens, roles and contents cannot. Error: the
  // template is not one that is understood here (use a raw prompt), or refuses the messages.
  Result<std::vector<std::int32_t>> encode_chat(std::span<const ChatMessage> messages) const;

  // The bytes of one token; special tokens give their text. Error: id out of range.
  Result<std::string> token_bytes(std::int32_t id) const;
  Result<std::string> decode(std::span<const std::int32_t> ids) const;
  bool is_special(std::int32_t id) const noexcept;
  std::optional<std::int32_t> token_id(std::string_view token) const;  // exact token text

 private:
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

}  // namespace qmlp
