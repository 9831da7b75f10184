#include "text/tokenizer_file.h"

#include <algorithm>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/json.h"
#include "text/byte_alphabet.h"
#include "text/quote.h"
#include "text/regex_syntax.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::size_t kMaxSteps = 32;  // of a pre-tokenizer; bounds the recursion over them

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Reads one tokenizer.json; every message says where in the file it is about.
class Reader {
 public:
  explicit Reader(std::string_view name) : name_(name) {}

  Result<TokenizerFile> run(const Json& root) {
    if (root.object() == nullptr) {
      return corrupt(concat("it is ", root.kind_name(), ", an object is required"));
    }
    const Json* model = root.find("model");
    if (model == nullptr || model->object() == nullptr) {
      return corrupt("it has no object 'model'");
    }
    QMLP_TRY(check_model(*model));
    QMLP_TRY(read_normalizer(root.find("normalizer")));
    QMLP_TRY(read_pre_tokenizer(root.find("pre_tokenizer")));
    QMLP_TRY(check_decoder(root.find("decoder")));
    QMLP_TRY(read_added_tokens(root.find("added_tokens")));
    QMLP_TRY(read_vocabulary(*model));
    QMLP_TRY(read_merges(*model));
    return std::move(out_);
  }

 private:
  Error corrupt(const std::string& what) const {
    return Error{Errc::corrupt_file, concat(name_, ": ", what)};
  }
  Error unsupported(const std::string& what) const {
    return Error{Errc::unsupported, concat(name_, ": ", what)};
  }

  // A member that may be absent or null. `where` is the path of the object, such as "model".
  Result<bool> flag(const Json& object, std::string_view where, std::string_view key,
                    bool otherwise) const {
    const Json* value = object.find(key);
    if (value == nullptr || value->is_null()) return otherwise;
    if (const auto found = value->boolean()) return *found;
    return corrupt(concat(where, ".", key, " is ", value->kind_name(), ", a boolean is required"));
  }
  Result<std::string> string(const Json& object, std::string_view where, std::string_view key,
                             std::string_view otherwise) const {
    const Json* value = object.find(key);
    if (value == nullptr || value->is_null()) return std::string(otherwise);
    if (const std::string* found = value->string()) return *found;
    return corrupt(concat(where, ".", key, " is ", value->kind_name(), ", a string is required"));
  }

  Status check_model(const Json& model) {
    // Files of the first versions name no type; only BPE has merges.
    QMLP_ASSIGN(const std::string type,
                string(model, "model", "type", model.find("merges") != nullptr ? "BPE" : ""));
    if (type != "BPE") {
      return unsupported(
          concat("model.type is ", quote(type), ", only byte-level BPE is supported"));
    }
    QMLP_ASSIGN(const bool byte_fallback, flag(model, "model", "byte_fallback", false));
    if (byte_fallback) {
      return unsupported(
          "model.byte_fallback is true (a SentencePiece tokenizer), only byte-level BPE is "
          "supported");
    }
    for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      QMLP_ASSIGN(const std::string affix, string(model, "model", key, ""));
      if (!affix.empty()) {
        return unsupported(concat("model.", key, " is ", quote(affix), ", none is supported"));
      }
    }
    const Json* dropout = model.find("dropout");
    if (dropout != nullptr && !dropout->is_null() && dropout->number().value_or(1.0) != 0.0) {
      return unsupported("model.dropout is set: encoding would be random, null is required");
    }
    QMLP_ASSIGN(out_.ignore_merges, flag(model, "model", "ignore_merges", false));
    return {};
  }

  Status read_normalizer(const Json* normalizer) {
    if (normalizer == nullptr || normalizer->is_null()) return {};
    QMLP_ASSIGN(const std::string type, string(*normalizer, "normalizer", "type", ""));
    if (type == "NFC") {
      out_.nfc = true;
      return {};
    }
    if (type == "Sequence") {
      const Json* list = normalizer->find("normalizers");
      if (list == nullptr || list->array() == nullptr) {
        return corrupt("normalizer.normalizers is not an array");
      }
      for (const Json& element : *list->array()) {
        if (element.find("normalizers") != nullptr) {
          return unsupported("normalizer: a Sequence within a Sequence is not supported");
        }
        QMLP_TRY(read_normalizer(&element));
      }
      return {};
    }
    return unsupported(
        concat("normalizer.type is ", quote(type), ", only NFC or none is supported"));
  }

  Status read_pre_tokenizer(const Json* value) {
    std::vector<const Json*> steps;
    if (value != nullptr && !value->is_null()) {
      QMLP_TRY(flatten(*value, 0, steps));
    }
    if (steps.size() > kMaxSteps) {
      return unsupported(concat("pre_tokenizer: it has ", steps.size(), " steps, at most ",
                                kMaxSteps, " are supported"));
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      QMLP_ASSIGN(const std::string type, string(*steps[i], "pre_tokenizer", "type", ""));
      const bool last = i + 1 == steps.size();
      if ((type == "ByteLevel") != last) {
        return unsupported(concat("pre_tokenizer: its step ", i + 1, " is ", quote(type),
                                  ", ByteLevel is required as the last step and only there"));
      }
      QMLP_TRY(read_step(*steps[i], type));
    }
    if (steps.empty()) {
      return unsupported("pre_tokenizer: there is none, one that ends in ByteLevel is required");
    }
    return {};
  }

  Status flatten(const Json& value, int depth, std::vector<const Json*>& steps) const {
    if (value.object() == nullptr) {
      return corrupt(
          concat("pre_tokenizer: a step is ", value.kind_name(), ", an object is required"));
    }
    const Json* type = value.find("type");
    if (type == nullptr || type->string() == nullptr || *type->string() != "Sequence") {
      steps.push_back(&value);
      return {};
    }
    const Json* list = value.find("pretokenizers");
    if (list == nullptr || list->array() == nullptr) {
      return corrupt("pre_tokenizer.pretokenizers is not an array");
    }
    if (depth == 8) return unsupported("pre_tokenizer: Sequences are nested too deep");
    for (const Json& element : *list->array()) QMLP_TRY(flatten(element, depth + 1, steps));
    return {};
  }

  Status read_step(const Json& step, const std::string& type) {
    if (type == "ByteLevel") {
      QMLP_ASSIGN(const bool use_regex, flag(step, "ByteLevel", "use_regex", true));
      QMLP_ASSIGN(const bool prefix_space, flag(step, "ByteLevel", "add_prefix_space", true));
      if (!use_regex) {
        out_.pre_tokenizer.set_prefix_space(prefix_space);
        return {};
      }
      QMLP_ASSIGN(SplitStep split, make_split(kGpt2Pattern));
      split.prefix_space = prefix_space;
      out_.pre_tokenizer.add(std::move(split));
      return {};
    }
    if (type == "Digits") {
      QMLP_ASSIGN(const bool individual, flag(step, "Digits", "individual_digits", false));
      const std::string digit = "[" + digits_class() + "]";
      Result<Regex> regex = Regex::compile(individual ? digit : digit + "+");
      if (!regex) return Error{regex.error().code, concat(name_, ": ", regex.error().message)};
      out_.pre_tokenizer.add({*std::move(regex)});
      return {};
    }
    if (type == "Split") return read_split(step);
    return unsupported(concat("pre_tokenizer ", quote(type),
                              " is not supported, only ByteLevel, Digits, Split and Sequence are"));
  }

  Status read_split(const Json& step) {
    static constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {
        {"Removed", SplitBehavior::removed},
        {"Isolated", SplitBehavior::isolated},
        {"MergedWithPrevious", SplitBehavior::merged_with_previous},
        {"MergedWithNext", SplitBehavior::merged_with_next},
        {"Contiguous", SplitBehavior::contiguous},
    };
    const Json* pattern = step.find("pattern");
    const Json* regex = pattern != nullptr ? pattern->find("Regex") : nullptr;
    const Json* literal = pattern != nullptr ? pattern->find("String") : nullptr;
    const Json* source = regex != nullptr ? regex : literal;
    if (source == nullptr || source->string() == nullptr || source->string()->empty()) {
      return corrupt("Split.pattern holds no text 'Regex' or 'String'");
    }
    QMLP_ASSIGN(SplitStep split, make_split(*source->string(), regex == nullptr));
    QMLP_ASSIGN(split.invert, flag(step, "Split", "invert", false));
    QMLP_ASSIGN(const std::string behavior, string(step, "Split", "behavior", ""));
    const auto* known = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                     [&](const auto& entry) { return entry.first == behavior; });
    if (known == std::end(kBehaviors)) {
      return unsupported(concat("Split.behavior is ", quote(behavior), ", which is not known"));
    }
    split.behavior = known->second;
    out_.pre_tokenizer.add(std::move(split));
    return {};
  }

  Result<SplitStep> make_split(std::string_view pattern, bool is_literal = false) const {
    const auto compile = [&]() -> Result<Regex> {
      if (is_literal) return Regex::literal(std::string(pattern));
      QMLP_ASSIGN(const std::string translated, to_pcre2_syntax(pattern));
      return Regex::compile(translated);
    };
    Result<Regex> regex = compile();
    if (!regex) {
      return Error{regex.error().code, concat(name_, ": pre_tokenizer pattern ", quote(pattern),
                                              ": ", regex.error().message)};
    }
    return SplitStep{*std::move(regex)};
  }

  Status check_decoder(const Json* decoder) const {
    const Json* list = decoder != nullptr ? decoder->find("decoders") : nullptr;
    const Json* only = list != nullptr && list->array() != nullptr && list->array()->size() == 1
                           ? list->array()->data()
                           : decoder;
    if (only == nullptr || only->is_null()) {
      return unsupported("decoder: there is none, ByteLevel is required");
    }
    QMLP_ASSIGN(const std::string type, string(*only, "decoder", "type", ""));
    if (type == "ByteLevel") return {};
    return unsupported(concat("decoder.type is ", quote(type), ", ByteLevel is required"));
  }

  Status read_added_tokens(const Json* list) {
    if (list == nullptr || list->is_null()) return {};
    if (list->array() == nullptr) {
      return corrupt(concat("added_tokens is ", list->kind_name(), ", an array is required"));
    }
    for (std::size_t i = 0; i < list->array()->size(); ++i) {
      const Json& element = (*list->array())[i];
      const std::string where = concat("added_tokens[", i, "]");
      const Json* id = element.find("id");
      const auto number = id != nullptr ? id->integer() : std::nullopt;
      if (!number || *number < 0 || *number >= Vocabulary::kMaxSize) {
        return corrupt(concat(where, ".id is no integer from 0 to ", Vocabulary::kMaxSize - 1));
      }
      AddedToken token;
      token.id = static_cast<std::int32_t>(*number);
      QMLP_ASSIGN(token.content, string(element, where, "content", ""));
      if (token.content.empty()) return corrupt(concat(where, " has no content"));
      QMLP_ASSIGN(token.special, flag(element, where, "special", false));
      QMLP_ASSIGN(token.lstrip, flag(element, where, "lstrip", false));
      QMLP_ASSIGN(token.rstrip, flag(element, where, "rstrip", false));
      QMLP_ASSIGN(token.normalized, flag(element, where, "normalized", !token.special));
      QMLP_ASSIGN(const bool single_word, flag(element, where, "single_word", false));
      if (single_word && !token.special) {
        return unsupported(
            concat(where, " (", quote(token.content), "): single_word is not supported"));
      }
      added_.push_back(token);
      (token.normalized ? out_.normalized_tokens : out_.raw_tokens).add(token);
      out_.all_tokens.add(token);
    }
    return {};
  }

  Status read_vocabulary(const Json& model) {
    const Json* vocab = model.find("vocab");
    if (vocab == nullptr || vocab->object() == nullptr) {
      return corrupt(concat("model.vocab is ", vocab != nullptr ? vocab->kind_name() : "missing",
                            ", an object is required"));
    }
    if (vocab->object()->size() == 0) return corrupt("model.vocab is empty");
    std::vector<Vocabulary::Entry> entries;
    entries.reserve(vocab->object()->size() + added_.size());
    for (const JsonMember& member : vocab->object()->members()) {
      const auto id = member.value.integer();
      if (!id) {
        return corrupt(concat("model.vocab: the id of ", quote(member.name), " is ",
                              member.value.kind_name(), ", an integer is required"));
      }
      entries.push_back({member.name, *id, false, false});
    }
    for (const AddedToken& token : added_) {
      entries.push_back({token.content, token.id, true, token.special});
    }
    Result<Vocabulary> vocabulary = Vocabulary::build(entries);
    if (!vocabulary) return corrupt(vocabulary.error().message);
    out_.vocabulary = *std::move(vocabulary);
    return {};
  }

  // The two sides of a merge: "left right", or ["left", "right"].
  static std::optional<std::pair<std::string_view, std::string_view>> sides(const Json& merge) {
    if (const std::string* text = merge.string()) {
      const std::size_t space = text->find(' ');
      if (space == std::string::npos || text->find(' ', space + 1) != std::string::npos) {
        return std::nullopt;
      }
      const std::string_view whole = *text;
      return std::pair(whole.substr(0, space), whole.substr(space + 1));
    }
    const JsonArray* pair = merge.array();
    if (pair == nullptr || pair->size() != 2) return std::nullopt;
    const std::string* left = (*pair)[0].string();
    const std::string* right = (*pair)[1].string();
    if (left == nullptr || right == nullptr) return std::nullopt;
    return std::pair(std::string_view(*left), std::string_view(*right));
  }

  Status read_merges(const Json& model) {
    const Json* merges = model.find("merges");
    if (merges == nullptr || merges->array() == nullptr) {
      return corrupt(concat("model.merges is ", merges != nullptr ? merges->kind_name() : "missing",
                            ", an array is required"));
    }
    const Vocabulary& vocabulary = out_.vocabulary;
    Bpe::Parts parts;
    parts.merges.reserve(merges->array()->size());
    std::string joined;
    for (std::size_t i = 0; i < merges->array()->size(); ++i) {
      const auto pair = sides((*merges->array())[i]);
      if (!pair) {
        return corrupt(
            concat("model.merges[", i, "] is not two tokens (\"a b\" or [\"a\", \"b\"])"));
      }
      joined.assign(pair->first);
      joined += pair->second;
      const auto left = vocabulary.model_id(pair->first);
      const auto right = vocabulary.model_id(pair->second);
      const auto result = vocabulary.model_id(joined);
      if (!left || !right || !result) {
        const std::string_view missing = !left ? pair->first : !right ? pair->second : joined;
        return corrupt(concat("model.merges[", i, "]: ", quote(missing), " is not in model.vocab"));
      }
      // Text never becomes a special token, not even piece by piece.
      if (vocabulary.is_special(*result)) continue;
      parts.merges.push_back({*left, *right, *result});
    }
    QMLP_TRY(read_bytes(model, parts));
    out_.bpe = std::make_unique<const Bpe>(parts);
    return {};
  }

  Status read_bytes(const Json& model, Bpe::Parts& parts) const {
    bool complete = true;
    for (int byte = 0; byte < 256; ++byte) {
      std::string letter;
      append_utf8(byte_to_letter(static_cast<unsigned char>(byte)), letter);
      const auto id = out_.vocabulary.model_id(letter);
      parts.byte_ids[byte] = id.value_or(Bpe::kNone);
      complete = complete && id.has_value();
    }
    QMLP_ASSIGN(const std::string unknown, string(model, "model", "unk_token", ""));
    QMLP_ASSIGN(parts.fuse_unknown, flag(model, "model", "fuse_unk", false));
    if (complete || unknown.empty()) return {};
    const auto id = out_.vocabulary.model_id(unknown);
    if (!id) {
      return corrupt(concat("model.unk_token ", quote(unknown), " is not in model.vocab"));
    }
    parts.unknown_id = *id;
    return {};
  }

  std::string_view name_;
  TokenizerFile out_;
  std::vector<AddedToken> added_;
};

}  // namespace

Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name) {
  QMLP_ASSIGN(const Json root, Json::parse(json, name));
  return Reader(name).run(root);
}

}  // namespace qmlp::text
