#include "text/chat_template.h"

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "io/json.h"
#include "text/quote.h"

namespace qmlp::text {
namespace {

constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{64} << 20;
constexpr std::size_t kMaxTemplateBytes = std::size_t{1} << 20;

// A file that may be missing.
Result<std::optional<std::string>> read_optional(const std::string& path, std::uint64_t limit) {
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  if (kind == PathKind::missing) return std::optional<std::string>();
  QMLP_ASSIGN(std::string text, read_text_file(path, limit));
  return std::optional<std::string>(std::move(text));
}

// A token in tokenizer_config.json: its text, or an object with it.
const std::string* token_text(const Json* value) {
  if (value == nullptr) return nullptr;
  const Json* content = value->find("content");
  return content != nullptr ? content->string() : value->string();
}

// The template in tokenizer_config.json: one, or a list of named ones.
Result<std::string> configured_template(const Json& config) {
  const Json* value = config.find("chat_template");
  if (value == nullptr || value->is_null()) {
    return Error{Errc::unsupported, "chat template: the model has none, use a raw prompt"};
  }
  if (const std::string* text = value->string()) return *text;
  if (const JsonArray* list = value->array()) {
    for (const Json& named : *list) {
      const Json* name = named.find("name");
      const Json* text = named.find("template");
      if (name != nullptr && name->string() != nullptr && *name->string() == "default" &&
          text != nullptr && text->string() != nullptr) {
        return *text->string();
      }
    }
    return Error{Errc::unsupported,
                 "chat template: the model has several and none is named 'default', use a raw "
                 "prompt"};
  }
  return Error{Errc::corrupt_file,
               concat("chat template: tokenizer_config.json's chat_template is ",
                      value->kind_name(), ", a string or a list of named templates is required")};
}

}  // namespace

Result<ChatTemplate> ChatTemplate::open(const std::string& checkpoint_path) {
  ChatTemplate out;
  const std::string config_path = join_path(checkpoint_path, "tokenizer_config.json");
  QMLP_ASSIGN(const auto config_text, read_optional(config_path, kMaxConfigBytes));
  Json config;
  if (config_text) {
    QMLP_ASSIGN(config, Json::parse(*config_text, config_path));
  }
  for (const std::string_view name : {"bos_token", "eos_token", "unk_token", "sep_token",
                                      "pad_token", "cls_token", "mask_token"}) {
    if (const std::string* text = token_text(config.find(name))) {
      out.special_tokens_.emplace_back(name, jinja::Value::string(MarkedText::of_template(*text)));
    }
  }
  QMLP_ASSIGN(const auto file,
              read_optional(join_path(checkpoint_path, "chat_template.jinja"), kMaxConfigBytes));
  Result<std::string> source = file ? Result<std::string>(*file) : configured_template(config);
  if (!source) {
    out.error_ = source.error();
    return out;
  }
  if (source->size() > kMaxTemplateBytes) {
    out.error_ = Error{Errc::unsupported,
                       concat("chat template: it holds ", source->size(), " bytes, at most ",
                              kMaxTemplateBytes, " are supported, use a raw prompt")};
    return out;
  }
  Result<jinja::Block> parsed = jinja::parse(*source);
  if (parsed) {
    out.template_ = *std::move(parsed);
  } else {
    out.error_ = parsed.error();
  }
  return out;
}

Result<MarkedText> ChatTemplate::render(std::span<const ChatMessage> messages) const {
  using jinja::Value;
  if (error_) return *error_;
  jinja::List list;
  for (const ChatMessage& message : messages) {
    list.push_back(Value::of(
        jinja::Dict{{"role", Value::string(MarkedText::of_message(message.role))},
                    {"content", Value::string(MarkedText::of_message(message.content))}}));
  }
  jinja::Dict variables = special_tokens_;
  variables.emplace_back("messages", Value::of(std::move(list)));
  variables.emplace_back("add_generation_prompt", Value::boolean(true));
  variables.emplace_back("tools", Value::none());
  variables.emplace_back("documents", Value::none());
  return jinja::render(template_, std::move(variables));
}

}  // namespace qmlp::text
