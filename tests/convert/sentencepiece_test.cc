#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "convert/converted.h"
#include "convert/sentencepiece_merges.h"
#include "convert/tiny_gguf.h"

namespace qmlp {
namespace {

using test::Converted;
using test::expect_error;
using test::joined;
using test::TinyGguf;

std::string text(const std::vector<PieceMerge>& merges) {
  std::string out;
  for (const PieceMerge& merge : merges) {
    out += std::string(merge.left) + "+" + std::string(merge.right) + " ";
  }
  return out;
}

TEST(SentencePieceMerges, OrdersByScore) {
  EXPECT_EQ(text(sentencepiece_merges({{"a", 0, -1},
                                       {"b", 1, -2},
                                       {"ab", 2, -9},
                                       {"ba", 3, -5},
                                       {"aba", 4, -7},
                                       {"xyz", 5, -1}})),
            "b+a ab+a a+ba a+b ");
}

TEST(SentencePieceMerges, CutsBetweenCharacters) {
  const std::string space = "\xE2\x96\x81";
  const std::string e = "\xC3\xA9";
  const std::string both = space + e;
  EXPECT_EQ(text(sentencepiece_merges({{space, 0, -1}, {e, 1, -2}, {both, 2, -3}})),
            space + "+" + e + " ");
  // Half a character is no piece, even when the vocabulary spells it.
  EXPECT_EQ(text(sentencepiece_merges({{"\xE2\x96", 0, -1}, {"\x81", 1, -2}, {space, 2, -3}})), "");
}

TEST(SentencePieceMerges, EqualScoresAreInAFixedOrder) {
  EXPECT_EQ(text(sentencepiece_merges({{"a", 0, 0}, {"aa", 1, 0}, {"aaa", 2, 0}, {"aaaa", 3, 0}})),
            "aaa+a aa+aa aa+a a+aaa a+aa a+a ");
}

TEST(SentencePieceMerges, LeavesOutEndlessPieces) {
  const std::string piece(kMaxPieceCharacters + 1, 'a');
  EXPECT_EQ(text(sentencepiece_merges({{"a", 0, 0}, {piece.substr(1), 1, 0}, {piece, 2, 0}})), "");
}

// A SentencePiece vocabulary: <unk>, <s>, </s>, bytes, pieces.
class SentencePieceGguf : public TinyGguf {
 public:
  SentencePieceGguf() {
    text("tokenizer.ggml.model", "llama");
    text("tokenizer.ggml.pre", "default");
    unset("tokenizer.ggml.merges");
    unset("tokenizer.ggml.bos_token_id");
    unset("tokenizer.ggml.eos_token_id");
    texts("tokenizer.ggml.tokens", {"<unk>", "<s>", "</s>", "<0x0A>", "\xE2\x96\x81", "a",
                                    "\xE2\x96\x81"
                                    "a",
                                    "<|im_end|>"});
    i32s("tokenizer.ggml.token_type", {2, 3, 3, 6, 1, 1, 1, 4});
    f32s("tokenizer.ggml.scores", {0, 0, 0, 0, -2, -3, -1, -1000});
  }
};

TEST(ConvertSentencePiece, WritesATokenizer) {
  const Converted out((SentencePieceGguf()));
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  const Json json = out.json("tokenizer.json");
  const Json& model = *json.find("model");
  EXPECT_EQ(model.find("merges")->dump(), "[\"\xE2\x96\x81 a\"]");
  EXPECT_EQ(model.find("byte_fallback")->boolean(), true);
  EXPECT_EQ(model.find("fuse_unk")->boolean(), true);
  EXPECT_EQ(*model.find("unk_token")->string(), "<unk>");
  EXPECT_EQ(model.find("vocab")->find("<0x0A>")->integer(), 3);
  EXPECT_EQ(json.find("added_tokens")->array()->size(), 4u);
  EXPECT_TRUE(json.find("pre_tokenizer")->is_null());
  EXPECT_EQ(json.find("normalizer")->find("normalizers")->array()->size(), 2u);
  EXPECT_EQ(json.find("decoder")->find("decoders")->array()->size(), 4u);
  // bos in front unless the file says otherwise, and llama.cpp's ids where it names none.
  EXPECT_NE(json.find("post_processor")->find("special_tokens")->find("<s>"), nullptr);
  EXPECT_EQ(out.json("config.json").find("bos_token_id")->integer(), 1);
  EXPECT_EQ(out.json("generation_config.json").find("eos_token_id")->dump(), "2");
}

TEST(ConvertSentencePiece, FollowsTheFlags) {
  SentencePieceGguf gguf;
  gguf.flag("tokenizer.ggml.add_bos_token", false);
  gguf.flag("tokenizer.ggml.add_eos_token", true);
  gguf.flag("tokenizer.ggml.add_space_prefix", false);
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  const Json json = out.json("tokenizer.json");
  EXPECT_EQ(*json.find("normalizer")->find("type")->string(), "Replace");
  EXPECT_EQ(json.find("decoder")->find("decoders")->array()->size(), 3u);
  EXPECT_EQ(json.find("post_processor")->find("special_tokens")->find("<s>"), nullptr);
  EXPECT_NE(json.find("post_processor")->find("special_tokens")->find("</s>"), nullptr);
}

TEST(ConvertSentencePiece, RefusesBrokenVocabularies) {
  const auto refused = [](auto change, auto... texts) {
    SentencePieceGguf gguf;
    change(gguf);
    expect_error(Converted(gguf).report, Errc::corrupt_file, texts...);
  };
  refused([](TinyGguf& g) { g.unset("tokenizer.ggml.scores"); }, "tokenizer.ggml.scores");
  refused([](TinyGguf& g) { g.f32s("tokenizer.ggml.scores", {1, 2}); }, "each of 8 tokens");
  refused(
      [](TinyGguf& g) {
        g.f32s("tokenizer.ggml.scores", {0, 0, 0, 0, 0, 0, HUGE_VALF, 0});
      },
      "token 6 is not finite");
  refused([](TinyGguf& g) { g.u32("tokenizer.ggml.add_space_prefix", 1); },
          "add_space_prefix is not a boolean");
  refused([](TinyGguf& g) { g.u32("tokenizer.ggml.unknown_token_id", 99); },
          "unknown_token_id is not a token id below 8");
}

}  // namespace
}  // namespace qmlp
