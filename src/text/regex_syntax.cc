#include "text/regex_syntax.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "base/try.h"
#include "text/unicode_additions.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

// Unicode White_Space. PCRE2's own \s also has U+180E, which is a space no longer.
constexpr std::string_view kSpaces =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

constexpr std::string_view kCategories[] = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P",
    "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl"};

// Deeper nesting than any tokenizer needs; bounds the recursion.
constexpr int kMaxGroups = 50;

std::string code_escape(char32_t code) {
  char text[16];
  std::snprintf(text, sizeof text, "\\x{%X}", static_cast<unsigned>(code));
  return text;
}

std::string range_escape(char32_t first, char32_t last) {
  return first == last ? code_escape(first) : code_escape(first) + '-' + code_escape(last);
}

// The members of a general category as the inside of a class.
std::string category_members(std::string_view name) {
  std::string out = "\\p{" + std::string(name) + '}';
  for (const CategoryRange& range : unicode_additions()) {
    if (std::string_view(range.category).substr(0, name.size()) == name) {
      out += range_escape(range.first, range.last);
    }
  }
  return out;
}

// Letters of words as the Unicode standard's recommendation for \w has them, less the joiners.
std::string word_members() {
  std::string out = R"(\p{Alphabetic})";
  for (const std::string_view category : {"L", "M", "Nd", "Nl", "Pc"}) {
    out += category_members(category);
  }
  return out;
}

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

// One element of a class or one escape outside: a single character, or a set.
struct Atom {
  bool is_set = false;
  bool negated = false;
  char32_t code = 0;
  std::string members;  // of the set before negation, as the inside of a class
};

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  Result<std::string> run() {
    if (find_invalid_utf8(in_)) return refuse("invalid UTF-8");
    bool quantifiable = false;  // whether what precedes can take a quantifier
    while (at_ < in_.size()) {
      Result<bool> step = element(quantifiable);
      if (!step) return step.error();
      quantifiable = *step;
    }
    if (depth_ != 0) return refuse("a group that is not closed");
    return std::move(out_);
  }

 private:
  Error refuse(const std::string& what) const {
    return Error{Errc::unsupported, "regex: " + what + " at byte " + std::to_string(start_) +
                                        " is not understood here"};
  }

  bool take(std::string_view text) {
    if (in_.substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }

  // Translates one element; whether it can take a quantifier.
  Result<bool> element(bool quantifiable) {
    start_ = at_;
    const char c = in_[at_];
    switch (c) {
      case '(':
        return open_group();
      case ')':
        if (depth_-- == 0) return refuse("an unmatched ')'");
        ++at_;
        out_ += ')';
        return true;
      case '[':
        return char_class();
      case ']':
        return refuse("an unmatched ']'");
      case '|':
        ++at_;
        out_ += '|';
        return false;
      case '.':
        ++at_;
        out_ += "[^\\n]";
        return true;
      case '^':
      case '$':
        ++at_;
        out_ += c == '^' ? "(?m:^)" : "(?m:$)";
        return false;
      case '*':
      case '+':
      case '?':
      case '{':
        if (!quantifiable) return refuse(std::string("the quantifier '") + c + "'");
        return quantifier();
      default:
        break;
    }
    Result<Atom> atom = c == '\\' ? escape(false) : literal();
    if (!atom) return atom.error();
    if (!atom->is_set) {
      out_ += code_escape(atom->code);
    } else {
      out_ += atom->negated ? "[^" : "[";
      out_ += atom->members;
      out_ += ']';
    }
    return true;
  }

  Result<bool> open_group() {
    static constexpr std::string_view kKinds[] = {
        "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    if (++depth_ > kMaxGroups) return refuse("a group nested so deep");
    for (const std::string_view kind : kKinds) {
      if (take(kind)) {
        out_ += kind;
        return false;
      }
    }
    take("(");
    if (at_ < in_.size() && (in_[at_] == '?' || in_[at_] == '*'))
      return refuse("this kind of group");
    out_ += "(?:";
    return false;
  }

  Result<bool> quantifier() {
    const char c = in_[at_++];
    bool interval = false;
    bool ranged = false;
    out_ += c;
    if (c == '{') {
      interval = true;
      bool any = false;
      while (at_ < in_.size() && in_[at_] != '}') {
        const char d = in_[at_++];
        if (d == ',' && any && !ranged) {
          ranged = true;
        } else if (d >= '0' && d <= '9') {
          any = true;
        } else {
          return refuse("the quantifier '{'");
        }
        out_ += d;
      }
      if (!any || !take("}")) return refuse("the quantifier '{'");
      out_ += '}';
    }
    if (at_ < in_.size() && in_[at_] == '?') {
      if (interval && !ranged) return refuse("the quantifier '{n}?'");
      out_ += in_[at_++];
    } else if (at_ < in_.size() && in_[at_] == '+') {
      // Possessive after * + ?, but a second quantifier after an interval.
      if (interval) return refuse("'+' after an interval");
      out_ += in_[at_++];
    }
    return false;
  }

  Result<Atom> literal() {
    const Utf8Unit unit = first_utf8_unit(in_.substr(at_));
    at_ += unit.length;
    Atom atom;
    atom.code = unit.code;
    return atom;
  }

  Result<char32_t> hex(std::size_t digits) {
    char32_t code = 0;
    for (std::size_t i = 0; i < digits; ++i, ++at_) {
      const char c = at_ < in_.size() ? in_[at_] : '\0';
      const char* const kDigits = "0123456789abcdef";
      const char* const found = c == '\0' ? nullptr : std::strchr(kDigits, c | 0x20);
      if (found == nullptr || !is_alphanumeric(c)) return refuse("a hexadecimal escape");
      code = code * 16 + static_cast<char32_t>(found - kDigits);
    }
    if (code >= 0xD800 && code < 0xE000) return refuse("an escaped surrogate");
    return code;
  }

  Result<Atom> escape(bool in_class) {
    ++at_;
    if (at_ == in_.size()) return refuse("a '\\' at the end");
    const char c = in_[at_];
    Atom atom;
    const auto control = [&](char32_t code) {
      ++at_;
      atom.code = code;
      return atom;
    };
    switch (c) {
      case 'n':
        return control('\n');
      case 'r':
        return control('\r');
      case 't':
        return control('\t');
      case 'f':
        return control('\f');
      case 's':
      case 'S':
        ++at_;
        atom.is_set = true;
        atom.negated = c == 'S';
        atom.members = kSpaces;
        if (in_class && atom.negated) {
          // The one set whose complement a class can name.
          atom.negated = false;
          atom.members = "\\S\\x{180E}";
        }
        return atom;
      case 'w':
      case 'W':
        ++at_;
        atom.is_set = true;
        atom.negated = c == 'W';
        // Oniguruma's has the signs of Latin-1 that are numbers, and no joiners.
        atom.members = word_members() + R"(\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";
        break;
      case 'd':
      case 'D':
        ++at_;
        atom.is_set = true;
        atom.negated = c == 'D';
        atom.members = category_members("Nd");
        break;
      case 'p':
      case 'P': {
        ++at_;
        const std::size_t close = in_.find('}', at_);
        if (at_ >= in_.size() || in_[at_] != '{' || close == std::string_view::npos) {
          return refuse("a property without braces");
        }
        const std::string_view name = in_.substr(at_ + 1, close - at_ - 1);
        bool known = false;
        for (const std::string_view category : kCategories) known = known || category == name;
        if (!known) return refuse("the property '" + std::string(name) + "'");
        at_ = close + 1;
        atom.is_set = true;
        atom.negated = c == 'P';
        atom.members = category_members(name);
        break;
      }
      case 'u':
      case 'x': {
        ++at_;
        if (c == 'x' && at_ < in_.size() && in_[at_] == '{') return refuse("'\\x{'");
        Result<char32_t> code = hex(c == 'u' ? 4 : 2);
        if (!code) return code.error();
        // In two digits Oniguruma writes bytes, not characters.
        if (c == 'x' && *code >= 0x80) return refuse("a byte escape");
        atom.code = *code;
        return atom;
      }
      default:
        if (is_alphanumeric(c)) return refuse(std::string("'\\") + c + "'");
        return literal();
    }
    if (in_class && atom.negated) return refuse("a negated set inside a class");
    return atom;
  }

  Result<bool> char_class() {
    ++at_;
    out_ += take("^") ? "[^" : "[";
    bool first = true;
    bool after_set = false;
    for (;; first = false) {
      if (at_ >= in_.size()) return refuse("a class that is not closed");
      const char c = in_[at_];
      if (c == ']') {
        if (first) return refuse("an empty class");
        break;
      }
      if (c == '[') return refuse("a class within a class");
      if (c == '&' && in_.substr(at_, 2) == "&&") return refuse("'&&' in a class");
      const bool dash = c == '-';
      // A dash is a character only first or last; elsewhere it must have made a range below.
      if (dash && !first && in_.substr(at_ + 1, 1) != "]") {
        return refuse(after_set ? "a range from a set" : "a '-' within a class");
      }
      Result<Atom> atom = c == '\\' ? escape(true) : literal();
      if (!atom) return atom.error();
      after_set = atom->is_set;
      if (atom->is_set) {
        out_ += atom->members;
        continue;
      }
      char32_t last = atom->code;
      if (!dash && at_ + 1 < in_.size() && in_[at_] == '-' && in_[at_ + 1] != ']') {
        ++at_;
        if (in_[at_] == '[') return refuse("a class within a class");
        Result<Atom> end = in_[at_] == '\\' ? escape(true) : literal();
        if (!end) return end.error();
        if (end->is_set || end->code < atom->code) return refuse("a range in a class");
        last = end->code;
      }
      out_ += range_escape(atom->code, last);
    }
    ++at_;
    out_ += ']';
    return true;
  }

  std::string_view in_;
  std::size_t at_ = 0;
  std::size_t start_ = 0;
  int depth_ = 0;
  std::string out_;
};

}  // namespace

Result<std::string> to_pcre2_syntax(std::string_view pattern) { return Translator(pattern).run(); }

Result<Regex> compile_pattern(std::string_view pattern) {
  QMLP_ASSIGN(const std::string translated, to_pcre2_syntax(pattern));
  return Regex::compile(translated);
}

std::string space_class() { return std::string(kSpaces); }

std::string word_class() { return word_members() + R"(\x{200C}\x{200D})"; }

std::string punctuation_pattern() {
  // Unicode 8's, which only Hugging Face's Punctuation has: what later versions added, and two
  // characters that were punctuation then.
  static constexpr std::string_view kLater =
      R"(\x{61D}\x{9FD}\x{A76}\x{C77}\x{C84}\x{1B7D}-\x{1B7E}\x{2E43}-\x{2E5D}\x{10EAD})"
      R"(\x{10F55}-\x{10F59}\x{10F86}-\x{10F89}\x{1144B}-\x{1144F}\x{1145A}-\x{1145D})"
      R"(\x{11660}-\x{1166C}\x{116B9}\x{1183B}\x{11944}-\x{11946}\x{119E2}\x{11A3F}-\x{11A46})"
      R"(\x{11A9A}-\x{11AA2}\x{11C41}-\x{11C45}\x{11C70}-\x{11C71}\x{11EF7}-\x{11EF8}\x{11FFF})"
      R"(\x{12FF1}-\x{12FF2}\x{16E97}-\x{16E9A}\x{16FE2}\x{1E95E}-\x{1E95F})";
  return "(?![" + std::string(kLater) + R"(])[!-/:-@\[-`{-~\p{P}\x{166D}\x{111C9}])";
}

std::string digits_class() {
  // Unicode 17's, which only Hugging Face's Digits has.
  return category_members("N") + range_escape(0x11DE0, 0x11DE9) + range_escape(0x16FF4, 0x16FF6);
}

}  // namespace qmlp::text
