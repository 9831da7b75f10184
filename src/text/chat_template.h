#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "qmlp/status.h"
#include "qmlp/tokenizer.h"
#include "text/jinja.h"
#include "text/marked_text.h"
#include "text/tokenizer_config.h"

namespace qmlp::text {

// The chat template of a checkpoint folder: chat_template.jinja, else the one of
// tokenizer_config.json.
class ChatTemplate {
 public:
  // Fails on files that cannot be read. A folder without a template, or with one that is not
  // understood, opens; render says so.
  static Result<ChatTemplate> open(const std::string& checkpoint_path,
                                   const TokenizerConfig& config);

  // What the template prints for these messages, which must be valid UTF-8.
  Result<MarkedText> render(std::span<const ChatMessage> messages,
                            const ChatOptions& options = {}) const;

 private:
  std::optional<Error> error_;
  jinja::Block template_;
  jinja::Dict special_tokens_;  // bos_token and the like, by the names that templates use
};

}  // namespace qmlp::text
