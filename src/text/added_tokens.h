#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qmlp/status.h"

namespace qmlp::text {

// A token that is looked for in the text itself, before it is cut into words.
struct AddedToken {
  std::string content;
  std::int32_t id = 0;
  bool special = false;
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for in the normalized text
  bool single_word = false;  // not within a word
};

// Finds tokens from left to right, the longest of those that start at the same place.
class AddedTokenMatcher {
 public:
  Status add(const AddedToken& token);
  bool empty() const noexcept { return tokens_.empty(); }
  bool has_ordinary() const noexcept { return has_ordinary_; }

  struct Found {
    std::size_t begin;
    std::size_t end;
    const AddedToken* token;
  };
  // The first token at or after `from`.
  std::optional<Found> find(std::string_view text, std::size_t from) const noexcept;
  // Whether a found token counts: one of a single word must not touch a word.
  bool counts(const Found& found, std::string_view text) const noexcept;

 private:
  struct Node {
    std::int32_t token = -1;                                       // index into tokens_
    std::vector<std::pair<unsigned char, std::int32_t>> children;  // few: searched in order
  };
  std::int32_t child(std::int32_t node, unsigned char byte) const noexcept;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::vector<std::int32_t> roots_ = std::vector<std::int32_t>(256, -1);
  bool has_ordinary_ = false;
  std::shared_ptr<const std::vector<bool>> word_characters_;  // by code; if a token asks for it
};

// White space at the end and at the start of valid UTF-8, in bytes.
std::size_t trailing_space(std::string_view text) noexcept;
std::size_t leading_space(std::string_view text) noexcept;

// Cuts text at added tokens: calls `on_token(id)` and `on_text(piece, begin)` in order, piece never
// empty. Special tokens are matched, and stay text.
void split_at_ordinary_tokens(const AddedTokenMatcher& matcher, std::string_view text,
                              const std::function<void(std::int32_t)>& on_token,
                              const std::function<void(std::string_view, std::size_t)>& on_text);

}  // namespace qmlp::text
