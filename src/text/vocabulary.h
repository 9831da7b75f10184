#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"

namespace qmlp::text {

// Token texts by id and ids by text, over the model's vocabulary and the added tokens.
class Vocabulary {
 public:
  // Bounds what a file's ids can make us allocate.
  static constexpr std::int64_t kMaxSize = std::int64_t{1} << 22;

  struct Entry {
    std::string_view text;
    std::int64_t id;
    bool added;    // spelled as it stands, not in the byte-level alphabet
    bool special;  // of an added token
  };
  // Fails on an id out of range, a text with two ids and an id with two texts.
  static Result<Vocabulary> build(const std::vector<Entry>& entries);

  std::int64_t size() const noexcept { return static_cast<std::int64_t>(tokens_.size()); }
  std::optional<std::int32_t> id(std::string_view text) const noexcept;
  // Of a token of the model's own vocabulary: what words are made of.
  std::optional<std::int32_t> model_id(std::string_view text) const noexcept;
  bool contains(std::int32_t id) const noexcept { return token(id) != nullptr; }
  bool is_special(std::int32_t id) const noexcept;
  std::string_view text(std::int32_t id) const noexcept;  // of an id that is contained
  bool is_added(std::int32_t id) const noexcept;

 private:
  struct Token {
    std::uint64_t begin = 0;
    std::uint32_t length = 0;
    bool present = false;
    bool in_model = false;
    bool added = false;
    bool special = false;
  };
  const Token* token(std::int32_t id) const noexcept;
  std::string_view text_of(const Token& token) const noexcept {
    return std::string_view(texts_).substr(token.begin, token.length);
  }

  std::string texts_;
  std::vector<Token> tokens_;        // by id
  std::vector<std::int32_t> table_;  // open addressing by text, a power of two, -1 where empty
};

}  // namespace qmlp::text
