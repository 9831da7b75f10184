#include "convert/gguf_tokenizer.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "base/concat.h"
#include "base/try.h"
#include "io/json.h"
#include "text/utf8.h"

namespace qmlp {
namespace {

// Token types of llama.cpp's vocabularies.
constexpr std::int64_t kControl = 3;
constexpr std::int64_t kUserDefined = 4;

// How Hugging Face's tokenizer.json spells the pre-tokenizers that llama.cpp knows by name.
struct PreTokenizer {
  std::string_view name;
  const char* split_regex;  // null: the byte-level step's own (GPT-2's)
  bool digits = false;      // every digit alone
  bool nfc = false;
  bool ignore_merges = false;  // a whole word in the vocabulary is taken as it is
};
constexpr const char* kLlama3Regex =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr const char* kQwen2Regex =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
constexpr PreTokenizer kPreTokenizers[] = {
    {"gpt-2", nullptr, false, false, false},      {"default", nullptr, false, false, false},
    {"smollm", nullptr, true, false, false},      {"llama-bpe", kLlama3Regex, false, false, true},
    {"llama3", kLlama3Regex, false, false, true}, {"llama-v3", kLlama3Regex, false, false, true},
    {"qwen2", kQwen2Regex, false, true, false},
};

Json object(std::initializer_list<std::pair<const char*, Json>> members) {
  JsonObject out;
  for (const auto& [name, value] : members) out.append(name, value);
  return Json(std::move(out));
}

Json byte_level(bool add_prefix_space, bool use_regex) {
  return object({{"type", "ByteLevel"},
                 {"add_prefix_space", add_prefix_space},
                 {"trim_offsets", true},
                 {"use_regex", use_regex}});
}

Json pre_tokenizer_json(const PreTokenizer& pre) {
  if (pre.split_regex == nullptr && !pre.digits) return byte_level(false, true);
  JsonArray steps;
  if (pre.digits) steps.push_back(object({{"type", "Digits"}, {"individual_digits", true}}));
  if (pre.split_regex != nullptr) {
    steps.push_back(object({{"type", "Split"},
                            {"pattern", object({{"Regex", pre.split_regex}})},
                            {"behavior", "Isolated"},
                            {"invert", false}}));
  }
  steps.push_back(byte_level(false, pre.split_regex == nullptr));
  return object({{"type", "Sequence"}, {"pretokenizers", Json(std::move(steps))}});
}

// Puts the first token in front of every text, as the model was trained.
Json add_bos_json(std::string_view token, std::int64_t id) {
  const auto special = [token] {
    return object({{"SpecialToken", object({{"id", token}, {"type_id", 0}})}});
  };
  const auto sequence = [](const char* name, int type) {
    return object({{"Sequence", object({{"id", name}, {"type_id", type}})}});
  };
  JsonArray single{special(), sequence("A", 0)};
  JsonArray pair{special(), sequence("A", 0), special(), sequence("B", 1)};
  JsonObject tokens;
  tokens.append(std::string(token), object({{"id", token},
                                            {"ids", Json(JsonArray{Json(id)})},
                                            {"tokens", Json(JsonArray{Json(token)})}}));
  return object({{"type", "TemplateProcessing"},
                 {"single", Json(std::move(single))},
                 {"pair", Json(std::move(pair))},
                 {"special_tokens", Json(std::move(tokens))}});
}

class Builder {
 public:
  explicit Builder(const GgufFile& file) : file_(file) {}

  Result<GgufTokenizer> build() {
    QMLP_TRY(read_model());
    QMLP_TRY(read_pre_tokenizer());
    QMLP_TRY(read_tokens());
    QMLP_TRY(read_merges());
    QMLP_TRY(read_special_ids());
    out_.files.emplace_back("tokenizer.json", tokenizer_json().dump(1));
    QMLP_ASSIGN(const Json config, tokenizer_config());
    out_.files.emplace_back("tokenizer_config.json", config.dump(2) + "\n");
    out_.files.emplace_back("generation_config.json", generation_config().dump(2) + "\n");
    return std::move(out_);
  }

 private:
  Error error(Errc code, std::string_view rest) const {
    return Error{code, concat(file_.path(), ": ", rest)};
  }

  Status read_model() {
    const GgufValue* value = file_.find("tokenizer.ggml.model");
    if (value == nullptr || value->text() == nullptr) {
      return error(Errc::corrupt_file, "tokenizer.ggml.model is missing or not a string");
    }
    if (*value->text() != "gpt2") {
      return error(Errc::unsupported, concat("tokenizer.ggml.model '", *value->text(),
                                             "' is not supported, only 'gpt2' (byte-level BPE)"));
    }
    return {};
  }

  Status read_pre_tokenizer() {
    const GgufValue* value = file_.find("tokenizer.ggml.pre");
    if (value != nullptr && value->text() == nullptr) {
      return error(Errc::corrupt_file, "tokenizer.ggml.pre is not a string");
    }
    const std::string_view name = value != nullptr ? *value->text() : "default";
    std::string known;
    for (const PreTokenizer& pre : kPreTokenizers) {
      if (pre.name == name) pre_ = &pre;
      known += concat(known.empty() ? "" : ", ", pre.name);
    }
    if (pre_ == nullptr) {
      return error(Errc::unsupported,
                   concat("tokenizer.ggml.pre '", name, "' is not supported, only ", known));
    }
    if (name == "default") {
      out_.notes.push_back("the file names no pre-tokenizer: GPT-2's is assumed");
    }
    return {};
  }

  Status read_tokens() {
    const GgufValue* value = file_.find("tokenizer.ggml.tokens");
    if (value == nullptr || value->texts() == nullptr || value->texts()->empty()) {
      return error(Errc::corrupt_file, "tokenizer.ggml.tokens is missing or no array of strings");
    }
    tokens_ = value->texts();
    out_.num_tokens = static_cast<std::int64_t>(tokens_->size());
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      if (const auto bad = text::find_invalid_utf8((*tokens_)[id])) {
        return error(Errc::corrupt_file, concat("token ", id, " is invalid UTF-8 at byte ", *bad));
      }
    }
    std::vector<std::string_view> sorted = *tokens_;
    std::sort(sorted.begin(), sorted.end());
    const auto repeated = std::adjacent_find(sorted.begin(), sorted.end());
    if (repeated != sorted.end()) {
      return error(Errc::corrupt_file, concat("token ", Json(*repeated).dump(), " is there twice"));
    }
    const GgufValue* types = file_.find("tokenizer.ggml.token_type");
    if (types == nullptr) return {};
    types_ = types->integers();
    if (types_ == nullptr || types_->size() != tokens_->size()) {
      return error(Errc::corrupt_file,
                   concat("tokenizer.ggml.token_type: needs one integer for each of ",
                          tokens_->size(), " tokens"));
    }
    return {};
  }

  Status read_merges() {
    const GgufValue* value = file_.find("tokenizer.ggml.merges");
    if (value == nullptr || value->texts() == nullptr) {
      return error(Errc::corrupt_file, "tokenizer.ggml.merges is missing or no array of strings");
    }
    merges_ = value->texts();
    for (std::size_t i = 0; i < merges_->size(); ++i) {
      const std::string_view merge = (*merges_)[i];
      if (merge.find(' ', 1) == std::string_view::npos || text::find_invalid_utf8(merge)) {
        return error(Errc::corrupt_file,
                     concat("merge ", i, " is not two UTF-8 tokens with a space between"));
      }
    }
    return {};
  }

  Result<std::optional<std::int64_t>> token_id(std::string_view key) const {
    const GgufValue* value = file_.find(key);
    if (value == nullptr) return std::optional<std::int64_t>();
    const auto id = value->integer();
    if (!id || *id < 0 || *id >= static_cast<std::int64_t>(tokens_->size())) {
      return error(Errc::corrupt_file, concat(key, " is not a token id below ", tokens_->size()));
    }
    return id;
  }

  bool is_control(std::size_t id) const { return types_ != nullptr && (*types_)[id] == kControl; }

  Status read_special_ids() {
    QMLP_ASSIGN(out_.bos_token_id, token_id("tokenizer.ggml.bos_token_id"));
    std::vector<std::int64_t>& ends = out_.eos_token_ids;
    const auto add_end = [&ends](std::int64_t id) {
      if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
    };
    for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                            "tokenizer.ggml.eom_token_id"}) {
      QMLP_ASSIGN(const std::optional<std::int64_t> id, token_id(key));
      if (id) add_end(*id);
    }
    // Files often name one end token only; these texts end a turn wherever they are control tokens.
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      if (!is_control(id)) continue;
      const std::string_view text = (*tokens_)[id];
      if (text == "<|eot_id|>" || text == "<|im_end|>" || text == "<|eom_id|>") {
        add_end(static_cast<std::int64_t>(id));
      }
    }
    if (ends.empty()) out_.notes.push_back("the file names no end token");
    return {};
  }

  bool adds_bos() const {
    const GgufValue* value = file_.find("tokenizer.ggml.add_bos_token");
    return value != nullptr && value->boolean() == true && out_.bos_token_id.has_value();
  }

  Json tokenizer_json() const {
    JsonArray added;
    JsonObject vocab;
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      const std::string_view text = (*tokens_)[id];
      vocab.append(std::string(text), Json(static_cast<std::int64_t>(id)));
      const std::int64_t type = types_ != nullptr ? (*types_)[id] : 1;
      if (type != kControl && type != kUserDefined) continue;
      added.push_back(object({{"id", static_cast<std::int64_t>(id)},
                              {"content", text},
                              {"single_word", false},
                              {"lstrip", false},
                              {"rstrip", false},
                              {"normalized", false},
                              {"special", type == kControl}}));
    }
    JsonArray merges;
    for (const std::string_view merge : *merges_) merges.emplace_back(merge);
    return object(
        {{"version", "1.0"},
         {"truncation", Json()},
         {"padding", Json()},
         {"added_tokens", Json(std::move(added))},
         {"normalizer", pre_->nfc ? object({{"type", "NFC"}}) : Json()},
         {"pre_tokenizer", pre_tokenizer_json(*pre_)},
         {"post_processor",
          adds_bos() ? add_bos_json((*tokens_)[static_cast<std::size_t>(*out_.bos_token_id)],
                                    *out_.bos_token_id)
                     : Json()},
         {"decoder", byte_level(true, true)},
         {"model", object({{"type", "BPE"},
                           {"dropout", Json()},
                           {"unk_token", Json()},
                           {"continuing_subword_prefix", Json()},
                           {"end_of_word_suffix", Json()},
                           {"fuse_unk", false},
                           {"byte_fallback", false},
                           {"ignore_merges", pre_->ignore_merges},
                           {"vocab", Json(std::move(vocab))},
                           {"merges", Json(std::move(merges))}})}});
  }

  Result<Json> tokenizer_config() {
    JsonObject config;
    config.append("tokenizer_class", "PreTrainedTokenizerFast");
    constexpr std::pair<const char*, const char*> kNamed[] = {
        {"bos_token", "tokenizer.ggml.bos_token_id"},
        {"eos_token", "tokenizer.ggml.eos_token_id"},
        {"unk_token", "tokenizer.ggml.unknown_token_id"},
        {"pad_token", "tokenizer.ggml.padding_token_id"},
    };
    for (const auto& [name, key] : kNamed) {
      QMLP_ASSIGN(const std::optional<std::int64_t> id, token_id(key));
      if (id) config.append(name, (*tokens_)[static_cast<std::size_t>(*id)]);
    }
    config.append("add_prefix_space", false);
    config.append("clean_up_tokenization_spaces", false);
    const GgufValue* chat = file_.find("tokenizer.chat_template");
    if (chat == nullptr) {
      out_.notes.push_back("the file holds no chat template");
      return Json(std::move(config));
    }
    if (chat->text() == nullptr || text::find_invalid_utf8(*chat->text())) {
      return error(Errc::corrupt_file, "tokenizer.chat_template is not a UTF-8 string");
    }
    config.append("chat_template", *chat->text());
    return Json(std::move(config));
  }

  Json generation_config() const {
    JsonObject config;
    if (out_.bos_token_id) config.append("bos_token_id", *out_.bos_token_id);
    const auto& ends = out_.eos_token_ids;
    if (ends.size() == 1) config.append("eos_token_id", ends.front());
    if (ends.size() > 1) {
      JsonArray ids;
      for (const std::int64_t id : ends) ids.emplace_back(id);
      config.append("eos_token_id", Json(std::move(ids)));
    }
    return Json(std::move(config));
  }

  const GgufFile& file_;
  const PreTokenizer* pre_ = nullptr;
  const std::vector<std::string_view>* tokens_ = nullptr;
  const std::vector<std::int64_t>* types_ = nullptr;
  const std::vector<std::string_view>* merges_ = nullptr;
  GgufTokenizer out_;
};

}  // namespace

Result<GgufTokenizer> read_gguf_tokenizer(const GgufFile& file) { return Builder(file).build(); }

}  // namespace qmlp
