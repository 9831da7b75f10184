#include "qmlp/tokenizer.h"

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "text/byte_alphabet.h"
#include "text/chat_template.h"
#include "text/regex.h"
#include "text/spm_file.h"
#include "text/tokenizer_config.h"
#include "text/tokenizer_file.h"
#include "text/utf8.h"

namespace qmlp {
namespace {

using text::AddedTokenMatcher;
using text::Bpe;
using text::RegexScratch;

// Vocabularies of some hundred thousand tokens take some ten megabytes.
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{256} << 20;
constexpr std::size_t kMaxTextBytes = std::size_t{256} << 20;

Error invalid_utf8(std::string_view what, std::size_t offset) {
  return Error{Errc::invalid_argument, concat(what, ": invalid UTF-8 at byte offset ", offset)};
}

}  // namespace

struct Tokenizer::Impl {
  text::TokenizerFile file;
  text::ChatTemplate chat;

  // Appends the tokens of valid UTF-8. `at_start`: it is the start of the whole text.
  Status encode(std::string_view text, bool at_start, std::vector<std::int32_t>& out) const;
};

namespace {

// Encodes the text of one call.
class Encoder {
 public:
  Encoder(const text::TokenizerFile& file, RegexScratch& scratch, std::vector<std::int32_t>& out)
      : file_(file), regex_scratch_(scratch), out_(out) {}

  Status run(std::string_view text, bool at_start) {
    text::split_at_ordinary_tokens(
        file_.raw_tokens, text, [this](std::int32_t id) { out_.push_back(id); },
        [&](std::string_view piece, std::size_t begin) {
          normalize(piece, at_start && begin == 0);
        });
    return status_;
  }

 private:
  void normalize(std::string_view piece, bool at_start) {
    if (!status_) return;
    if (file_.normalizer.empty()) {
      find_tokens(piece, at_start);
      return;
    }
    text::Piece normalized{std::string(piece), at_start};
    status_ = file_.normalizer.run(normalized, regex_scratch_);
    if (status_) find_tokens(normalized.text, normalized.at_start);
  }

  void find_tokens(std::string_view piece, bool at_start) {
    text::split_at_ordinary_tokens(
        file_.normalized_tokens, piece, [this](std::int32_t id) { out_.push_back(id); },
        [&](std::string_view part, std::size_t begin) { split(part, at_start && begin == 0); });
  }

  void split(std::string_view part, bool at_start) {
    if (!status_) return;
    status_ = file_.pre_tokenizer.run(part, at_start, regex_scratch_,
                                      [this](std::string_view word) { encode_word(word); });
  }

  void encode_word(std::string_view word) {
    if (file_.unigram != nullptr) {
      file_.unigram->encode_word(vocabulary_text(word), unigram_scratch_, out_);
      return;
    }
    if (file_.ignore_merges) {
      const auto id = file_.vocabulary.model_id(vocabulary_text(word));
      if (id && !file_.vocabulary.is_special(*id)) {
        out_.push_back(*id);
        return;
      }
    }
    file_.bpe->encode_word(word, bpe_scratch_, out_);
  }

  // The word as the vocabulary spells it.
  std::string_view vocabulary_text(std::string_view word) {
    if (!file_.pre_tokenizer.byte_level()) return word;
    letters_.clear();
    for (const char c : word) {
      text::append_utf8(text::byte_to_letter(static_cast<unsigned char>(c)), letters_);
    }
    return letters_;
  }

  const text::TokenizerFile& file_;
  RegexScratch& regex_scratch_;
  std::vector<std::int32_t>& out_;
  Bpe::Scratch bpe_scratch_;
  text::Unigram::Scratch unigram_scratch_;
  std::string letters_;
  Status status_;
};

// Positions within a text are 32-bit in the models.
Status check_text(std::string_view text) {
  if (text.size() > kMaxTextBytes) {
    return Error{Errc::unsupported, concat("text: it holds ", text.size(), " bytes, at most ",
                                           kMaxTextBytes, " are supported")};
  }
  if (const auto offset = text::find_invalid_utf8(text)) return invalid_utf8("text", *offset);
  return {};
}

}  // namespace

Status Tokenizer::Impl::encode(std::string_view text, bool at_start,
                               std::vector<std::int32_t>& out) const {
  QMLP_ASSIGN(RegexScratch scratch, RegexScratch::make(text.size()));
  return Encoder(file, scratch, out).run(text, at_start);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::shared_ptr<const Tokenizer>> Tokenizer::open(const std::string& checkpoint_path) {
  auto impl = std::make_unique<Impl>();
  const std::string path = join_path(checkpoint_path, "tokenizer.json");
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  QMLP_ASSIGN(const text::TokenizerConfig config, text::TokenizerConfig::open(checkpoint_path));
  if (kind != PathKind::missing) {
    QMLP_ASSIGN(const std::string json, read_text_file(path, kMaxFileBytes));
    QMLP_ASSIGN(impl->file, text::parse_tokenizer_file(json, path, config.added_tokens));
    QMLP_TRY(config.add_bos_and_eos(false, impl->file));
  } else {
    const std::string model = join_path(checkpoint_path, "tokenizer.model");
    QMLP_ASSIGN(const PathKind other, path_kind(model));
    if (other == PathKind::missing) {
      return Error{Errc::io, concat(checkpoint_path,
                                    ": there is no tokenizer.json and no "
                                    "tokenizer.model, one is required")};
    }
    QMLP_ASSIGN(const std::string bytes, read_text_file(model, kMaxFileBytes));
    QMLP_ASSIGN(impl->file, text::parse_spm_file(bytes, model, config));
    QMLP_TRY(config.add_bos_and_eos(true, impl->file));
  }
  QMLP_ASSIGN(impl->chat, text::ChatTemplate::open(checkpoint_path, config));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::int64_t Tokenizer::vocab_size() const noexcept { return impl_->file.vocabulary.size(); }

Result<std::vector<std::int32_t>> Tokenizer::encode(std::string_view text) const {
  QMLP_TRY(check_text(text));
  std::vector<std::int32_t> ids;
  QMLP_TRY(impl_->encode(text, true, ids));
  return ids;
}

Result<std::vector<std::int32_t>> Tokenizer::encode_prompt(std::string_view text) const {
  QMLP_TRY(check_text(text));
  std::vector<std::int32_t> ids = impl_->file.before;
  QMLP_TRY(impl_->encode(text, true, ids));
  ids.insert(ids.end(), impl_->file.after.begin(), impl_->file.after.end());
  return ids;
}

Result<std::vector<std::int32_t>> Tokenizer::encode_chat(std::span<const ChatMessage> messages,
                                                         const ChatOptions& options) const {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    for (const std::string* part : {&messages[i].role, &messages[i].content}) {
      if (const auto offset = text::find_invalid_utf8(*part)) {
        return invalid_utf8(
            concat("message ", i + 1, part == &messages[i].role ? " role" : " content"), *offset);
      }
    }
  }
  QMLP_ASSIGN(const text::MarkedText prompt, impl_->chat.render(messages, options));
  std::vector<std::int32_t> ids;
  std::size_t done = 0;  // all before it is encoded
  const std::string_view bytes = prompt.bytes;
  const auto encode_until = [&](std::size_t end) -> Status {
    if (done >= end) return {};
    const Status status = impl_->encode(bytes.substr(done, end - done), done == 0, ids);
    done = end;
    return status;
  };
  for (const auto& [begin, end] : prompt.template_parts()) {
    // Only what the template itself wrote can be a special token.
    const std::string_view own = bytes.substr(0, end);
    for (std::size_t from = begin;;) {
      const auto found = impl_->file.all_tokens.find(own, from);
      if (!found) break;
      from = found->end;
      if (!found->token->special || !impl_->file.all_tokens.counts(*found, bytes)) continue;
      std::size_t start = found->begin;
      std::size_t stop = found->end;
      if (found->token->lstrip) start -= text::trailing_space(bytes.substr(0, start));
      if (found->token->rstrip) stop += text::leading_space(bytes.substr(stop));
      QMLP_TRY(encode_until(start));
      ids.push_back(found->token->id);
      done = stop;
    }
  }
  QMLP_TRY(encode_until(bytes.size()));
  return ids;
}

Result<std::string> Tokenizer::token_bytes(std::int32_t id) const {
  const text::Vocabulary& vocabulary = impl_->file.vocabulary;
  if (!vocabulary.contains(id)) {
    return Error{Errc::invalid_argument, concat("token id ", id, ": the vocabulary has no such id",
                                                " (its size is ", vocabulary.size(), ")")};
  }
  return impl_->file.token_bytes(id, false);
}

Result<std::string> Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string out;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!impl_->file.vocabulary.contains(ids[i])) return token_bytes(ids[i]).error();
    out += impl_->file.token_bytes(ids[i], i == 0);
  }
  text::Decoder::Strip strip = impl_->file.decoder.strip();
  text::take_strip(strip, out);
  return out;
}

bool Tokenizer::is_special(std::int32_t id) const noexcept {
  return impl_->file.vocabulary.is_special(id);
}

std::optional<std::int32_t> Tokenizer::token_id(std::string_view token) const {
  return impl_->file.vocabulary.id(token);
}

Detokenizer::Detokenizer(const Tokenizer& tokenizer)
    : tokenizer_(&tokenizer), strip_(tokenizer.impl_->file.decoder.strip().count) {}

std::string Detokenizer::push(std::int32_t id) {
  const text::TokenizerFile& file = tokenizer_->impl_->file;
  if (!file.vocabulary.contains(id)) return {};
  std::string bytes = file.token_bytes(id, first_);
  first_ = false;
  text::Decoder::Strip strip{file.decoder.strip().character, strip_};
  text::take_strip(strip, bytes);
  strip_ = strip.count;
  return utf8_.push(bytes);
}

std::string Detokenizer::finish() { return utf8_.finish(); }

}  // namespace qmlp
