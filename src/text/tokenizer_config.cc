#include "text/tokenizer_config.h"

#include <charconv>
#include <system_error>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "text/quote.h"
#include "text/tokenizer_file.h"

namespace qmlp::text {
namespace {

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{64} << 20;

// A token's text, or an object with it.
const std::string* token_text(const Json* value) {
  if (value == nullptr) return nullptr;
  const Json* content = value->find("content");
  return content != nullptr ? content->string() : value->string();
}

Result<std::vector<AddedToken>> read_added_tokens(const FileReader& reader, const Json& config) {
  std::vector<AddedToken> out;
  const Json* tokens = config.find("added_tokens_decoder");
  if (tokens == nullptr || tokens->is_null()) return out;
  if (tokens->object() == nullptr) {
    return reader.corrupt(
        concat("added_tokens_decoder is ", tokens->kind_name(), ", an object is required"));
  }
  for (const JsonMember& member : tokens->object()->members()) {
    std::int64_t id = -1;
    const char* const end = member.name.data() + member.name.size();
    const auto [last, error] = std::from_chars(member.name.data(), end, id);
    if (error != std::errc() || last != end) id = -1;
    QMLP_ASSIGN(AddedToken token,
                read_added_token(reader, member.value, id,
                                 concat("added_tokens_decoder[", quote(member.name), "]")));
    out.push_back(std::move(token));
  }
  return out;
}

}  // namespace

Result<AddedToken> read_added_token(const FileReader& reader, const Json& value, std::int64_t id,
                                    const std::string& where) {
  if (id < 0 || id >= Vocabulary::kMaxSize) {
    return reader.corrupt(concat(where, ".id is no integer from 0 to ", Vocabulary::kMaxSize - 1));
  }
  AddedToken token;
  token.id = static_cast<std::int32_t>(id);
  QMLP_ASSIGN(token.content, reader.string(value, where, "content", ""));
  if (token.content.empty()) return reader.corrupt(concat(where, " has no content"));
  QMLP_ASSIGN(token.special, reader.flag(value, where, "special", false));
  QMLP_ASSIGN(token.lstrip, reader.flag(value, where, "lstrip", false));
  QMLP_ASSIGN(token.rstrip, reader.flag(value, where, "rstrip", false));
  QMLP_ASSIGN(token.single_word, reader.flag(value, where, "single_word", false));
  QMLP_ASSIGN(token.normalized, reader.flag(value, where, "normalized", !token.special));
  return token;
}

Result<TokenizerConfig> TokenizerConfig::open(const std::string& checkpoint_path) {
  TokenizerConfig out;
  out.path = join_path(checkpoint_path, "tokenizer_config.json");
  QMLP_ASSIGN(const PathKind kind, path_kind(out.path));
  if (kind == PathKind::missing) return out;
  QMLP_ASSIGN(const std::string text, read_text_file(out.path, kMaxConfigBytes));
  QMLP_ASSIGN(const Json config, Json::parse(text, out.path));
  for (const std::string_view name : {"bos_token", "eos_token", "unk_token", "sep_token",
                                      "pad_token", "cls_token", "mask_token"}) {
    if (const std::string* token = token_text(config.find(name))) {
      out.special_tokens.emplace_back(name, *token);
    }
  }
  const FileReader reader(out.path);
  QMLP_ASSIGN(out.added_tokens, read_added_tokens(reader, config));
  const auto optional_flag = [&](std::string_view key) -> Result<std::optional<bool>> {
    const Json* value = config.find(key);
    if (value == nullptr || value->is_null()) return std::optional<bool>();
    QMLP_ASSIGN(const bool flag, reader.flag(config, "", key, false));
    return std::optional<bool>(flag);
  };
  QMLP_ASSIGN(out.add_bos, optional_flag("add_bos_token"));
  QMLP_ASSIGN(out.add_prefix_space, optional_flag("add_prefix_space"));
  QMLP_ASSIGN(out.legacy, reader.flag(config, "", "legacy", false));
  QMLP_ASSIGN(out.add_eos, reader.flag(config, "", "add_eos_token", false));
  if (const Json* value = config.find("chat_template")) out.chat_template = *value;
  return out;
}

Status TokenizerConfig::add_bos_and_eos(bool bos_by_default, TokenizerFile& file) const {
  if (file.has_post_processor) return {};
  const auto add = [&](std::string_view name, std::vector<std::int32_t>& out) -> Status {
    for (const auto& [key, text] : special_tokens) {
      if (key != name) continue;
      const auto id = file.vocabulary.id(text);
      if (!id) {
        return Error{Errc::corrupt_file,
                     concat(path, ": ", name, " ", quote(text), " is not in the vocabulary")};
      }
      out.push_back(*id);
    }
    return {};  // none is named: none is added
  };
  if (add_bos.value_or(bos_by_default)) QMLP_TRY(add("bos_token", file.before));
  if (add_eos) QMLP_TRY(add("eos_token", file.after));
  return {};
}

}  // namespace qmlp::text
