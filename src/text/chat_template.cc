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

// The template in tokenizer_config.json: one, or a list of named ones.
Result<std::string> configured_template(const Json& value) {
  if (value.is_null()) {
    return Error{Errc::unsupported, "chat template: the model has none, use a raw prompt"};
  }
  if (const std::string* text = value.string()) return *text;
  if (const JsonArray* list = value.array()) {
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
               concat("chat template: tokenizer_config.json's chat_template is ", value.kind_name(),
                      ", a string or a list of named templates is required")};
}

// What a caller gives as JSON, as a value of the template language.
Result<jinja::Value> to_value(const Json& json) {
  using jinja::Value;
  if (json.is_null()) return Value::none();
  if (const auto boolean = json.boolean()) return Value::boolean(*boolean);
  if (const auto integer = json.integer()) return Value::integer(*integer);
  if (const std::string* text = json.string()) return Value::string(MarkedText::of_message(*text));
  if (const JsonArray* array = json.array()) {
    jinja::List list;
    for (const Json& element : *array) {
      QMLP_ASSIGN(Value value, to_value(element));
      list.push_back(std::move(value));
    }
    return Value::of(std::move(list));
  }
  if (json.object() == nullptr) {
    return Error{Errc::unsupported, "tools: numbers with a fraction are not supported"};
  }
  jinja::Dict dict;
  for (const JsonMember& member : json.object()->members()) {
    QMLP_ASSIGN(Value value, to_value(member.value));
    dict.emplace_back(member.name, std::move(value));
  }
  return Value::of(std::move(dict));
}

}  // namespace

Result<ChatTemplate> ChatTemplate::open(const std::string& checkpoint_path,
                                        const TokenizerConfig& config) {
  ChatTemplate out;
  for (const auto& [name, text] : config.special_tokens) {
    out.special_tokens_.emplace_back(name, jinja::Value::string(MarkedText::of_template(text)));
  }
  QMLP_ASSIGN(const auto file,
              read_optional(join_path(checkpoint_path, "chat_template.jinja"), kMaxConfigBytes));
  Result<std::string> source =
      file ? Result<std::string>(*file) : configured_template(config.chat_template);
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

Result<MarkedText> ChatTemplate::render(std::span<const ChatMessage> messages,
                                        const ChatOptions& options) const {
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
  variables.emplace_back("add_generation_prompt", Value::boolean(options.add_generation_prompt));
  Value tools = Value::none();
  if (!options.tools.empty()) {
    Result<Json> parsed = Json::parse(options.tools, "tools");
    if (!parsed) return Error{Errc::invalid_argument, parsed.error().message};
    if (parsed->array() == nullptr) {
      return Error{Errc::invalid_argument,
                   concat("tools: it is ", parsed->kind_name(), ", an array is required")};
    }
    QMLP_ASSIGN(tools, to_value(*parsed));
  }
  variables.emplace_back("tools", std::move(tools));
  if (options.enable_thinking) {
    variables.emplace_back("enable_thinking", Value::boolean(*options.enable_thinking));
  }
  variables.emplace_back("documents", Value::none());
  return jinja::render(template_, std::move(variables));
}

}  // namespace qmlp::text
