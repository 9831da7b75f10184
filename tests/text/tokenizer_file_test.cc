#include "text/tokenizer_file.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "text/fixture.h"

namespace qmlp::text {
namespace {

// A valid file, small enough to change by hand. The vocabulary's bytes are a and b.
constexpr std::string_view kFile = R"({
 "added_tokens": [{"id": 4, "content": "<s>", "special": true, "normalized": false}],
 "normalizer": null,
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
 "post_processor": null,
 "decoder": {"type": "ByteLevel"},
 "model": {"type": "BPE", "dropout": null, "unk_token": null, "byte_fallback": false,
  "ignore_merges": false,
  "vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3},
  "merges": ["a b", ["ab", "a"]]}
})";

// The file with one place changed.
std::string changed(std::string_view from, std::string_view to) {
  std::string text(kFile);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(TokenizerFile, ReadsTheSmallest) {
  const auto file = parse_tokenizer_file(kFile, "t.json");
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->vocabulary.size(), 5);
  Bpe::Scratch scratch;
  std::vector<std::int32_t> ids;
  file->bpe->encode_word("abaab", scratch, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{3, 2}));
}

TEST(TokenizerFile, ReadsWhatMeansTheSame) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("type": "BPE", )", ""},
      {R"("dropout": null)", R"("dropout": 0.0)"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Sequence", "normalizers": []})"},
      {R"("normalizer": null)", R"("normalizer": {"type": "NFC"})"},
      {R"({"type": "ByteLevel"})", R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]})"},
      {R"("byte_fallback": false,)",
       R"("end_of_word_suffix": "", "continuing_subword_prefix": null,)"},
  };
  for (const auto& [from, to] : cases) {
    const auto file = parse_tokenizer_file(changed(from, to), "t.json");
    EXPECT_TRUE(file) << to << ": " << file.error().message;
  }
}

TEST(TokenizerFile, RefusesByNameWhatItDoesNotUnderstand) {
  const struct {
    const char* from;
    const char* to;
    Errc code;
    const char* message;
  } cases[] = {
      {R"("type": "BPE")", R"("type": "Unigram")", Errc::unsupported, "'Unigram'"},
      {R"("type": "BPE")", R"("type": "WordPiece")", Errc::unsupported, "'WordPiece'"},
      {R"("byte_fallback": false)", R"("byte_fallback": true)", Errc::unsupported, "byte_fallback"},
      {R"("dropout": null)", R"("dropout": 0.1)", Errc::unsupported, "dropout"},
      {R"("unk_token": null)", R"("end_of_word_suffix": "</w>")", Errc::unsupported, "'</w>'"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Lowercase"})", Errc::unsupported,
       "'Lowercase'"},
      {R"("normalizer": null)",
       R"("normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]})",
       Errc::unsupported, "'NFKC'"},
      {R"({"type": "ByteLevel", "add)", R"({"type": "Metaspace", "add)", Errc::unsupported,
       "'Metaspace'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})", "null",
       Errc::unsupported, "pre_tokenizer: there is none"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       Errc::unsupported, "its step 1 is 'ByteLevel'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, {"type": "ByteLevel"}]})",
       Errc::unsupported, "'Punctuation'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
           "pattern": {"Regex": "\\w+"}}, {"type": "ByteLevel"}]})",
       Errc::unsupported, "'\\w'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Swallowed",
           "pattern": {"String": "x"}}, {"type": "ByteLevel"}]})",
       Errc::unsupported, "'Swallowed'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
           "pattern": {"Regex": ""}}, {"type": "ByteLevel"}]})",
       Errc::corrupt_file, "Split.pattern"},
      {R"("decoder": {"type": "ByteLevel"})", R"("decoder": null)", Errc::unsupported, "decoder"},
      {R"("decoder": {"type": "ByteLevel"})", R"("decoder": {"type": "WordPiece"})",
       Errc::unsupported, "'WordPiece'"},
      {R"("special": true)", R"("special": false, "single_word": true)", Errc::unsupported,
       "single_word"},
      {R"({"a": 0, "b": 1, "ab": 2, "aba": 3})", "{}", Errc::corrupt_file, "vocab is empty"},
      {R"({"a": 0, "b": 1, "ab": 2, "aba": 3})", "[]", Errc::corrupt_file,
       "model.vocab is an array"},
      {R"("vocab":)", R"("vocabulary":)", Errc::corrupt_file, "model.vocab is missing"},
      {R"("merges":)", R"("merge":)", Errc::corrupt_file, "model.merges is missing"},
      {R"("a b")", R"("a b c")", Errc::corrupt_file, "model.merges[0] is not two tokens"},
      {R"("a b")", R"("ab")", Errc::corrupt_file, "model.merges[0] is not two tokens"},
      {R"("a b")", "7", Errc::corrupt_file, "model.merges[0] is not two tokens"},
      {R"(["ab", "a"])", R"(["ab"])", Errc::corrupt_file, "model.merges[1] is not two tokens"},
      {R"(["ab", "a"])", R"(["ab", "b"])", Errc::corrupt_file, "'abb' is not in model.vocab"},
      {R"(["ab", "a"])", R"(["x", "b"])", Errc::corrupt_file, "'x' is not in model.vocab"},
      {R"("aba": 3)", R"("aba": 2)", Errc::corrupt_file, "token id 2"},
      {R"("aba": 3)", R"("aba": -1)", Errc::corrupt_file, "its id is -1"},
      {R"("aba": 3)", R"("aba": 1e3)", Errc::corrupt_file, "the id of 'aba' is a number"},
      {R"("aba": 3)", R"("aba": 4000000000)", Errc::corrupt_file, "its id is 4000000000"},
      {R"("aba": 3)", R"("a": 3)", Errc::corrupt_file, "duplicate key"},
      {R"({"id": 4,)", R"({"id": 1,)", Errc::corrupt_file, "token id 1"},
      {R"({"id": 4,)", R"({"id": "4",)", Errc::corrupt_file, "added_tokens[0].id"},
      {R"("content": "<s>")", R"("content": "a")", Errc::corrupt_file, "has the ids 0 and 4"},
      {R"("content": "<s>")", R"("content": "")", Errc::corrupt_file, "added_tokens[0]"},
      {R"("special": true)", R"("special": 1)", Errc::corrupt_file, "added_tokens[0].special"},
      {R"("unk_token": null)", R"("unk_token": "<unk>")", Errc::corrupt_file, "'<unk>'"},
      {R"("model":)", R"("modell":)", Errc::corrupt_file, "no object 'model'"},
  };
  for (const auto& [from, to, code, message] : cases) {
    const auto file = parse_tokenizer_file(changed(from, to), "t.json");
    ASSERT_FALSE(file) << to;
    const std::string& found = file.error().message;
    EXPECT_EQ(file.error().code, code) << found;
    EXPECT_NE(found.find(message), std::string::npos) << to << ": " << found;
    EXPECT_TRUE(found.starts_with("t.json: ")) << found;
    EXPECT_EQ(found.find('\n'), std::string::npos) << found;
  }
}

TEST(TokenizerFile, MergesNeverMakeASpecialToken) {
  const std::string text = changed(R"({"id": 4, "content": "<s>")", R"({"id": 2, "content": "ab")");
  const auto file = parse_tokenizer_file(text, "t.json");
  ASSERT_TRUE(file) << file.error().message;
  Bpe::Scratch scratch;
  std::vector<std::int32_t> ids;
  file->bpe->encode_word("ab", scratch, ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{0, 1}));
}

TEST(TokenizerFile, OpenSaysWhichFileIsMissing) {
  const TemporaryFolder folder;
  const auto missing = Tokenizer::open(folder.path());
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Errc::io);
  EXPECT_NE(missing.error().message.find("no tokenizer.json"), std::string::npos);
  folder.write("tokenizer.model", "x");
  const auto sentencepiece = Tokenizer::open(folder.path());
  ASSERT_FALSE(sentencepiece);
  EXPECT_EQ(sentencepiece.error().code, Errc::unsupported);
  EXPECT_NE(sentencepiece.error().message.find("SentencePiece"), std::string::npos);
  folder.write("tokenizer.json", "{\"model\":");
  const auto broken = Tokenizer::open(folder.path());
  ASSERT_FALSE(broken);
  EXPECT_EQ(broken.error().code, Errc::corrupt_file);
  folder.write("tokenizer.json", kFile);
  const auto good = Tokenizer::open(folder.path());
  ASSERT_TRUE(good) << good.error().message;
  folder.write("tokenizer_config.json", "[");
  EXPECT_FALSE(Tokenizer::open(folder.path()));
}

}  // namespace
}  // namespace qmlp::text
