#include "text/utf8.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "qmlp/tokenizer.h"

namespace qmlp::text {
namespace {

using std::string_literals::operator""s;

TEST(Utf8, FindsTheFirstInvalidByte) {
  const struct {
    std::string text;
    std::optional<std::size_t> offset;
  } cases[] = {
      {"", std::nullopt},
      {"plain ASCII, longer than eight bytes", std::nullopt},
      {"\0 \x7F"s, std::nullopt},
      {"\u00e9\u6f22\U0001F600\U0010FFFF\uD7FF\uE000", std::nullopt},
      {"ab\x80", 2},
      {"\xC0\xAF", 0},              // overlong
      {"a\xC1\xBF", 1},             // overlong
      {"ab\xE0\x9F\xBF", 2},        // overlong
      {"\xF0\x8F\xBF\xBF", 0},      // overlong
      {"12345678\xED\xA0\x80", 8},  // a surrogate
      {"\xED\xBF\xBF", 0},          // a surrogate
      {"\xF4\x90\x80\x80", 0},      // above U+10FFFF
      {"\xF5\x80\x80\x80", 0},
      {"x\xFF", 1},
      {"\u00e9\xC3", 2},      // truncated
      {"a\xE6\xBC", 1},       // truncated
      {"a\xF0\x9F\x98", 1},   // truncated
      {"a\xE6\xBCz", 1},      // interrupted
      {"a\xF0\x9F\x98z", 1},  // interrupted
      {"\xC3\x28", 0},
  };
  for (const auto& [text, offset] : cases) EXPECT_EQ(find_invalid_utf8(text), offset) << text;
}

TEST(Utf8, EveryCodePointRoundTrips) {
  for (char32_t code = 0; code < 0x110000; ++code) {
    std::string text;
    append_utf8(code, text);
    const Utf8Unit unit = first_utf8_unit(text);
    if (code >= 0xD800 && code < 0xE000) {
      ASSERT_EQ(unit.state, Utf8State::invalid) << std::hex << static_cast<unsigned>(code);
      continue;
    }
    ASSERT_EQ(unit.state, Utf8State::valid) << std::hex << static_cast<unsigned>(code);
    ASSERT_EQ(unit.code, code);
    ASSERT_EQ(unit.length, text.size());
  }
}

// The second strings are what Python's decode("utf-8", errors="replace") gives.
const std::pair<std::string, std::string> kReplaced[] = {
    {"", ""},
    {"abc", "abc"},
    {"\u00e9\u6f22\U0001F600", "\u00e9\u6f22\U0001F600"},
    {"\x80", "\uFFFD"},
    {"a\x80\x80z", "a\uFFFD\uFFFDz"},
    {"\xC0\xAF", "\uFFFD\uFFFD"},
    {"\xE0\x80\x80", "\uFFFD\uFFFD\uFFFD"},
    {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
    {"\xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"},
    {"\xF0\x9F\x98", "\uFFFD"},
    {"\xF0\x9F\x98z", "\uFFFDz"},
    {"\xF0\x9F\xF0\x9F\x98\x80", "\uFFFD\U0001F600"},
    {"\xE6\xBC\xE6\xBC\xA2", "\uFFFD\u6f22"},
    {"\xE6", "\uFFFD"},
    {"\xC3\xC3\xA9", "\uFFFD\u00e9"},
    {"\xFF\xFE", "\uFFFD\uFFFD"},
    {"\xE1\x80\xC3\xF1\x80\x80\xFF", "\uFFFD\uFFFD\uFFFD\uFFFD"},
};

TEST(Utf8Stream, ReplacesAsPythonHoweverTheBytesArrive) {
  for (const auto& [bytes, expected] : kReplaced) {
    for (std::size_t step = 1; step <= bytes.size() + 1; ++step) {
      Utf8Stream stream;
      std::string out;
      for (std::size_t at = 0; at < bytes.size(); at += step) {
        out += stream.push(std::string_view(bytes).substr(at, step));
        EXPECT_EQ(find_invalid_utf8(out), std::nullopt);
      }
      out += stream.finish();
      EXPECT_EQ(out, expected) << "in steps of " << step;
      EXPECT_EQ(stream.finish(), "");
    }
  }
}

TEST(Utf8Stream, HoldsBackOnlyWhatIsIncomplete) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xF0\x9F"), "a");
  EXPECT_EQ(stream.push("\x98"), "");
  EXPECT_EQ(stream.push("\x80!"), "\U0001F600!");
  EXPECT_EQ(stream.push("\xE6"), "");
  // The next byte shows that the character never completes.
  EXPECT_EQ(stream.push("b"),
            "\uFFFD"
            "b");
  EXPECT_EQ(stream.finish(), "");
}

}  // namespace
}  // namespace qmlp::text
