#include "qmlp/tokenizer.h"

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "text/byte_alphabet.h"
#include "text/chat_template.h"
#include "text/nfc.h"
#include "text/quote.h"
#include "text/regex.h"
#include "text/tokenizer_file.h"
#include "text/utf8.h"

namespace qmlp {
namespace {

using text::AddedTokenMatcher;
using text::Bpe;
using text::RegexScratch;

// Vocabularies of some hundred thousand tokens take some ten megabytes.
constexpr std::uint64_t kMaxFileBytes = std::uint64_t{256} << 20;

Error invalid_utf8(std::string_view what, std::size_t offset) {
  return Error{Errc::invalid_argument, concat(what, ": invalid UTF-8 at byte offset ", offset)};
}

}  // namespace

struct Tokenizer::Impl {
  text::TokenizerFile file;
  text::ChatTemplate chat;

  // Appends the tokens of valid UTF-8.
  Status encode(std::string_view text, std::vector<std::int32_t>& out) const;
};

namespace {

// Encodes the text of one call.
class Encoder {
 public:
  Encoder(const text::TokenizerFile& file, RegexScratch& scratch, std::vector<std::int32_t>& out)
      : file_(file), regex_scratch_(scratch), out_(out) {}

  Status run(std::string_view text) {
    text::split_at_ordinary_tokens(
        file_.raw_tokens, text, [this](std::int32_t id) { out_.push_back(id); },
        [this](std::string_view piece) { normalize(piece); });
    return status_;
  }

 private:
  void normalize(std::string_view piece) {
    std::optional<std::string> normalized;
    if (file_.nfc) normalized = text::to_nfc(piece);
    text::split_at_ordinary_tokens(
        file_.normalized_tokens, normalized ? std::string_view(*normalized) : piece,
        [this](std::int32_t id) { out_.push_back(id); },
        [this](std::string_view part) { split(part); });
  }

  void split(std::string_view part) {
    if (!status_) return;
    status_ = file_.pre_tokenizer.run(part, regex_scratch_,
                                      [this](std::string_view word) { encode_word(word); });
  }

  void encode_word(std::string_view word) {
    if (file_.ignore_merges) {
      letters_.clear();
      for (const char c : word) {
        text::append_utf8(text::byte_to_letter(static_cast<unsigned char>(c)), letters_);
      }
      const auto id = file_.vocabulary.model_id(letters_);
      if (id && !file_.vocabulary.is_special(*id)) {
        out_.push_back(*id);
        return;
      }
    }
    file_.bpe->encode_word(word, bpe_scratch_, out_);
  }

  const text::TokenizerFile& file_;
  RegexScratch& regex_scratch_;
  std::vector<std::int32_t>& out_;
  Bpe::Scratch bpe_scratch_;
  std::string letters_;
  Status status_;
};

}  // namespace

Status Tokenizer::Impl::encode(std::string_view text, std::vector<std::int32_t>& out) const {
  QMLP_ASSIGN(RegexScratch scratch, RegexScratch::make(text.size()));
  return Encoder(file, scratch, out).run(text);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;

Result<std::shared_ptr<const Tokenizer>> Tokenizer::open(const std::string& checkpoint_path) {
  auto impl = std::make_unique<Impl>();
  const std::string path = join_path(checkpoint_path, "tokenizer.json");
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  if (kind == PathKind::missing) {
    QMLP_ASSIGN(const PathKind other, path_kind(join_path(checkpoint_path, "tokenizer.model")));
    const std::string_view found =
        other == PathKind::missing ? "" : " (its tokenizer.model is SentencePiece)";
    return Error{other == PathKind::missing ? Errc::io : Errc::unsupported,
                 concat(checkpoint_path, ": there is no tokenizer.json", found,
                        ", a byte-level BPE tokenizer.json is required")};
  }
  QMLP_ASSIGN(const std::string json, read_text_file(path, kMaxFileBytes));
  QMLP_ASSIGN(impl->file, text::parse_tokenizer_file(json, path));
  QMLP_ASSIGN(impl->chat, text::ChatTemplate::open(checkpoint_path));
  return std::shared_ptr<const Tokenizer>(new Tokenizer(std::move(impl)));
}

std::int64_t Tokenizer::vocab_size() const noexcept { return impl_->file.vocabulary.size(); }

Result<std::vector<std::int32_t>> Tokenizer::encode(std::string_view text) const {
  if (const auto offset = text::find_invalid_utf8(text)) return invalid_utf8("text", *offset);
  std::vector<std::int32_t> ids;
  QMLP_TRY(impl_->encode(text, ids));
  return ids;
}

Result<std::vector<std::int32_t>> Tokenizer::encode_chat(
    std::span<const ChatMessage> messages) const {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    for (const std::string* part : {&messages[i].role, &messages[i].content}) {
      if (const auto offset = text::find_invalid_utf8(*part)) {
        return invalid_utf8(
            concat("message ", i + 1, part == &messages[i].role ? " role" : " content"), *offset);
      }
    }
  }
  QMLP_ASSIGN(const text::MarkedText prompt, impl_->chat.render(messages));
  std::vector<std::int32_t> ids;
  std::size_t done = 0;  // all before it is encoded
  const std::string_view bytes = prompt.bytes;
  const auto encode_until = [&](std::size_t end) -> Status {
    if (done >= end) return {};
    const Status status = impl_->encode(bytes.substr(done, end - done), ids);
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
      if (!found->token->special) continue;
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
  return vocabulary.bytes(id);
}

Result<std::string> Tokenizer::decode(std::span<const std::int32_t> ids) const {
  std::string out;
  for (const std::int32_t id : ids) {
    QMLP_ASSIGN(const std::string bytes, token_bytes(id));
    out += bytes;
  }
  return out;
}

bool Tokenizer::is_special(std::int32_t id) const noexcept {
  return impl_->file.vocabulary.is_special(id);
}

std::optional<std::int32_t> Tokenizer::token_id(std::string_view token) const {
  return impl_->file.vocabulary.id(token);
}

}  // namespace qmlp
