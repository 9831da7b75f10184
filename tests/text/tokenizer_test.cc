#include "qmlp/tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "text/fixture.h"

namespace qmlp::text {
namespace {

class FixtureTest : public testing::TestWithParam<const char*> {};

// Ids and decoded texts by Hugging Face.
TEST_P(FixtureTest, EncodesAndDecodesAsHuggingFace) {
  const auto tokenizer = open_tokenizer(fixture(GetParam()));
  ASSERT_NE(tokenizer, nullptr);
  const Json cases = read_json(fixture(GetParam()) + "/expected.json");
  ASSERT_NE(cases.array(), nullptr);
  ASSERT_GT(cases.array()->size(), 100u);
  for (const Json& expected : *cases.array()) {
    const std::string& text = *expected.find("text")->string();
    const auto ids = tokenizer->encode(text);
    ASSERT_TRUE(ids) << text << ": " << ids.error().message;
    EXPECT_EQ(*ids, read_ids(*expected.find("ids"))) << text;
    const auto bytes = tokenizer->decode(*ids);
    ASSERT_TRUE(bytes) << bytes.error().message;
    Utf8Stream stream;
    std::string decoded = stream.push(*bytes);
    decoded += stream.finish();
    EXPECT_EQ(decoded, *expected.find("decoded")->string());
  }
}

INSTANTIATE_TEST_SUITE_P(Tokenizer, FixtureTest,
                         testing::Values("smollm", "llama3", "nfc", "unknown", "steps"),
                         [](const auto& test) { return std::string(test.param); });

TEST(Tokenizer, SpecialTokensInTextStayText) {
  const auto tokenizer = open_tokenizer(fixture("smollm"));
  ASSERT_NE(tokenizer, nullptr);
  for (const char* text : {"<|im_start|>", "a<|im_end|>b", "<|endoftext|><|im_start|>"}) {
    const auto ids = tokenizer->encode(text);
    ASSERT_TRUE(ids);
    EXPECT_GT(ids->size(), 3u);
    for (const std::int32_t id : *ids) EXPECT_FALSE(tokenizer->is_special(id)) << text;
    EXPECT_EQ(*tokenizer->decode(*ids), text);
  }
}

TEST(Tokenizer, KnowsItsTokens) {
  const auto tokenizer = open_tokenizer(fixture("smollm"));
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 640);
  EXPECT_EQ(tokenizer->token_id("<|im_start|>"), 1);
  EXPECT_EQ(*tokenizer->token_bytes(1), "<|im_start|>");
  EXPECT_TRUE(tokenizer->is_special(1));
  EXPECT_EQ(tokenizer->token_id("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer->token_id(""), std::nullopt);
  const auto newline = tokenizer->token_id("\u010A");  // \n in the byte-level alphabet
  ASSERT_TRUE(newline);
  EXPECT_EQ(*tokenizer->token_bytes(*newline), "\n");
  EXPECT_FALSE(tokenizer->is_special(*newline));
  EXPECT_EQ(tokenizer->token_id("\n"), std::nullopt);
  // An id without a token, within the size, because its byte was taken out.
  std::int32_t hole = -1;
  for (std::int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    if (!tokenizer->token_bytes(id)) hole = id;
  }
  EXPECT_GT(hole, 0);
  for (const std::int32_t id : {-1, 640, hole, INT32_MAX, INT32_MIN}) {
    const auto bytes = tokenizer->token_bytes(id);
    ASSERT_FALSE(bytes) << id;
    EXPECT_EQ(bytes.error().code, Errc::invalid_argument);
    EXPECT_NE(bytes.error().message.find(std::to_string(id)), std::string::npos);
    EXPECT_FALSE(tokenizer->is_special(id));
    const std::int32_t ids[] = {1, id};
    EXPECT_FALSE(tokenizer->decode(ids));
  }
}

TEST(Tokenizer, AddedTokensDecodeToTheirText) {
  const auto tokenizer = open_tokenizer(fixture("llama3"));
  ASSERT_NE(tokenizer, nullptr);
  for (const char* text : {"<think>", "\u6f22\u5b57", "   "}) {
    const auto id = tokenizer->token_id(text);
    ASSERT_TRUE(id) << text;
    EXPECT_EQ(*tokenizer->token_bytes(*id), text);
    EXPECT_FALSE(tokenizer->is_special(*id));
  }
}

TEST(Tokenizer, RefusesInvalidUtf8WithItsOffset) {
  const auto tokenizer = open_tokenizer(fixture("smollm"));
  ASSERT_NE(tokenizer, nullptr);
  const auto ids = tokenizer->encode("abc\xE6\xBC");
  ASSERT_FALSE(ids);
  EXPECT_EQ(ids.error().code, Errc::invalid_argument);
  EXPECT_EQ(ids.error().message, "text: invalid UTF-8 at byte offset 3");
  const ChatMessage messages[] = {{"user", "fine"}, {"user", "x\xFF"}};
  const auto chat = tokenizer->encode_chat(messages);
  ASSERT_FALSE(chat);
  EXPECT_EQ(chat.error().message, "message 2 content: invalid UTF-8 at byte offset 1");
}

TEST(Tokenizer, IsSharedBetweenThreads) {
  const auto tokenizer = open_tokenizer(fixture("llama3"));
  ASSERT_NE(tokenizer, nullptr);
  const Json cases = read_json(fixture("llama3") + "/expected.json");
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (int& count : wrong) {
    threads.emplace_back([&] {
      for (const Json& expected : *cases.array()) {
        const auto ids = tokenizer->encode(*expected.find("text")->string());
        if (!ids || *ids != read_ids(*expected.find("ids"))) ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace qmlp::text
