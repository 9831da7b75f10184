#include "convert/gguf_tokenizer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>

#include "base/concat.h"
#include "base/try.h"
#include "convert/gguf_pre_tokenizers.h"
#include "convert/sentencepiece_merges.h"
#include "io/json.h"
#include "text/quote.h"
#include "text/utf8.h"

namespace qmlp {
namespace {

// llama.cpp's token types.
enum TokenType : std::int64_t {
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kByte = 6,
};

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581, SentencePiece's space

// Control tokens that end a turn or a text wherever they are in a vocabulary. Files often name one
// end token only.
constexpr std::string_view kEndTexts[] = {"<|eot_id|>",   "<|im_end|>",    "<|eom_id|>",
                                          "<|end|>",      "<|endoftext|>", "<|end_of_text|>",
                                          "<end_of_turn>"};

class Builder {
 public:
  explicit Builder(const GgufModel& file) : file_(file) {}

  Result<GgufTokenizer> build() {
    QMLP_TRY(read_model());
    QMLP_TRY(read_tokens());
    if (sentencepiece_) {
      QMLP_TRY(read_pieces());
    } else {
      QMLP_TRY(read_pre_tokenizer());
      QMLP_TRY(read_merges());
    }
    QMLP_TRY(read_special_ids());
    QMLP_ASSIGN(const Json tokenizer, tokenizer_json());
    out_.files.emplace_back("tokenizer.json", tokenizer.dump(1));
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
    sentencepiece_ = *value->text() == "llama";
    if (!sentencepiece_ && *value->text() != "gpt2") {
      return error(Errc::unsupported,
                   concat("tokenizer.ggml.model ", text::quote(*value->text()),
                          " is not supported, only 'gpt2' (byte-level BPE) and 'llama' "
                          "(SentencePiece BPE)"));
    }
    return {};
  }

  Status read_pre_tokenizer() {
    const GgufValue* value = file_.find("tokenizer.ggml.pre");
    if (value != nullptr && value->text() == nullptr) {
      return error(Errc::corrupt_file, "tokenizer.ggml.pre is not a string");
    }
    const std::string_view name = value != nullptr ? *value->text() : "default";
    pre_ = find_pre_tokenizer(name);
    if (pre_ == nullptr) {
      return error(Errc::unsupported, concat("tokenizer.ggml.pre ", text::quote(name),
                                             " is not supported, only ", known_pre_tokenizers()));
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
      return error(Errc::corrupt_file, concat("token ", text::quote(*repeated), " is there twice"));
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
    const std::vector<std::string_view>& merges = *value->texts();
    for (std::size_t i = 0; i < merges.size(); ++i) {
      const std::string_view merge = merges[i];
      // A token may itself begin with a space, so that the separator is the first one after that.
      if (merge.find(' ', 1) == std::string_view::npos || text::find_invalid_utf8(merge)) {
        return error(Errc::corrupt_file,
                     concat("merge ", i, " is not two UTF-8 tokens with a space between"));
      }
      merges_.emplace_back(merge);
    }
    return {};
  }

  // The merges of a SentencePiece BPE follow from the scores of its pieces. Only normal pieces are
  // made by merging: the others would turn text that spells them into them.
  Status read_pieces() {
    const GgufValue* value = file_.find("tokenizer.ggml.scores");
    const GgufNumbers* scores = value != nullptr ? value->numbers() : nullptr;
    if (scores == nullptr || scores->size() != tokens_->size()) {
      return error(Errc::corrupt_file,
                   concat("tokenizer.ggml.scores: needs one number for each of ", tokens_->size(),
                          " tokens"));
    }
    std::vector<ScoredPiece> pieces;
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      const double score = scores->number(id);
      if (!std::isfinite(score)) {
        return error(Errc::corrupt_file,
                     concat("tokenizer.ggml.scores: that of token ", id, " is not finite"));
      }
      const std::string_view text = (*tokens_)[id];
      if (type(id) == kByte) has_bytes_ = true;
      // Text has no spaces left when its pieces are looked up.
      if (type(id) != kNormal || text.empty() || text.find(' ') != text.npos) continue;
      pieces.push_back({text, static_cast<std::int64_t>(id), score});
    }
    for (const PieceMerge& merge : sentencepiece_merges(pieces)) {
      merges_.emplace_back(concat(merge.left, " ", merge.right));
    }
    return {};
  }

  // The id that a key states. Without the key `otherwise`, if the vocabulary is so large.
  Result<std::optional<std::int64_t>> token_id(std::string_view key,
                                               std::int64_t otherwise = -1) const {
    const GgufValue* value = file_.find(key);
    if (value == nullptr) {
      if (otherwise < 0 || otherwise >= out_.num_tokens) return std::optional<std::int64_t>();
      return std::optional(otherwise);
    }
    const auto id = value->integer();
    if (!id || *id < 0 || *id >= out_.num_tokens) {
      return error(Errc::corrupt_file, concat(key, " is not a token id below ", tokens_->size()));
    }
    return id;
  }

  std::int64_t type(std::size_t id) const {
    return types_ != nullptr ? types_->integer(id) : std::int64_t{kNormal};
  }
  std::string_view token(std::int64_t id) const { return (*tokens_)[static_cast<std::size_t>(id)]; }

  Status read_special_ids() {
    // llama.cpp's ids of <unk>, <s> and </s> where a SentencePiece file names none.
    QMLP_ASSIGN(bos_, token_id("tokenizer.ggml.bos_token_id", sentencepiece_ ? 1 : -1));
    QMLP_ASSIGN(eos_, token_id("tokenizer.ggml.eos_token_id", sentencepiece_ ? 2 : -1));
    QMLP_ASSIGN(unk_, token_id("tokenizer.ggml.unknown_token_id", sentencepiece_ ? 0 : -1));
    out_.bos_token_id = bos_;
    std::vector<std::int64_t>& ends = out_.eos_token_ids;
    const auto add_end = [&ends](std::int64_t id) {
      if (std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
    };
    if (eos_) add_end(*eos_);
    for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
      QMLP_ASSIGN(const std::optional<std::int64_t> id, token_id(key));
      if (id) add_end(*id);
    }
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      if (type(id) != kControl) continue;
      if (std::find(std::begin(kEndTexts), std::end(kEndTexts), (*tokens_)[id]) !=
          std::end(kEndTexts)) {
        add_end(static_cast<std::int64_t>(id));
      }
    }
    if (ends.empty()) out_.notes.push_back("the file names no end token");
    return {};
  }

  Result<bool> flag(std::string_view key, bool otherwise) const {
    const GgufValue* value = file_.find(key);
    if (value == nullptr) return otherwise;
    if (const auto found = value->boolean()) return *found;
    return error(Errc::corrupt_file, concat(key, " is not a boolean"));
  }

  // llama.cpp strips the spaces that follow a special token of the Phi-3 models, which it knows by
  // the model's name; their own tokenizer.json says so for each token.
  bool strips_after(std::string_view text) const {
    const GgufValue* value = file_.find("general.name");
    if (!sentencepiece_ || value == nullptr || value->text() == nullptr) return false;
    std::string name(*value->text());
    std::transform(name.begin(), name.end(), name.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
    const bool phi3 = name.find("phi-3") != name.npos || name.find("phi3") != name.npos;
    return phi3 && text != "<unk>" && text != "<s>" && text != "<|endoftext|>";
  }

  // What is put around every text, as the model was trained. Null when nothing is.
  Result<Json> post_processor() const {
    QMLP_ASSIGN(const bool add_bos,
                flag("tokenizer.ggml.add_bos_token", sentencepiece_ || pre_->adds_bos));
    QMLP_ASSIGN(const bool add_eos, flag("tokenizer.ggml.add_eos_token", false));
    JsonObject tokens;
    JsonArray single;
    JsonArray pair;
    const auto special = [&](std::optional<std::int64_t> id, int type) {
      if (!id) return;
      const Json step =
          json_object({{"SpecialToken", json_object({{"id", token(*id)}, {"type_id", type}})}});
      if (type == 0) single.push_back(step);
      pair.push_back(step);
      tokens.set(std::string(token(*id)), json_object({{"id", token(*id)},
                                                       {"ids", Json(JsonArray{Json(*id)})},
                                                       {"tokens", Json(JsonArray{token(*id)})}}));
    };
    for (int type = 0; type < 2; ++type) {
      if (add_bos) special(bos_, type);
      const Json step = json_object(
          {{"Sequence", json_object({{"id", type == 0 ? "A" : "B"}, {"type_id", type}})}});
      if (type == 0) single.push_back(step);
      pair.push_back(step);
      if (add_eos) special(eos_, type);
    }
    if (tokens.size() == 0) return Json();
    return json_object({{"type", "TemplateProcessing"},
                        {"single", Json(std::move(single))},
                        {"pair", Json(std::move(pair))},
                        {"special_tokens", Json(std::move(tokens))}});
  }

  static Json replace(std::string_view from, std::string_view to) {
    return json_object(
        {{"type", "Replace"}, {"pattern", json_object({{"String", from}})}, {"content", to}});
  }

  static Json normalizer(bool space_prefix) {
    if (!space_prefix) return replace(" ", kSpaceMark);
    return json_object(
        {{"type", "Sequence"},
         {"normalizers", Json(JsonArray{json_object({{"type", "Prepend"}, {"prepend", kSpaceMark}}),
                                        replace(" ", kSpaceMark)})}});
  }

  static Json decoder(bool space_prefix) {
    JsonArray steps{replace(kSpaceMark, " "), json_object({{"type", "ByteFallback"}}),
                    json_object({{"type", "Fuse"}})};
    if (space_prefix) {
      steps.push_back(
          json_object({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}));
    }
    return json_object({{"type", "Sequence"}, {"decoders", Json(std::move(steps))}});
  }

  Result<Json> tokenizer_json() {
    JsonArray added;
    JsonObject vocab;
    for (std::size_t id = 0; id < tokens_->size(); ++id) {
      const std::string_view text = (*tokens_)[id];
      vocab.append(std::string(text), Json(static_cast<std::int64_t>(id)));
      const bool special = type(id) == kControl || (sentencepiece_ && type(id) == kUnknown);
      if ((!special && type(id) != kUserDefined) || text.empty()) continue;
      added.push_back(json_object({{"id", static_cast<std::int64_t>(id)},
                                   {"content", text},
                                   {"single_word", false},
                                   {"lstrip", false},
                                   {"rstrip", strips_after(text)},
                                   {"normalized", false},
                                   {"special", special}}));
    }
    QMLP_ASSIGN(Json post, post_processor());
    QMLP_ASSIGN(const bool space_prefix, flag("tokenizer.ggml.add_space_prefix", sentencepiece_));
    Json normalize;
    if (sentencepiece_) normalize = normalizer(space_prefix);
    if (!sentencepiece_ && pre_->nfc) normalize = json_object({{"type", "NFC"}});
    return json_object(
        {{"version", "1.0"},
         {"truncation", Json()},
         {"padding", Json()},
         {"added_tokens", Json(std::move(added))},
         {"normalizer", std::move(normalize)},
         {"pre_tokenizer", sentencepiece_ ? Json() : pre_tokenizer_json(*pre_)},
         {"post_processor", std::move(post)},
         {"decoder", sentencepiece_ ? decoder(space_prefix) : byte_level_json(true, true)},
         {"model", json_object({{"type", "BPE"},
                                {"dropout", Json()},
                                {"unk_token", sentencepiece_ && unk_ ? Json(token(*unk_)) : Json()},
                                {"continuing_subword_prefix", Json()},
                                {"end_of_word_suffix", Json()},
                                {"fuse_unk", sentencepiece_},
                                {"byte_fallback", has_bytes_},
                                {"ignore_merges", !sentencepiece_ && pre_->ignore_merges},
                                {"vocab", Json(std::move(vocab))},
                                {"merges", Json(std::move(merges_))}})}});
  }

  Result<Json> tokenizer_config() {
    JsonObject config;
    config.append("tokenizer_class", "PreTrainedTokenizerFast");
    QMLP_ASSIGN(const std::optional<std::int64_t> pad, token_id("tokenizer.ggml.padding_token_id"));
    const std::pair<const char*, std::optional<std::int64_t>> named[] = {
        {"bos_token", bos_}, {"eos_token", eos_}, {"unk_token", unk_}, {"pad_token", pad}};
    for (const auto& [name, id] : named) {
      if (id) config.append(name, token(*id));
    }
    if (!sentencepiece_) config.append("add_prefix_space", false);
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

  const GgufModel& file_;
  bool sentencepiece_ = false;
  const PreTokenizer* pre_ = nullptr;  // of a byte-level BPE
  bool has_bytes_ = false;             // the vocabulary has tokens for bytes
  const std::vector<std::string_view>* tokens_ = nullptr;
  const GgufNumbers* types_ = nullptr;
  JsonArray merges_;
  std::optional<std::int64_t> bos_;
  std::optional<std::int64_t> eos_;
  std::optional<std::int64_t> unk_;
  GgufTokenizer out_;
};

}  // namespace

Result<GgufTokenizer> read_gguf_tokenizer(const GgufModel& file) { return Builder(file).build(); }

}  // namespace qmlp
