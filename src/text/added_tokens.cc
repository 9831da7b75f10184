#include "text/added_tokens.h"

#include <utility>

#include "base/try.h"
#include "text/regex.h"
#include "text/regex_syntax.h"
#include "text/unicode_space.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr char32_t kCodes = 0x110000;

// Which characters are letters of words, by code.
Result<std::shared_ptr<const std::vector<bool>>> find_word_characters() {
  std::string all;
  for (char32_t code = 0; code < kCodes; ++code) {
    if (code < 0xD800 || code >= 0xE000) append_utf8(code, all);
  }
  QMLP_ASSIGN(const Regex word, Regex::compile("[" + word_class() + "]+"));
  QMLP_ASSIGN(RegexScratch scratch, RegexScratch::make(all.size()));
  auto out = std::make_shared<std::vector<bool>>(kCodes);
  for (std::size_t at = 0; at < all.size();) {
    QMLP_ASSIGN(const Match match, word.find(all, at, scratch));
    if (!match.found) break;
    for (at = match.begin; at < match.end;) {
      const Utf8Unit unit = first_utf8_unit(std::string_view(all).substr(at));
      (*out)[unit.code] = true;
      at += unit.length;
    }
  }
  return std::shared_ptr<const std::vector<bool>>(std::move(out));
}

// Of the last character of a text that is not empty.
std::size_t last_length(std::string_view text) noexcept {
  std::size_t length = 1;
  while (length < text.size() && (text[text.size() - length] & 0xC0) == 0x80) ++length;
  return length;
}

}  // namespace

Status AddedTokenMatcher::add(const AddedToken& token) {
  std::int32_t node = 0;
  for (const char c : token.content) {
    const auto byte = static_cast<unsigned char>(c);
    std::int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<std::int32_t>(nodes_.size());
      nodes_.emplace_back();
      if (node == 0) {
        roots_[byte] = next;
      } else {
        nodes_[static_cast<std::size_t>(node)].children.emplace_back(byte, next);
      }
    }
    node = next;
  }
  if (node == 0) return {};  // no content
  if (token.single_word && word_characters_ == nullptr) {
    QMLP_ASSIGN(word_characters_, find_word_characters());
  }
  nodes_[static_cast<std::size_t>(node)].token = static_cast<std::int32_t>(tokens_.size());
  has_ordinary_ = has_ordinary_ || !token.special;
  tokens_.push_back(token);
  return {};
}

bool AddedTokenMatcher::counts(const Found& found, std::string_view text) const noexcept {
  if (!found.token->single_word) return true;
  const std::string_view before = text.substr(0, found.begin);
  const std::string_view after = text.substr(found.end);
  const auto is_word = [this](std::string_view character) {
    return bool{(*word_characters_)[first_utf8_unit(character).code]};
  };
  return (before.empty() || !is_word(before.substr(before.size() - last_length(before)))) &&
         (after.empty() || !is_word(after));
}

std::int32_t AddedTokenMatcher::child(std::int32_t node, unsigned char byte) const noexcept {
  if (node == 0) return roots_[byte];
  for (const auto& [label, next] : nodes_[static_cast<std::size_t>(node)].children) {
    if (label == byte) return next;
  }
  return -1;
}

std::optional<AddedTokenMatcher::Found> AddedTokenMatcher::find(std::string_view text,
                                                                std::size_t from) const noexcept {
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    std::int32_t node = 0;
    std::int32_t longest = -1;
    std::size_t end = begin;
    for (std::size_t at = begin; at < text.size(); ++at) {
      node = child(node, static_cast<unsigned char>(text[at]));
      if (node < 0) break;
      const std::int32_t token = nodes_[static_cast<std::size_t>(node)].token;
      if (token >= 0) {
        longest = token;
        end = at + 1;
      }
    }
    if (longest >= 0) return Found{begin, end, &tokens_[static_cast<std::size_t>(longest)]};
  }
  return std::nullopt;
}

std::size_t trailing_space(std::string_view text) noexcept {
  std::size_t space = 0;
  while (space < text.size()) {
    const std::string_view rest = text.substr(0, text.size() - space);
    const std::size_t length = last_length(rest);
    if (!is_space(first_utf8_unit(rest.substr(rest.size() - length)).code)) break;
    space += length;
  }
  return space;
}

std::size_t leading_space(std::string_view text) noexcept {
  std::size_t space = 0;
  while (space < text.size()) {
    const Utf8Unit unit = first_utf8_unit(text.substr(space));
    if (!is_space(unit.code)) break;
    space += unit.length;
  }
  return space;
}

void split_at_ordinary_tokens(const AddedTokenMatcher& matcher, std::string_view text,
                              const std::function<void(std::int32_t)>& on_token,
                              const std::function<void(std::string_view, std::size_t)>& on_text) {
  std::size_t done = 0;
  std::size_t from = 0;
  while (matcher.has_ordinary()) {
    const auto found = matcher.find(text, from);
    if (!found) break;
    from = found->end;
    if (found->token->special || !matcher.counts(*found, text)) continue;
    std::size_t begin = found->begin;
    std::size_t end = found->end;
    if (found->token->lstrip && begin > done) {
      begin -= trailing_space(text.substr(done, begin - done));
    }
    if (found->token->rstrip) end += leading_space(text.substr(end));
    // A token of white space may be what the token before took along. As Hugging Face has it, it
    // still counts, unless it strips to the left as well and so has nothing left.
    if (found->token->lstrip && begin <= done) begin = done;
    if (begin >= end) continue;
    if (done < begin) on_text(text.substr(done, begin - done), done);
    on_token(found->token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done), done);
}

}  // namespace qmlp::text
