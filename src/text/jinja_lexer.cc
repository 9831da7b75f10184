#include "text/jinja_lexer.h"

#include <cstring>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/quote.h"
#include "text/utf8.h"

namespace qmlp::text::jinja {
namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// As Jinja: all line ends become \n, and one at the end of the template is dropped.
std::string with_plain_newlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else if (source.substr(i + 1, 1) != "\n") {
      out += '\n';
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(with_plain_newlines(source)) {}

  Result<std::vector<Token>> run() {
    while (at_ < source_.size()) QMLP_TRY(text_and_tag());
    push(TokenKind::end, "", at_);
    return std::move(tokens_);
  }

 private:
  bool starts(std::string_view what, std::size_t at) const {
    return std::string_view(source_).substr(at, what.size()) == what;
  }
  void push(TokenKind kind, std::string text, std::size_t at) {
    tokens_.push_back({kind, std::move(text), at});
  }
  void skip_space() {
    while (at_ < source_.size() && is_space(source_[at_])) ++at_;
  }

  // The text up to the next tag, and the tag.
  Status text_and_tag() {
    std::size_t tag = at_;
    while (tag < source_.size() && !starts("{{", tag) && !starts("{%", tag) && !starts("{#", tag)) {
      ++tag;
    }
    std::string_view text = std::string_view(source_).substr(at_, tag - at_);
    const std::size_t begin = at_;
    const char kind = tag < source_.size() ? source_[tag + 1] : '\0';
    const char sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    if (kind != '\0' && sign == '-') {
      while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
    } else if (kind != '\0' && kind != '{' && sign != '+') {
      // A statement alone at the start of its line takes the indentation along.
      const std::size_t line = text.rfind('\n') + 1;
      if (line > 0 || line_start_) {
        std::size_t last = text.size();
        while (last > line && is_space(text[last - 1])) --last;
        if (last == line) text = text.substr(0, line);
      }
    }
    if (!text.empty()) push(TokenKind::text, std::string(text), begin);
    at_ = tag;
    if (kind == '\0') return {};
    at_ += 2;
    if (kind == '#') return comment(tag);
    if (sign == '-' || sign == '+') ++at_;
    push(kind == '%' ? TokenKind::statement_begin : TokenKind::output_begin, "", tag);
    return inside(kind == '%');
  }

  // What follows a tag's closing sign: "-" strips all white space, a plain statement one newline.
  void after_tag(char sign, bool statement) {
    line_start_ = false;
    const std::size_t begin = at_;
    if (sign == '-') {
      skip_space();
    } else if (statement && sign != '+' && at_ < source_.size() && source_[at_] == '\n') {
      ++at_;
    }
    line_start_ = at_ > begin && source_[at_ - 1] == '\n';
  }

  Status comment(std::size_t tag) {
    const std::size_t close = source_.find("#}", at_);
    if (close == std::string::npos) return refuse("a comment that is not closed", tag);
    const char sign = close > at_ ? source_[close - 1] : '\0';
    at_ = close + 2;
    after_tag(sign, true);
    return {};
  }

  Status inside(bool statement) {
    const std::string_view close = statement ? "%}" : "}}";
    std::string open;  // brackets
    for (;;) {
      skip_space();
      if (at_ >= source_.size()) return refuse("a tag that is not closed", at_);
      const char c = source_[at_];
      if (open.empty()) {
        const bool sign = (c == '-' || (c == '+' && statement)) && starts(close, at_ + 1);
        if (sign || starts(close, at_)) {
          push(statement ? TokenKind::statement_end : TokenKind::output_end, "", at_);
          at_ += sign ? 3 : 2;
          after_tag(sign ? c : '\0', statement);
          return {};
        }
      }
      if (c == '(' || c == '[' || c == '{') open += c;
      if (c == ')' || c == ']' || c == '}') {
        const char match = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || open.back() != match) return refuse("an unmatched bracket", at_);
        open.pop_back();
      }
      QMLP_TRY(token());
    }
  }

  Status token() {
    const std::size_t begin = at_;
    const char c = source_[at_];
    const auto rest = [&] { return source_.substr(begin, at_ - begin); };
    if (is_letter(c)) {
      while (at_ < source_.size() && (is_letter(source_[at_]) || is_digit(source_[at_]))) ++at_;
      push(TokenKind::name, rest(), begin);
      return {};
    }
    if (is_digit(c)) {
      while (at_ < source_.size() && is_digit(source_[at_])) ++at_;
      const char next = at_ < source_.size() ? source_[at_] : '\0';
      if (at_ - begin > 15 || next == '.' || is_letter(next)) return refuse("this number", begin);
      push(TokenKind::integer, rest(), begin);
      return {};
    }
    if (c == '\'' || c == '"') return string(c);
    for (const std::string_view two : {"==", "!=", "<=", ">=", "//", "**"}) {
      if (starts(two, at_)) {
        at_ += 2;
        push(TokenKind::symbol, std::string(two), begin);
        return {};
      }
    }
    if (std::strchr("+-*/%~<>=()[]{},:.|", c) == nullptr || c == '\0') {
      return refuse(quote(first_character()), begin);
    }
    ++at_;
    push(TokenKind::symbol, std::string(1, c), begin);
    return {};
  }

  std::string_view first_character() const {
    const std::string_view rest = std::string_view(source_).substr(at_);
    return rest.substr(0, first_utf8_unit(rest).length);
  }

  Status string(char quote_sign) {
    const std::size_t begin = at_++;
    std::string out;
    for (;;) {
      if (at_ >= source_.size()) return refuse("a string that is not closed", begin);
      const char c = source_[at_++];
      if (c == quote_sign) break;
      if (c != '\\') {
        out += c;
        continue;
      }
      const char escaped = at_ < source_.size() ? source_[at_++] : '\0';
      switch (escaped) {
        case 'n':
          out += '\n';
          break;
        case 't':
          out += '\t';
          break;
        case 'r':
          out += '\r';
          break;
        case '\\':
        case '\'':
        case '"':
          out += escaped;
          break;
        case 'u':
        case 'x':
          QMLP_TRY(code_escape(escaped == 'u' ? 4 : 2, out));
          break;
        default:
          return refuse("an escape in a string", at_ - 2);
      }
    }
    push(TokenKind::string, std::move(out), begin);
    return {};
  }

  Status code_escape(int digits, std::string& out) {
    char32_t code = 0;
    for (int i = 0; i < digits; ++i, ++at_) {
      const char c = at_ < source_.size() ? source_[at_] : '\0';
      const char lower = static_cast<char>(c | 0x20);
      const bool letter = lower >= 'a' && lower <= 'f';
      if (!letter && !is_digit(c)) return refuse("an escape in a string", at_);
      code = code * 16 + static_cast<char32_t>(letter ? lower - 'a' + 10 : c - '0');
    }
    if (code >= 0xD800 && code < 0xE000) return refuse("an escaped surrogate", at_);
    append_utf8(code, out);
    return {};
  }

  const std::string source_;
  std::size_t at_ = 0;
  bool line_start_ = true;  // whether what precedes the text is the start of a line
  std::vector<Token> tokens_;
};

}  // namespace

Error refuse(std::string_view what, std::size_t at) {
  return Error{Errc::unsupported, concat("chat template: ", what, " at byte ", at,
                                         " is not understood here, use a raw prompt")};
}

Result<std::vector<Token>> tokenize(std::string_view source) {
  if (const auto offset = find_invalid_utf8(source)) return refuse("invalid UTF-8", *offset);
  return Lexer(source).run();
}

}  // namespace qmlp::text::jinja
