#include "text/regex.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "text/regex_syntax.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

Regex compile(std::string_view pattern) {
  auto translated = to_pcre2_syntax(pattern);
  EXPECT_TRUE(translated) << pattern << ": " << translated.error().message;
  auto regex = Regex::compile(translated ? *translated : "x");
  EXPECT_TRUE(regex) << pattern << ": " << regex.error().message;
  return *std::move(regex);
}

std::vector<std::string> matches(std::string_view pattern, std::string_view text) {
  const Regex regex = compile(pattern);
  auto scratch = RegexScratch::make(text.size());
  EXPECT_TRUE(scratch);
  std::vector<std::string> found;
  for (std::size_t at = 0; at < text.size();) {
    const auto match = regex.find(text, at, *scratch);
    EXPECT_TRUE(match) << match.error().message;
    if (!match || !match->found) break;
    found.emplace_back(text.substr(match->begin, match->end - match->begin));
    at = match->end;
  }
  return found;
}

using Strings = std::vector<std::string>;

TEST(RegexSyntax, MeansWhatHuggingFacesEngineMeans) {
  EXPECT_EQ(matches("'s|'t|a+?b", "x's aab'S"), (Strings{"'s", "aab"}));
  EXPECT_EQ(matches("(?i:'s|'ll)", "'S 'lL '\u017f"), (Strings{"'S", "'lL", "'\u017f"}));
  EXPECT_EQ(matches("(a|b)+(?=c)", "abcab"), (Strings{"ab"}));
  EXPECT_EQ(matches("(?<!x)a|(?<=y)b", "xa yb a b"), (Strings{"b", "a"}));
  EXPECT_EQ(matches(R"(\p{N}{1,3})", "12345 \u0663"), (Strings{"123", "45", "\u0663"}));
  EXPECT_EQ(matches(R"([\p{Lu}\-_]+)", "AB-c_"), (Strings{"AB-", "_"}));
  EXPECT_EQ(matches("[a-c-]+", "a-d-b"), (Strings{"a-", "-b"}));
  EXPECT_EQ(matches("[-a]+", "a-b"), (Strings{"a-"}));
  EXPECT_EQ(matches("\\u00e9+|\\x41", "\u00e9\u00e9A"), (Strings{"\u00e9\u00e9", "A"}));
  EXPECT_EQ(matches(R"(\w+)", "a_1\u0301\u00b2 \u24b6-\u200d"),
            (Strings{"a_1\u0301\u00b2", "\u24b6"}));
  EXPECT_EQ(matches(R"([\w.]+|\W)", "a.b c"), (Strings{"a.b", " ", "c"}));
  // Lines end at \n alone, and ^ and $ are about lines.
  EXPECT_EQ(matches(".+", "a\rb\nc\u2028d"), (Strings{"a\rb", "c\u2028d"}));
  EXPECT_EQ(matches("^.", "a\nbc\rd"), (Strings{"a", "b"}));
  EXPECT_EQ(matches(R"(\s+$)", "a \nb  "), (Strings{" ", "  "}));
  // Characters that PCRE2's own Unicode tables may be too old for.
  EXPECT_EQ(matches(R"(\p{L}+)", "\U00031350 \U0002EBF0 \u1C89"),
            (Strings{"\U00031350", "\U0002EBF0", "\u1C89"}));
  EXPECT_EQ(matches(R"([^\p{L}\p{N}]+)", "\U00031350\U00010D40!"), (Strings{"!"}));
}

TEST(RegexSyntax, SpaceIsWhiteSpaceOfUnicode) {
  const Regex space = compile(R"(\s)");
  const Regex in_class = compile(R"([\s])");
  const Regex not_space = compile(R"(\S)");
  const Regex not_in_class = compile(R"([\S])");
  auto scratch = RegexScratch::make(4);
  ASSERT_TRUE(scratch);
  for (char32_t code = 0; code < 0x110000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    const bool expected = (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 ||
                          code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
                          code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
                          code == 0x3000;
    std::string text;
    append_utf8(code, text);
    for (const Regex* regex : {&space, &in_class}) {
      ASSERT_EQ(regex->find(text, 0, *scratch)->found, expected) << static_cast<unsigned>(code);
    }
    for (const Regex* regex : {&not_space, &not_in_class}) {
      ASSERT_NE(regex->find(text, 0, *scratch)->found, expected) << static_cast<unsigned>(code);
    }
  }
}

TEST(RegexSyntax, RefusesByName) {
  const std::pair<const char*, const char*> cases[] = {
      {R"([^\W])", "a negated set inside a class"},
      {R"(\bx)", "'\\b'"},
      {R"(\h)", "'\\h'"},
      {R"(a\1)", "'\\1'"},
      {R"(\p{Han})", "the property 'Han'"},
      {R"(\pL)", "a property without braces"},
      {R"([^\P{L}])", "a negated set inside a class"},
      {"[a&&b]", "'&&' in a class"},
      {"[[:alpha:]]", "a class within a class"},
      {"[]", "an empty class"},
      {"[a", "a class that is not closed"},
      {R"([\s-x])", "a range from a set"},
      {"[z-a]", "a range in a class"},
      {"a{2}+", "'+' after an interval"},
      {"a{2}?", "the quantifier '{n}?'"},
      {"a{,2}", "the quantifier '{'"},
      {"a**", "the quantifier '*'"},
      {"*a", "the quantifier '*'"},
      {"(?m:a)", "this kind of group"},
      {"(?<name>a)", "this kind of group"},
      {"(a", "a group that is not closed"},
      {"a)", "an unmatched ')'"},
      {"a]", "an unmatched ']'"},
      {"a\\", "a '\\' at the end"},
      {R"(\xE9)", "a byte escape"},
      {"a\xFF", "invalid UTF-8"},
  };
  for (const auto& [pattern, what] : cases) {
    const auto translated = to_pcre2_syntax(pattern);
    ASSERT_FALSE(translated) << pattern;
    EXPECT_EQ(translated.error().code, Errc::unsupported);
    EXPECT_NE(translated.error().message.find(what), std::string::npos)
        << pattern << ": " << translated.error().message;
  }
  const std::string deep(60, '(');
  EXPECT_FALSE(to_pcre2_syntax(deep + "a" + std::string(60, ')')));
}

TEST(Regex, RefusesWhatMatchesEmptyText) {
  EXPECT_FALSE(Regex::compile("a*"));
  EXPECT_FALSE(Regex::compile("a|"));
  EXPECT_TRUE(Regex::compile("a*b"));
}

TEST(Regex, LiteralTextHasNoSyntax) {
  const auto regex = Regex::literal("a.+");
  ASSERT_TRUE(regex);
  auto scratch = RegexScratch::make(10);
  ASSERT_TRUE(scratch);
  EXPECT_FALSE(regex->find("abc", 0, *scratch)->found);
  EXPECT_EQ(regex->find("xa.+", 0, *scratch)->begin, 1u);
}

// Quadratic time, a recursion limit or a step limit would all show here.
TEST(Regex, LongRunsOfOneKindAreLinear) {
  constexpr std::string_view kPattern =
      R"((?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  for (const std::string unit :
       {"a", " ", "\n", "7", "!", "\u6f22", "\U0001F600", " \n", "\u0301"}) {
    std::string text;
    while (text.size() < (1u << 20)) text += unit;
    for (const char* end : {"", "x", " ", "\n"}) {
      std::string joined;
      for (const std::string& match : matches(kPattern, text + end)) joined += match;
      ASSERT_EQ(joined.size(), (text + end).size()) << unit << end;
    }
  }
}

TEST(Regex, AnExplodingPatternEndsInAnError) {
  const Regex regex = compile("(?:a|a|aa)+b");
  const std::string text(60, 'a');
  auto scratch = RegexScratch::make(text.size());
  ASSERT_TRUE(scratch);
  const auto match = regex.find(text + "cb", 0, *scratch);
  ASSERT_FALSE(match);
  EXPECT_EQ(match.error().code, Errc::unsupported);
}

}  // namespace
}  // namespace qmlp::text
