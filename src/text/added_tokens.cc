#include "text/added_tokens.h"

#include <algorithm>

#include "text/unicode_space.h"
#include "text/utf8.h"

namespace qmlp::text {
void AddedTokenMatcher::add(const AddedToken& token) {
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
  if (node == 0) return;  // no content
  nodes_[static_cast<std::size_t>(node)].token = static_cast<std::int32_t>(tokens_.size());
  has_ordinary_ = has_ordinary_ || !token.special;
  tokens_.push_back(token);
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
    std::size_t length = 1;
    while (length < rest.size() && (rest[rest.size() - length] & 0xC0) == 0x80) ++length;
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
                              const std::function<void(std::string_view)>& on_text) {
  std::size_t done = 0;
  std::size_t from = 0;
  while (matcher.has_ordinary()) {
    const auto found = matcher.find(text, from);
    if (!found) break;
    from = found->end;
    if (found->token->special) continue;
    std::size_t begin = found->begin;
    std::size_t end = found->end;
    if (found->token->lstrip) begin -= trailing_space(text.substr(0, begin));
    if (found->token->rstrip) end += leading_space(text.substr(end));
    // The token before may have taken the space already.
    begin = std::max(begin, done);
    if (done < begin) on_text(text.substr(done, begin - done));
    on_token(found->token->id);
    done = end;
  }
  if (done < text.size()) on_text(text.substr(done));
}

}  // namespace qmlp::text
