#include "text/tokenizer_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/json.h"
#include "text/byte_alphabet.h"
#include "text/file_reader.h"
#include "text/post_processor.h"
#include "text/quote.h"
#include "text/tokenizer_config.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

// The value that Hugging Face's reader makes of a number that is written with the fewest digits: it
// rounds the digits, then their quotient by a power of ten. Paths whose scores are equal depend on
// the last bit.
double twice_rounded(double exact) {
  char text[40];
  const auto written =
      std::to_chars(text, std::end(text), std::fabs(exact), std::chars_format::scientific);
  std::uint64_t digits = 0;
  int exponent = 0;
  const char* at = text;
  for (bool fraction = false; at != written.ptr && *at != 'e'; ++at) {
    if (*at == '.') {
      fraction = true;
      continue;
    }
    digits = digits * 10 + static_cast<std::uint64_t>(*at - '0');
    exponent -= fraction ? 1 : 0;
  }
  int written_exponent = 0;
  if (at != written.ptr) {
    at += at[1] == '+' ? 2 : 1;
    std::from_chars(at, written.ptr, written_exponent);
  }
  exponent += written_exponent;
  // Scores beyond 1e-290 do not occur; there the exact value is as good.
  if (std::abs(exponent) > 308) return exact;
  char power_text[16];
  const int length = std::snprintf(power_text, sizeof power_text, "1e%d", std::abs(exponent));
  double power = 1.0;
  std::from_chars(power_text, power_text + length, power);
  const auto rounded = static_cast<double>(digits);
  return std::copysign(exponent < 0 ? rounded / power : rounded * power, exact);
}

// Reads one tokenizer.json.
class Reader {
 public:
  explicit Reader(std::string_view name) : reader_(name) {}

  Result<TokenizerFile> run(const Json& root, std::span<const AddedToken> more) {
    if (root.object() == nullptr) {
      return reader_.corrupt(concat("it is ", root.kind_name(), ", an object is required"));
    }
    const Json* model = root.find("model");
    if (model == nullptr || model->object() == nullptr) {
      return reader_.corrupt("it has no object 'model'");
    }
    QMLP_ASSIGN(const bool is_bpe, check_model(*model));
    QMLP_ASSIGN(out_.normalizer, read_normalizer(reader_, root.find("normalizer")));
    QMLP_ASSIGN(out_.pre_tokenizer, read_pre_tokenizer(reader_, root.find("pre_tokenizer")));
    QMLP_ASSIGN(out_.decoder, read_decoder(reader_, root.find("decoder")));
    QMLP_TRY(read_added_tokens(root.find("added_tokens"), more));
    if (is_bpe) {
      QMLP_TRY(read_bpe_vocabulary(*model));
      QMLP_TRY(read_merges(*model));
    } else {
      QMLP_TRY(read_unigram(*model));
    }
    QMLP_TRY(read_post_processor(reader_, root.find("post_processor"), out_));
    return std::move(out_);
  }

 private:
  // Whether the model is BPE, else it is unigram.
  Result<bool> check_model(const Json& model) {
    // Files of the first versions name no type; only BPE has merges, only unigram a list of scores.
    const Json* vocab = model.find("vocab");
    const bool is_list = vocab != nullptr && vocab->array() != nullptr;
    QMLP_ASSIGN(const std::string type, reader_.string(model, "model", "type",
                                                       model.find("merges") != nullptr ? "BPE"
                                                       : is_list                       ? "Unigram"
                                                                                       : ""));
    if (type == "Unigram") return false;
    if (type != "BPE") {
      return reader_.unsupported(
          concat("model.type is ", quote(type), ", only BPE and Unigram are supported"));
    }
    for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      QMLP_ASSIGN(const std::string affix, reader_.string(model, "model", key, ""));
      if (!affix.empty()) {
        return reader_.unsupported(
            concat("model.", key, " is ", quote(affix), ", none is supported"));
      }
    }
    const Json* dropout = model.find("dropout");
    if (dropout != nullptr && !dropout->is_null() && dropout->number().value_or(1.0) != 0.0) {
      return reader_.unsupported(
          "model.dropout is set: encoding would be random, null is required");
    }
    QMLP_ASSIGN(out_.ignore_merges, reader_.flag(model, "model", "ignore_merges", false));
    return true;
  }

  Status read_added_tokens(const Json* list, std::span<const AddedToken> more) {
    if (list != nullptr && !list->is_null()) {
      if (list->array() == nullptr) {
        return reader_.corrupt(
            concat("added_tokens is ", list->kind_name(), ", an array is required"));
      }
      for (std::size_t i = 0; i < list->array()->size(); ++i) {
        const Json& element = (*list->array())[i];
        const Json* id = element.find("id");
        QMLP_ASSIGN(
            AddedToken token,
            read_added_token(reader_, element, id != nullptr ? id->integer().value_or(-1) : -1,
                             concat("added_tokens[", i, "]")));
        added_.push_back(std::move(token));
      }
    }
    // Sorted texts, since there may be thousands.
    std::vector<std::string> known;
    for (const AddedToken& token : added_) known.push_back(token.content);
    std::sort(known.begin(), known.end());
    for (const AddedToken& token : more) {
      if (!std::binary_search(known.begin(), known.end(), token.content)) added_.push_back(token);
    }
    for (const AddedToken& token : added_) QMLP_TRY(match_added_token(token));
    std::sort(out_.normalized_texts.begin(), out_.normalized_texts.end());
    return {};
  }

  Status match_added_token(AddedToken token) {
    QMLP_TRY(out_.all_tokens.add(token));
    if (!token.normalized) return out_.raw_tokens.add(token);
    // It is looked for in normalized text, so in the form it takes there.
    QMLP_ASSIGN(RegexScratch scratch, RegexScratch::make(token.content.size()));
    Piece piece{token.content, true};
    if (const Status status = out_.normalizer.run(piece, scratch); !status) {
      return reader_.within(concat("added token ", quote(token.content)), status.error());
    }
    if (piece.text != token.content) out_.normalized_texts.emplace_back(token.id, piece.text);
    token.content = std::move(piece.text);
    return out_.normalized_tokens.add(token);
  }

  Status read_bpe_vocabulary(const Json& model) {
    const Json* vocab = model.find("vocab");
    if (vocab == nullptr || vocab->object() == nullptr) {
      return reader_.corrupt(concat("model.vocab is ",
                                    vocab != nullptr ? vocab->kind_name() : "missing",
                                    ", an object is required"));
    }
    if (vocab->object()->size() == 0) return reader_.corrupt("model.vocab is empty");
    std::vector<Vocabulary::Entry> entries;
    entries.reserve(vocab->object()->size() + added_.size());
    for (const JsonMember& member : vocab->object()->members()) {
      const auto id = member.value.integer();
      if (!id) {
        return reader_.corrupt(concat("model.vocab: the id of ", quote(member.name), " is ",
                                      member.value.kind_name(), ", an integer is required"));
      }
      entries.push_back({member.name, *id, false, false});
    }
    return build_vocabulary(entries);
  }

  Status build_vocabulary(std::vector<Vocabulary::Entry>& entries) {
    for (const AddedToken& token : added_) {
      entries.push_back({token.content, token.id, true, token.special});
    }
    Result<Vocabulary> vocabulary = Vocabulary::build(entries);
    if (!vocabulary) return reader_.corrupt(vocabulary.error().message);
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
      return reader_.corrupt(concat("model.merges is ",
                                    merges != nullptr ? merges->kind_name() : "missing",
                                    ", an array is required"));
    }
    const Vocabulary& vocabulary = out_.vocabulary;
    Bpe::Parts parts;
    parts.merges.reserve(merges->array()->size());
    bool apart = true;
    std::string joined;
    for (std::size_t i = 0; i < merges->array()->size(); ++i) {
      const auto pair = sides((*merges->array())[i]);
      if (!pair) {
        return reader_.corrupt(
            concat("model.merges[", i, "] is not two tokens (\"a b\" or [\"a\", \"b\"])"));
      }
      joined.assign(pair->first);
      joined += pair->second;
      const auto left = vocabulary.model_id(pair->first);
      const auto right = vocabulary.model_id(pair->second);
      const auto result = vocabulary.model_id(joined);
      if (!left || !right || !result) {
        const std::string_view missing = !left ? pair->first : !right ? pair->second : joined;
        return reader_.corrupt(
            concat("model.merges[", i, "]: ", quote(missing), " is not in model.vocab"));
      }
      apart = apart && !crosses_word_start(joined);
      // Text never becomes a special token, not even piece by piece.
      if (vocabulary.is_special(*result)) continue;
      parts.merges.push_back({*left, *right, *result});
    }
    const bool of_bytes = out_.pre_tokenizer.byte_level();
    QMLP_ASSIGN(const bool byte_fallback, reader_.flag(model, "model", "byte_fallback", false));
    const bool complete = of_bytes ? read_bytes(parts) : read_characters(byte_fallback, parts);
    if (of_bytes && byte_fallback && !complete) {
      return reader_.unsupported(
          "model.byte_fallback is true with a byte-level pre_tokenizer and a vocabulary that lacks "
          "bytes, which is not supported");
    }
    QMLP_TRY(read_unknown(model, complete, parts));
    parts.words_apart = apart && !of_bytes && vocabulary.model_id(kWordStart).has_value();
    out_.bpe = std::make_unique<const Bpe>(parts);
    return {};
  }

  static constexpr std::string_view kWordStart = "\u2581";

  // Whether a word's start follows another character within the text of a token.
  static bool crosses_word_start(std::string_view token) {
    for (std::size_t at = token.find(kWordStart); at != std::string_view::npos;
         at = token.find(kWordStart, at + 1)) {
      if (at > 0 && !token.substr(0, at).ends_with(kWordStart)) return true;
    }
    return false;
  }

  // `complete`: no text needs it.
  Status read_unknown(const Json& model, bool complete, Bpe::Parts& parts) const {
    QMLP_ASSIGN(const std::string unknown, reader_.string(model, "model", "unk_token", ""));
    QMLP_ASSIGN(parts.fuse_unknown, reader_.flag(model, "model", "fuse_unk", false));
    if (complete || unknown.empty()) return {};
    const auto id = out_.vocabulary.model_id(unknown);
    if (!id) {
      return reader_.corrupt(concat("model.unk_token ", quote(unknown), " is not in model.vocab"));
    }
    parts.unknown_id = *id;
    return {};
  }

  // Whether the vocabulary has all bytes.
  bool read_bytes(Bpe::Parts& parts) const {
    bool complete = true;
    for (int byte = 0; byte < 256; ++byte) {
      std::string letter;
      append_utf8(byte_to_letter(static_cast<unsigned char>(byte)), letter);
      const auto id = out_.vocabulary.model_id(letter);
      parts.byte_ids[byte] = id.value_or(Bpe::kNone);
      complete = complete && id.has_value();
    }
    return complete;
  }

  bool read_characters(bool byte_fallback, Bpe::Parts& parts) const {
    parts.of_characters = true;
    const Vocabulary& vocabulary = out_.vocabulary;
    for (std::int32_t id = 0; id < vocabulary.size(); ++id) {
      if (!vocabulary.contains(id)) continue;
      const std::string_view text = vocabulary.text(id);
      if (text.empty() || !vocabulary.model_id(text)) continue;
      const Utf8Unit unit = first_utf8_unit(text);
      if (unit.length == text.size()) parts.characters.emplace_back(unit.code, id);
    }
    return read_fallback(byte_fallback, parts.byte_ids);
  }

  bool read_fallback(bool byte_fallback, std::int32_t (&ids)[256]) const {
    constexpr char kDigits[] = "0123456789ABCDEF";
    bool complete = true;
    for (int byte = 0; byte < 256; ++byte) {
      const std::string token = concat("<0x", std::string(1, kDigits[byte / 16]),
                                       std::string(1, kDigits[byte % 16]), ">");
      const auto id = byte_fallback ? out_.vocabulary.model_id(token) : std::nullopt;
      ids[byte] = id.value_or(Bpe::kNone);
      complete = complete && id.has_value();
    }
    return complete;
  }

  Status read_unigram(const Json& model) {
    QMLP_ASSIGN(const JsonArray* list, reader_.array(model, "model", "vocab"));
    Unigram::Parts parts;
    std::vector<Vocabulary::Entry> entries;
    for (std::size_t i = 0; i < list->size(); ++i) {
      const JsonArray* pair = (*list)[i].array();
      const std::string* text =
          pair != nullptr && pair->size() == 2 ? (*pair)[0].string() : nullptr;
      const auto score = text != nullptr ? (*pair)[1].number() : std::nullopt;
      if (!score) {
        return reader_.corrupt(
            concat("model.vocab[", i, "] is not a token and its score ([\"a\", -1.5])"));
      }
      entries.push_back({*text, static_cast<std::int64_t>(i), false, false});
      parts.tokens.push_back({*text, twice_rounded(*score), static_cast<std::int32_t>(i), true});
    }
    if (entries.empty()) return reader_.corrupt("model.vocab is empty");
    QMLP_TRY(build_vocabulary(entries));
    // Text never becomes a special token.
    for (Unigram::Token& token : parts.tokens) {
      token.usable = !out_.vocabulary.is_special(token.id);
    }
    QMLP_ASSIGN(const auto unknown, reader_.integer(model, "model", "unk_id"));
    if (!unknown || *unknown < 0 || *unknown >= static_cast<std::int64_t>(list->size())) {
      return reader_.corrupt(concat("model.unk_id is no integer from 0 to ", list->size() - 1));
    }
    parts.unknown_id = static_cast<std::int32_t>(*unknown);
    QMLP_ASSIGN(const bool byte_fallback, reader_.flag(model, "model", "byte_fallback", false));
    read_fallback(byte_fallback, parts.byte_ids);
    Result<Unigram> unigram = Unigram::build(parts);
    if (!unigram) return reader_.within("model.vocab", unigram.error());
    out_.unigram = std::make_unique<const Unigram>(*std::move(unigram));
    return {};
  }

  FileReader reader_;
  TokenizerFile out_;
  std::vector<AddedToken> added_;
};

}  // namespace

std::string TokenizerFile::token_bytes(std::int32_t id, bool first) const {
  const bool added = vocabulary.is_added(id);
  if (added && !normalized_texts.empty()) {
    const auto found = std::lower_bound(
        normalized_texts.begin(), normalized_texts.end(), id,
        [](const auto& entry, std::int32_t wanted) { return entry.first < wanted; });
    if (found != normalized_texts.end() && found->first == id) {
      return decoder.bytes(found->second, true, first);
    }
  }
  return decoder.bytes(vocabulary.text(id), added, first);
}

Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name,
                                           std::span<const AddedToken> more) {
  QMLP_ASSIGN(const Json root, Json::parse(json, name));
  return Reader(name).run(root, more);
}

}  // namespace qmlp::text
