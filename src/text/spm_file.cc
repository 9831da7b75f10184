#include "text/spm_file.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "text/charsmap.h"
#include "text/file_reader.h"
#include "text/quote.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::string_view kWordStart = "\u2581";

// Fields of a protocol buffer's message, one after another.
class Message {
 public:
  struct Field {
    std::uint32_t number = 0;
    std::uint64_t integer = 0;  // of a varint, or of 32 or 64 bits as they are
    std::string_view bytes;     // of a string or message
  };

  explicit Message(std::string_view bytes) : rest_(bytes) {}

  bool at_end() const { return rest_.empty(); }
  // Empty when the bytes are no field.
  std::optional<Field> next() {
    Field field;
    const auto key = varint();
    if (!key || *key >> 3 == 0 || *key >> 35 != 0) return std::nullopt;
    field.number = static_cast<std::uint32_t>(*key >> 3);
    switch (*key & 7) {
      case 0: {
        const auto value = varint();
        if (!value) return std::nullopt;
        field.integer = *value;
        return field;
      }
      case 1:
        return fixed(8, field);
      case 5:
        return fixed(4, field);
      case 2: {
        const auto length = varint();
        if (!length || *length > rest_.size()) return std::nullopt;
        field.bytes = rest_.substr(0, *length);
        rest_.remove_prefix(*length);
        return field;
      }
      default:
        return std::nullopt;
    }
  }

 private:
  std::optional<std::uint64_t> varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }
  std::optional<Field> fixed(std::size_t bytes, Field& field) {
    if (rest_.size() < bytes) return std::nullopt;
    for (std::size_t i = 0; i < bytes; ++i) {
      field.integer |= std::uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
    }
    rest_.remove_prefix(bytes);
    return field;
  }

  std::string_view rest_;
};

enum class PieceKind : std::uint8_t { normal = 1, unknown, control, user_defined, unused, byte };

struct SpmPiece {
  std::string_view text;
  float score = 0.0F;
  PieceKind kind = PieceKind::normal;
};

class Reader {
 public:
  Reader(std::string_view name, const TokenizerConfig& config) : reader_(name), config_(config) {}

  Result<TokenizerFile> run(std::string_view bytes) {
    QMLP_TRY(each_field(bytes, "the file", [this](const Message::Field& field) -> Status {
      if (field.number == 1) return read_piece(field.bytes);
      if (field.number == 2) return read_trainer(field.bytes);
      if (field.number == 3) return read_normalizer(field.bytes);
      return {};
    }));
    if (pieces_.empty()) return reader_.corrupt("it holds no pieces");
    if (model_type_ != 2) {
      constexpr std::string_view kTypes[] = {"", "unigram", "bpe", "word", "char"};
      const std::string_view type =
          model_type_ < std::size(kTypes) ? kTypes[model_type_] : std::string_view("unknown");
      return reader_.unsupported(concat("its model type is ", quote(type),
                                        ", only 'bpe' is supported without a tokenizer.json"));
    }
    if (whitespace_suffix_ || !escape_whitespace_) {
      return reader_.unsupported(
          "it marks spaces in another way than before words, which is not supported");
    }
    QMLP_TRY(build_vocabulary());
    QMLP_TRY(build_bpe());
    QMLP_TRY(build_normalizer());
    QMLP_TRY(add_tokens());
    QMLP_ASSIGN(out_.decoder, build_decoder());
    return std::move(out_);
  }

 private:
  template <class Handle>
  Status each_field(std::string_view bytes, std::string_view what, const Handle& handle) const {
    Message message(bytes);
    while (!message.at_end()) {
      const auto field = message.next();
      if (!field) return reader_.corrupt(concat("a broken field in ", what));
      QMLP_TRY(handle(*field));
    }
    return {};
  }

  Status read_piece(std::string_view bytes) {
    SpmPiece piece;
    const std::string where = concat("piece ", pieces_.size());
    QMLP_TRY(each_field(bytes, where, [&](const Message::Field& field) -> Status {
      if (field.number == 1) piece.text = field.bytes;
      if (field.number == 2) {
        piece.score = std::bit_cast<float>(static_cast<std::uint32_t>(field.integer));
      }
      if (field.number == 3) {
        if (field.integer < 1 || field.integer > 6) {
          return reader_.corrupt(concat(where, " is of the unknown type ", field.integer));
        }
        piece.kind = static_cast<PieceKind>(field.integer);
      }
      return {};
    }));
    if (piece.text.empty() || find_invalid_utf8(piece.text)) {
      return reader_.corrupt(concat(where, " holds no UTF-8 text"));
    }
    if (!std::isfinite(piece.score)) return reader_.corrupt(concat(where, ": no finite score"));
    if (piece.kind == PieceKind::unused) {
      return reader_.unsupported(
          concat(where, " (", quote(piece.text), ") is unused, which is not supported"));
    }
    pieces_.push_back(piece);
    return {};
  }

  Status read_trainer(std::string_view bytes) {
    return each_field(bytes, "trainer_spec", [this](const Message::Field& field) -> Status {
      if (field.number == 3) model_type_ = field.integer;
      if (field.number == 24) whitespace_suffix_ = field.integer != 0;
      if (field.number == 35) byte_fallback_ = field.integer != 0;
      if (field.number == 41) bos_id_ = field.integer;
      return {};
    });
  }

  Status read_normalizer(std::string_view bytes) {
    return each_field(bytes, "normalizer_spec", [this](const Message::Field& field) -> Status {
      if (field.number == 2) charsmap_ = field.bytes;
      if (field.number == 3) dummy_prefix_ = field.integer != 0;
      if (field.number == 4) remove_extra_spaces_ = field.integer != 0;
      if (field.number == 5) escape_whitespace_ = field.integer != 0;
      return {};
    });
  }

  Status build_vocabulary() {
    std::vector<Vocabulary::Entry> entries;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const PieceKind kind = pieces_[i].kind;
      const bool special = kind == PieceKind::control || kind == PieceKind::unknown;
      entries.push_back({pieces_[i].text, static_cast<std::int64_t>(i), special, special});
    }
    for (const AddedToken& token : config_.added_tokens) {
      entries.push_back({token.content, token.id, true, token.special});
    }
    Result<Vocabulary> vocabulary = Vocabulary::build(entries);
    if (!vocabulary) return reader_.corrupt(vocabulary.error().message);
    out_.vocabulary = *std::move(vocabulary);
    return {};
  }

  // The piece with this text that merges may use.
  std::optional<std::int32_t> mergeable(std::string_view text) const {
    const auto id = out_.vocabulary.model_id(text);
    if (!id || static_cast<std::size_t>(*id) >= pieces_.size()) return std::nullopt;
    return pieces_[static_cast<std::size_t>(*id)].kind == PieceKind::normal ? id : std::nullopt;
  }

  Status build_bpe() {
    Bpe::Parts parts;
    parts.of_characters = true;
    parts.fuse_unknown = true;
    std::fill(std::begin(parts.byte_ids), std::end(parts.byte_ids), Bpe::kNone);
    std::vector<std::int32_t> order;  // of the pieces that merges make, best score first
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const auto id = static_cast<std::int32_t>(i);
      const SpmPiece& piece = pieces_[i];
      if (piece.kind == PieceKind::unknown) parts.unknown_id = id;
      if (piece.kind == PieceKind::byte && byte_fallback_) {
        const auto byte = fallback_byte(piece.text);
        if (!byte) return reader_.corrupt(concat("the byte piece ", quote(piece.text)));
        parts.byte_ids[*byte] = id;
      }
      if (piece.kind != PieceKind::normal) continue;
      const Utf8Unit first = first_utf8_unit(piece.text);
      if (first.length == piece.text.size()) {
        parts.characters.emplace_back(first.code, id);
      } else {
        order.push_back(id);
      }
    }
    const auto score = [this](std::int32_t id) {
      return pieces_[static_cast<std::size_t>(id)].score;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return score(a) > score(b); });
    parts.words_apart = mergeable(kWordStart).has_value();
    std::uint32_t rank = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      // Pieces of one score are merged from the left, whichever comes first.
      if (i > 0 && score(order[i]) != score(order[i - 1])) ++rank;
      QMLP_TRY(add_merges(order[i], rank, parts));
    }
    out_.bpe = std::make_unique<const Bpe>(parts);
    return {};
  }

  // Every way to make a piece of two others.
  Status add_merges(std::int32_t id, std::uint32_t rank, Bpe::Parts& parts) const {
    const std::string_view text = pieces_[static_cast<std::size_t>(id)].text;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t length = first_utf8_unit(text.substr(at)).length;
      // SentencePiece would merge through characters without a piece; no trained model has any.
      if (!mergeable(text.substr(at, length))) {
        return reader_.unsupported(concat("the piece ", quote(text), " has a character (",
                                          quote(text.substr(at, length)),
                                          ") that is no piece itself, which is not supported"));
      }
      if (at > 0) {
        if (text.substr(at).starts_with(kWordStart) && !text.substr(0, at).ends_with(kWordStart)) {
          parts.words_apart = false;
        }
        const auto left = mergeable(text.substr(0, at));
        const auto right = mergeable(text.substr(at));
        if (left && right) {
          parts.merges.push_back({*left, *right, id});
          parts.ranks.push_back(rank);
        }
      }
      at += length;
    }
    return {};
  }

  Status build_normalizer() {
    Result<CharsMap> map = CharsMap::read(charsmap_);
    if (!map) return reader_.within("normalizer_spec", map.error());
    if (!charsmap_.empty()) {
      out_.normalizer.add([map = *std::move(map)](Piece& piece, RegexScratch&) -> Status {
        map.normalize_longest(piece.text);
        return {};
      });
    }
    if (remove_extra_spaces_) {
      out_.normalizer.add([](Piece& piece, RegexScratch&) -> Status {
        std::string out;
        for (const char c : piece.text) {
          if (c != ' ' || (!out.empty() && out.back() != ' ')) out += c;
        }
        if (out.ends_with(' ')) out.pop_back();
        piece.text = std::move(out);
        return {};
      });
    }
    const bool prefix = config_.add_prefix_space.value_or(dummy_prefix_) && dummy_prefix_;
    const bool everywhere = config_.legacy;
    out_.normalizer.add([prefix, everywhere](Piece& piece, RegexScratch&) -> Status {
      std::string out;
      if (prefix && !piece.text.empty() && (everywhere || piece.at_start)) out += kWordStart;
      for (const char c : piece.text) {
        if (c == ' ') {
          out += kWordStart;
        } else {
          out += c;
        }
      }
      piece.text = std::move(out);
      return {};
    });
    prefix_ = prefix;
    return {};
  }

  Status add_tokens() {
    const auto add = [this](const AddedToken& token) -> Status {
      QMLP_TRY(out_.all_tokens.add(token));
      return (token.normalized ? out_.normalized_tokens : out_.raw_tokens).add(token);
    };
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const SpmPiece& piece = pieces_[i];
      const bool user_defined = piece.kind == PieceKind::user_defined;
      if (!user_defined && piece.kind != PieceKind::control && piece.kind != PieceKind::unknown) {
        continue;
      }
      AddedToken token;
      token.content = piece.text;
      token.id = static_cast<std::int32_t>(i);
      token.special = !user_defined;
      token.normalized = user_defined;  // looked for where spaces are marks already
      QMLP_TRY(add(token));
    }
    // Without another word from tokenizer_config.json a text starts with the model's own bos.
    const bool named = std::any_of(config_.special_tokens.begin(), config_.special_tokens.end(),
                                   [](const auto& entry) { return entry.first == "bos_token"; });
    if (!named && config_.add_bos.value_or(true) && bos_id_ < pieces_.size() &&
        pieces_[bos_id_].kind == PieceKind::control) {
      out_.before.push_back(static_cast<std::int32_t>(bos_id_));
    }
    for (AddedToken token : config_.added_tokens) {
      if (static_cast<std::size_t>(token.id) < pieces_.size()) continue;
      token.normalized = false;
      QMLP_TRY(add(token));
    }
    return {};
  }

  Result<Decoder> build_decoder() const {
    std::string json =
        concat(R"({"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":")",
               kWordStart, R"("},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"})",
               prefix_ ? std::string_view(R"(,{"type":"Strip","content":" ","start":1,"stop":0})")
                       : std::string_view(),
               "]}");
    QMLP_ASSIGN(const Json decoder, Json::parse(json, "decoder"));
    return read_decoder(reader_, &decoder);
  }

  FileReader reader_;
  const TokenizerConfig& config_;
  TokenizerFile out_;
  std::vector<SpmPiece> pieces_;
  std::uint64_t model_type_ = 1;
  std::uint64_t bos_id_ = 1;
  bool byte_fallback_ = false;
  bool whitespace_suffix_ = false;
  std::string_view charsmap_;
  bool dummy_prefix_ = true;
  bool remove_extra_spaces_ = true;
  bool escape_whitespace_ = true;
  bool prefix_ = true;
};

}  // namespace

Result<TokenizerFile> parse_spm_file(std::string_view bytes, std::string_view name,
                                     const TokenizerConfig& config) {
  return Reader(name, config).run(bytes);
}

}  // namespace qmlp::text
