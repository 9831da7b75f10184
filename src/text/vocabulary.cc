#include "text/vocabulary.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/concat.h"
#include "text/quote.h"

namespace qmlp::text {
namespace {

std::size_t hash(std::string_view text) noexcept { return std::hash<std::string_view>{}(text); }

}  // namespace

Result<Vocabulary> Vocabulary::build(const std::vector<Entry>& entries) {
  Vocabulary out;
  std::int64_t size = 0;
  std::size_t bytes = 0;
  for (const Entry& entry : entries) {
    if (entry.id < 0 || entry.id >= kMaxSize) {
      return Error{Errc::corrupt_file, concat("token ", quote(entry.text), ": its id is ", entry.id,
                                              ", 0 to ", kMaxSize - 1, " is supported")};
    }
    size = std::max(size, entry.id + 1);
    bytes += entry.text.size();
  }
  out.tokens_.resize(static_cast<std::size_t>(size));
  out.texts_.reserve(bytes);
  out.table_.assign(std::bit_ceil(std::max<std::size_t>(2, entries.size() * 2)), -1);
  const std::size_t mask = out.table_.size() - 1;
  for (const Entry& entry : entries) {
    const auto id = static_cast<std::int32_t>(entry.id);
    std::size_t at = hash(entry.text) & mask;
    while (out.table_[at] >= 0 && out.text(out.table_[at]) != entry.text) at = (at + 1) & mask;
    Token& token = out.tokens_[static_cast<std::size_t>(id)];
    if (out.table_[at] >= 0 && out.table_[at] != id) {
      return Error{Errc::corrupt_file, concat("token ", quote(entry.text), ": it has the ids ",
                                              out.table_[at], " and ", id)};
    }
    if (token.present && out.table_[at] != id) {
      return Error{Errc::corrupt_file, concat("token id ", id, ": it belongs to ",
                                              quote(out.text(id)), " and ", quote(entry.text))};
    }
    if (!token.present) {
      token.begin = out.texts_.size();
      token.length = static_cast<std::uint32_t>(entry.text.size());
      token.present = true;
      out.texts_ += entry.text;
      out.table_[at] = id;
    }
    // An added token may also stand in the model's vocabulary.
    token.in_model = token.in_model || !entry.added;
    token.added = token.added || entry.added;
    token.special = token.special || entry.special;
  }
  return out;
}

const Vocabulary::Token* Vocabulary::token(std::int32_t id) const noexcept {
  if (id < 0 || static_cast<std::size_t>(id) >= tokens_.size()) return nullptr;
  const Token& found = tokens_[static_cast<std::size_t>(id)];
  return found.present ? &found : nullptr;
}

std::optional<std::int32_t> Vocabulary::id(std::string_view text) const noexcept {
  if (table_.empty()) return std::nullopt;
  const std::size_t mask = table_.size() - 1;
  std::size_t at = hash(text) & mask;
  while (table_[at] >= 0) {
    if (this->text(table_[at]) == text) return table_[at];
    at = (at + 1) & mask;
  }
  return std::nullopt;
}

std::optional<std::int32_t> Vocabulary::model_id(std::string_view text) const noexcept {
  const auto found = id(text);
  return found && tokens_[static_cast<std::size_t>(*found)].in_model ? found : std::nullopt;
}

bool Vocabulary::is_special(std::int32_t id) const noexcept {
  const Token* found = token(id);
  return found != nullptr && found->special;
}

std::string_view Vocabulary::text(std::int32_t id) const noexcept {
  return text_of(tokens_[static_cast<std::size_t>(id)]);
}

bool Vocabulary::is_added(std::int32_t id) const noexcept {
  const Token* found = token(id);
  return found != nullptr && found->added;
}

}  // namespace qmlp::text
