#include "text/normalizer.h"

#include <utility>

#include "base/try.h"
#include "text/added_tokens.h"
#include "text/charsmap.h"
#include "text/normal_forms.h"
#include "text/quote.h"
#include "text/regex_syntax.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::size_t kMaxSteps = 32;
// What steps that insert text may make of a piece, in bytes.
constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

Error too_long() {
  return Error{Errc::unsupported, concat("normalizer: the text grows past ", kMaxBytes, " bytes")};
}

Status replace_literal(Piece& piece, const std::string& from, const std::string& to) {
  std::size_t at = piece.text.find(from);
  if (at == std::string::npos) return {};
  std::string out;
  out.reserve(piece.text.size() + piece.text.size() / 2);
  std::size_t done = 0;
  for (; at != std::string::npos; at = piece.text.find(from, done)) {
    out.append(piece.text, done, at - done);
    out += to;
    done = at + from.size();
    if (out.size() > kMaxBytes) return too_long();
  }
  out.append(piece.text, done);
  piece.text = std::move(out);
  return {};
}

Status replace_matches(Piece& piece, const Regex& pattern, const std::string& to,
                       RegexScratch& scratch) {
  std::string out;
  std::size_t done = 0;
  while (done < piece.text.size()) {
    QMLP_ASSIGN(const Match match, pattern.find(piece.text, done, scratch));
    if (!match.found) break;
    out.append(piece.text, done, match.begin - done);
    out += to;
    done = match.end;
    if (out.size() > kMaxBytes) return too_long();
  }
  if (done == 0) return {};
  out.append(piece.text, done);
  piece.text = std::move(out);
  return {};
}

Status strip(Piece& piece, bool left, bool right) {
  if (right) piece.text.resize(piece.text.size() - trailing_space(piece.text));
  if (left) {
    const std::size_t space = leading_space(piece.text);
    piece.text.erase(0, space);
    piece.at_start = piece.at_start && space == 0;
  }
  return {};
}

// Drops control characters and turns others that look like a space into one, as the Nmt step does.
Status plain_spaces(Piece& piece) {
  std::string out;
  out.reserve(piece.text.size());
  for (std::string_view rest = piece.text; !rest.empty();) {
    const Utf8Unit unit = first_utf8_unit(rest);
    const char32_t c = unit.code;
    const bool dropped = (c >= 0x1 && c <= 0x8) || c == 0xB || (c >= 0xE && c <= 0x1F) ||
                         c == 0x7F || c == 0x8F || c == 0x9F;
    const bool space = c == 0x9 || c == 0xA || c == 0xC || c == 0xD || c == 0x1680 ||
                       (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                       c == 0xFEFF || c == 0xFFFD;
    if (dropped && out.empty()) piece.at_start = false;
    if (space) {
      out += ' ';
    } else if (!dropped) {
      out += rest.substr(0, unit.length);
    }
    rest.remove_prefix(unit.length);
  }
  piece.text = std::move(out);
  return {};
}

class Steps {
 public:
  Steps(const FileReader& reader, Normalizer& out) : reader_(reader), out_(out) {}

  Status read(const Json& value, int depth) {
    if (value.object() == nullptr) {
      return reader_.corrupt(
          concat("normalizer: a step is ", value.kind_name(), ", an object is required"));
    }
    QMLP_ASSIGN(const std::string type, reader_.string(value, "normalizer", "type", ""));
    if (type == "Sequence") {
      if (depth == 8) return reader_.unsupported("normalizer: Sequences are nested too deep");
      QMLP_ASSIGN(const JsonArray* list, reader_.array(value, "normalizer", "normalizers"));
      for (const Json& element : *list) QMLP_TRY(read(element, depth + 1));
      return {};
    }
    if (++count_ > kMaxSteps) {
      return reader_.unsupported(
          concat("normalizer: it has more than the ", kMaxSteps, " steps that are supported"));
    }
    return step(value, type);
  }

 private:
  Status step(const Json& value, const std::string& type) {
    for (const auto& [name, form] :
         {std::pair("NFC", NormalForm::nfc), std::pair("NFD", NormalForm::nfd),
          std::pair("NFKC", NormalForm::nfkc), std::pair("NFKD", NormalForm::nfkd)}) {
      if (type != name) continue;
      out_.add([form = form](Piece& piece, RegexScratch&) -> Status {
        if (auto normalized = to_normal_form(piece.text, form)) {
          piece.text = *std::move(normalized);
        }
        return {};
      });
      return {};
    }
    if (type == "Prepend") return prepend(value);
    if (type == "Precompiled") return precompiled(value);
    if (type == "Nmt") {
      out_.add([](Piece& piece, RegexScratch&) { return plain_spaces(piece); });
      return {};
    }
    if (type == "Replace") return replace(value);
    if (type == "Strip") {
      QMLP_ASSIGN(const bool left, reader_.flag(value, "Strip", "strip_left", true));
      QMLP_ASSIGN(const bool right, reader_.flag(value, "Strip", "strip_right", true));
      out_.add([left, right](Piece& piece, RegexScratch&) { return strip(piece, left, right); });
      return {};
    }
    return reader_.unsupported(concat("normalizer ", quote(type), " is not supported"));
  }

  Status prepend(const Json& value) {
    QMLP_ASSIGN(std::string text, reader_.string(value, "Prepend", "prepend", ""));
    if (text.empty()) return {};
    out_.add([text = std::move(text)](Piece& piece, RegexScratch&) -> Status {
      if (!piece.text.empty()) piece.text.insert(0, text);
      return {};
    });
    return {};
  }

  Status precompiled(const Json& value) {
    QMLP_ASSIGN(const std::string text,
                reader_.string(value, "Precompiled", "precompiled_charsmap", ""));
    Result<CharsMap> map = CharsMap::read_base64(text);
    if (!map) return reader_.within("normalizer", map.error());
    out_.add([map = *std::move(map)](Piece& piece, RegexScratch& scratch) {
      return map.normalize(piece.text, scratch);
    });
    return {};
  }

  Status replace(const Json& value) {
    const Json* pattern = value.find("pattern");
    const Json* literal = pattern != nullptr ? pattern->find("String") : nullptr;
    const Json* regex = pattern != nullptr ? pattern->find("Regex") : nullptr;
    const Json* source = literal != nullptr ? literal : regex;
    if (source == nullptr || source->string() == nullptr || source->string()->empty()) {
      return reader_.corrupt("Replace.pattern holds no text 'Regex' or 'String'");
    }
    QMLP_ASSIGN(std::string to, reader_.string(value, "Replace", "content", ""));
    const std::string& from = *source->string();
    if (literal != nullptr) {
      out_.add([from, to = std::move(to)](Piece& piece, RegexScratch&) {
        return replace_literal(piece, from, to);
      });
      return {};
    }
    Result<Regex> compiled = compile_pattern(from);
    if (!compiled) {
      return reader_.within(concat("normalizer pattern ", quote(from)), compiled.error());
    }
    out_.add(
        [compiled = *std::move(compiled), to = std::move(to)](Piece& piece, RegexScratch& scratch) {
          return replace_matches(piece, compiled, to, scratch);
        });
    return {};
  }

  const FileReader& reader_;
  Normalizer& out_;
  std::size_t count_ = 0;
};

}  // namespace

Status Normalizer::run(Piece& piece, RegexScratch& scratch) const {
  for (const Step& step : steps_) QMLP_TRY(step(piece, scratch));
  return {};
}

Result<Normalizer> read_normalizer(const FileReader& reader, const Json* value) {
  Normalizer out;
  if (value != nullptr && !value->is_null()) {
    QMLP_TRY(Steps(reader, out).read(*value, 0));
  }
  return out;
}

}  // namespace qmlp::text
