#include "io/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;

Json parse(std::string_view text) {
  auto result = Json::parse(text, "text");
  EXPECT_TRUE(result.has_value()) << result.error().message;
  return result ? *std::move(result) : Json();
}

TEST(Json, ReadsEveryKind) {
  const Json json = parse(R"( {"a": [1, -2, 1.5, true, null, "x\u00e9\n"], "b": {}} )");
  ASSERT_NE(json.object(), nullptr);
  const JsonArray& array = *json.find("a")->array();
  ASSERT_EQ(array.size(), 6u);
  EXPECT_EQ(array[0].integer(), 1);
  EXPECT_EQ(array[1].integer(), -2);
  EXPECT_EQ(array[1].unsigned_integer(), std::nullopt);
  EXPECT_EQ(array[2].integer(), std::nullopt);
  EXPECT_EQ(array[2].number(), 1.5);
  EXPECT_EQ(array[3].boolean(), true);
  EXPECT_TRUE(array[4].is_null());
  EXPECT_EQ(*array[5].string(), "x\xC3\xA9\n");
  EXPECT_EQ(json.find("b")->object()->size(), 0u);
  EXPECT_EQ(json.find("c"), nullptr);
  EXPECT_EQ(array[0].find("a"), nullptr);
}

TEST(Json, KeepsIntegersExactly) {
  EXPECT_EQ(parse("9223372036854775807").integer(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(parse("-9223372036854775808").integer(), std::numeric_limits<std::int64_t>::min());
  const Json large = parse("18446744073709551615");
  EXPECT_EQ(large.integer(), std::nullopt);
  EXPECT_EQ(large.unsigned_integer(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(parse("18446744073709551616").unsigned_integer(), std::nullopt);
  EXPECT_EQ(parse("2.0").integer(), std::nullopt);
  EXPECT_EQ(parse("1e2").integer(), std::nullopt);
}

TEST(Json, KeepsMemberOrderAndFindsInLargeObjects) {
  std::string text = "{";
  for (int i = 999; i >= 0; --i)
    text += "\"k" + std::to_string(i) + "\": " + std::to_string(i) + ",";
  text.back() = '}';
  const Json json = parse(text);
  const JsonObject& object = *json.object();
  ASSERT_EQ(object.size(), 1000u);
  EXPECT_EQ(object.members().front().name, "k999");
  for (int i = 0; i < 1000; ++i) {
    const Json* value = object.find("k" + std::to_string(i));
    ASSERT_NE(value, nullptr) << i;
    EXPECT_EQ(value->integer(), i);
  }
  EXPECT_EQ(object.find("k1000"), nullptr);
  EXPECT_EQ(object.find(""), nullptr);
}

TEST(Json, RefusesDuplicateKeys) {
  expect_error(Json::parse(R"({"t": 1, "t": 2})", "f"), Errc::corrupt_file,
               "f: ", "duplicate key 't'");
  expect_error(Json::parse(R"({"A": 1, "\u0041": 2})", "f"), Errc::corrupt_file,
               "duplicate key 'A'");
  expect_error(Json::parse(R"({"o": [{"shape": 1, "x": 0, "shape": 1}]})", "f"), Errc::corrupt_file,
               "duplicate key 'shape'");
  expect_error(Json::parse(R"({"": 1, "": 1})", "f"), Errc::corrupt_file, "duplicate key ''");
}

TEST(Json, NamesTheByteOfASyntaxError) {
  expect_error(Json::parse("[1, 2", "f"), Errc::corrupt_file, "f: invalid JSON: byte 5");
  expect_error(Json::parse("", "f"), Errc::corrupt_file, "byte 0");
  expect_error(Json::parse("[1] x", "f"), Errc::corrupt_file, "byte 4");
  expect_error(Json::parse("{\"a\":nul}", "f"), Errc::corrupt_file, "byte ");
  expect_error(Json::parse("// no\n1", "f"), Errc::corrupt_file, "byte 0");
  expect_error(Json::parse("[1,]", "f"), Errc::corrupt_file, "byte 3");
  expect_error(Json::parse("[1e999]", "f"), Errc::corrupt_file, "1e999");
  expect_error(Json::parse("NaN", "f"), Errc::corrupt_file, "byte ");
}

TEST(Json, RefusesWhatFollowsTheValue) {
  using std::string_view_literals::operator""sv;
  for (const std::string_view tail : {"x"sv, "{}"sv, "]"sv, ","sv, "// no"sv, "\0"sv, "\0garbage"sv,
                                      "\0{}"sv, "\xFF"sv, "\xEF\xBB\xBF"sv}) {
    for (const std::string_view blanks : {""sv, "\n "sv}) {
      const std::string text = R"({"a": 1})" + std::string(blanks) + std::string(tail);
      const std::string byte = "byte " + std::to_string(8 + blanks.size()) + ":";
      expect_error(Json::parse(text, "f"), Errc::corrupt_file, "f: invalid JSON: " + byte,
                   "expected end of input");
    }
  }
  EXPECT_EQ(parse("{\"a\": 1}\r\n\t ").find("a")->integer(), 1);
}

TEST(Json, RefusesInvalidUtf8) {
  expect_error(Json::parse("[\"\xFF\"]", "f"), Errc::corrupt_file, "UTF-8");
  expect_error(Json::parse("[\"\xC0\xAF\"]", "f"), Errc::corrupt_file, "UTF-8");
  expect_error(Json::parse("[\"\xED\xA0\x80\"]", "f"), Errc::corrupt_file, "UTF-8");
  expect_error(Json::parse("[\"\\ud800\"]", "f"), Errc::corrupt_file, "surrogate");
  expect_error(Json::parse("[\"a\nb\"]", "f"), Errc::corrupt_file, "byte ");
}

TEST(Json, LimitsDepth) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_TRUE(Json::parse(nested(Json::kMaxDepth), "f").has_value());
  expect_error(Json::parse(nested(Json::kMaxDepth + 1), "f"), Errc::corrupt_file,
               "deeper than 100");
  expect_error(Json::parse(std::string(200'000, '['), "f"), Errc::corrupt_file, "deeper than 100");
}

TEST(Json, WritesWhatItReads) {
  const std::string text =
      R"({"a": [1, -5, 18446744073709551615, 0.1, 100000.0, 1e+300, 1e-05, true, null], )"
      R"("s": "q\"\\\n\u0001é", "e": {}, "f": []})";
  const Json json = parse(text);
  EXPECT_EQ(json.dump(), text);
  const Json again = parse(json.dump(2));
  EXPECT_EQ(again.dump(), text);
  EXPECT_EQ(again.find("a")->array()->at(3).number(), 0.1);
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).dump(), "null");
}

TEST(Json, SetsAndErasesMembers) {
  Json json = parse(R"({"a": 1, "b": 2, "c": 3})");
  JsonObject& object = *json.object();
  object.set("b", "two");
  object.set("d", Json(JsonArray{Json(1), Json(2)}));
  object.erase("a");
  EXPECT_EQ(json.dump(), R"({"b": "two", "c": 3, "d": [1, 2]})");
}

}  // namespace
}  // namespace qmlp
