#include "text/decoder.h"

#include "base/concat.h"
#include "base/try.h"
#include "text/byte_alphabet.h"
#include "text/pretokenizer.h"
#include "text/quote.h"

namespace qmlp::text {
namespace {

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

int hex_digit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::optional<unsigned char> fallback_byte(std::string_view token) noexcept {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  const int high = hex_digit(token[3]);
  const int low = hex_digit(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<unsigned char>(high * 16 + low);
}

std::string Decoder::bytes(std::string_view token, bool added, bool first) const {
  if (byte_level_) {
    if (!added) {
      if (auto bytes = letters_to_bytes(token)) return *std::move(bytes);
    }
    return std::string(token);
  }
  std::string out(token);
  for (const auto& [from, to] : replacements_) replace_all(out, from, to);
  if (!mark_.empty()) replace_all(out, mark_, first && drop_first_mark_ ? "" : " ");
  if (byte_fallback_) {
    if (const auto byte = fallback_byte(out)) return std::string(1, static_cast<char>(*byte));
  }
  return out;
}

void take_strip(Decoder::Strip& left, std::string& text) {
  std::size_t taken = 0;
  while (left.count > 0 && taken < text.size()) {
    if (text[taken] != left.character) {
      left.count = 0;
      break;
    }
    ++taken;
    --left.count;
  }
  text.erase(0, taken);
}

// Reads the steps in order. Supported orders: ByteLevel alone; Replace and Metaspace, then
// ByteFallback, then Fuse, then Strip, each of which may be missing.
class DecoderSteps {
 public:
  explicit DecoderSteps(const FileReader& reader) : reader_(reader) {}

  Result<Decoder> read(const Json* value) {
    if (value == nullptr || value->is_null()) {
      return reader_.unsupported("decoder: there is none, one is required");
    }
    QMLP_TRY(steps(*value, 0));
    return std::move(out_);
  }

 private:
  Status steps(const Json& value, int depth) {
    if (value.object() == nullptr) {
      return reader_.corrupt(
          concat("decoder: a step is ", value.kind_name(), ", an object is required"));
    }
    QMLP_ASSIGN(const std::string type, reader_.string(value, "decoder", "type", ""));
    if (type == "Sequence") {
      if (depth == 8) return reader_.unsupported("decoder: Sequences are nested too deep");
      QMLP_ASSIGN(const JsonArray* list, reader_.array(value, "decoder", "decoders"));
      for (const Json& element : *list) QMLP_TRY(steps(element, depth + 1));
      return {};
    }
    const auto in_order = [&](int place) -> Status {
      if (place < place_ || out_.byte_level_) {
        return reader_.unsupported(
            concat("decoder: a step ", quote(type), " after ", quote(last_), " is not supported"));
      }
      place_ = place;
      last_ = type;
      return {};
    };
    if (type == "ByteLevel") {
      QMLP_TRY(in_order(place_ == 0 ? 0 : -1));
      out_.byte_level_ = true;
      return {};
    }
    if (type == "Replace") {
      QMLP_TRY(in_order(1));
      return replace(value);
    }
    if (type == "Metaspace") {
      QMLP_TRY(in_order(1));
      if (!out_.mark_.empty()) return reader_.unsupported("decoder: it has two Metaspace steps");
      QMLP_ASSIGN(MetaspaceStep step, read_metaspace(reader_, value, "decoder"));
      out_.mark_ = std::move(step.mark);
      out_.drop_first_mark_ = step.prepend != MetaspaceStep::Prepend::never;
      return {};
    }
    if (type == "ByteFallback") {
      QMLP_TRY(in_order(2));
      out_.byte_fallback_ = true;
      return {};
    }
    if (type == "Fuse") {
      fused_ = true;
      return in_order(3);
    }
    if (type == "Strip") {
      QMLP_TRY(in_order(4));
      return strip(value);
    }
    return reader_.unsupported(concat("decoder ", quote(type), " is not supported"));
  }

  Status replace(const Json& value) {
    if (!out_.mark_.empty()) {
      return reader_.unsupported("decoder: 'Replace' after 'Metaspace' is not supported");
    }
    const Json* pattern = value.find("pattern");
    const Json* from = pattern != nullptr ? pattern->find("String") : nullptr;
    if (from == nullptr || from->string() == nullptr || from->string()->empty()) {
      return reader_.unsupported("decoder: Replace.pattern is no text 'String', which is required");
    }
    QMLP_ASSIGN(std::string to, reader_.string(value, "Replace", "content", ""));
    out_.replacements_.emplace_back(*from->string(), std::move(to));
    return {};
  }

  Status strip(const Json& value) {
    QMLP_ASSIGN(const std::string content, reader_.string(value, "Strip", "content", ""));
    QMLP_ASSIGN(const auto start, reader_.integer(value, "Strip", "start"));
    QMLP_ASSIGN(const auto stop, reader_.integer(value, "Strip", "stop"));
    if (content.size() != 1 || (content[0] & 0x80) != 0) {
      return reader_.unsupported(concat("decoder: Strip.content is ", quote(content),
                                        ", one ASCII character is required"));
    }
    if (start.value_or(0) < 0 || stop.value_or(0) != 0) {
      return reader_.unsupported(concat("decoder: Strip has start ", start.value_or(0),
                                        " and stop ", stop.value_or(0),
                                        ", only stripping at the start is supported"));
    }
    if (!fused_ || out_.strip_.count > 0) {
      return reader_.unsupported("decoder: 'Strip' is supported once, after 'Fuse'");
    }
    out_.strip_ = {content[0], static_cast<std::size_t>(start.value_or(0))};
    return {};
  }

  const FileReader& reader_;
  Decoder out_;
  int place_ = 0;
  bool fused_ = false;
  std::string last_;
};

Result<Decoder> read_decoder(const FileReader& reader, const Json* value) {
  return DecoderSteps(reader).read(value);
}

}  // namespace qmlp::text
