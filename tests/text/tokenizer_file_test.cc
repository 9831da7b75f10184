#include "text/tokenizer_file.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
      {R"("post_processor": null)", R"("post_processor": {"type": "ByteLevel"})"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})", "null"},
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
      {R"("type": "BPE")", R"("type": "Unigram")", Errc::corrupt_file,
       "model.vocab is an object, an array is required"},
      {R"("type": "BPE")", R"("type": "WordPiece")", Errc::unsupported, "'WordPiece'"},
      {R"("byte_fallback": false)", R"("byte_fallback": true)", Errc::unsupported, "byte_fallback"},
      {R"("byte_fallback": false)", R"("byte_fallback": 1)", Errc::corrupt_file, "byte_fallback"},
      {R"("dropout": null)", R"("dropout": 0.1)", Errc::unsupported, "dropout"},
      {R"("unk_token": null)", R"("end_of_word_suffix": "</w>")", Errc::unsupported, "'</w>'"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Lowercase"})", Errc::unsupported,
       "'Lowercase'"},
      {R"("normalizer": null)",
       R"("normalizer": {"type": "Sequence", "normalizers": [{"type": "BertNormalizer"}]})",
       Errc::unsupported, "'BertNormalizer'"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Sequence"})", Errc::corrupt_file,
       "normalizer.normalizers is missing"},
      {R"("normalizer": null)", R"("normalizer": [])", Errc::corrupt_file,
       "normalizer: a step is an array"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Replace", "content": "x"})",
       Errc::corrupt_file, "Replace.pattern"},
      {R"("normalizer": null)",
       R"("normalizer": {"type": "Replace", "pattern": {"Regex": "\\p{Han}"}, "content": "x"})",
       Errc::unsupported, "the property 'Han'"},
      {R"("normalizer": null)", R"("normalizer": {"type": "Prepend", "prepend": 7})",
       Errc::corrupt_file, "Prepend.prepend is an integer"},
      {R"("normalizer": null)",
       R"("normalizer": {"type": "Precompiled", "precompiled_charsmap": "A"})", Errc::corrupt_file,
       "base64"},
      {R"("normalizer": null)",
       R"("normalizer": {"type": "Precompiled", "precompiled_charsmap": "//8AAAAA"})",
       Errc::corrupt_file, "charsmap: its trie"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       Errc::unsupported, "its step 1 is 'ByteLevel'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "UnicodeScripts"})", Errc::unsupported, "'UnicodeScripts'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Punctuation", "behavior": "Gone"})", Errc::unsupported,
       "Punctuation.behavior is 'Gone'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Metaspace", "replacement": "__"})", Errc::corrupt_file,
       "Metaspace.replacement is '__'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "last"})", Errc::unsupported,
       "Metaspace.prepend_scheme is 'last'"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first",
           "add_prefix_space": false})",
       Errc::corrupt_file, "they contradict each other"},
      {R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
           "pattern": {"Regex": "\\h+"}}, {"type": "ByteLevel"}]})",
       Errc::unsupported, "'\\h'"},
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
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]})",
       Errc::unsupported, "'ByteFallback' after 'Fuse'"},
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]})",
       Errc::unsupported, "'Fuse' after 'ByteLevel'"},
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 0})", Errc::unsupported,
       "after 'Fuse'"},
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"},
           {"type": "Strip", "content": " ", "start": 0, "stop": 1}]})",
       Errc::unsupported, "start 0 and stop 1"},
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"},
           {"type": "Strip", "content": "\u2581", "start": 1, "stop": 0}]})",
       Errc::unsupported, "one ASCII character"},
      {R"("decoder": {"type": "ByteLevel"})",
       R"("decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""})",
       Errc::unsupported, "Replace.pattern"},
      {R"("special": true)", R"("special": false, "single_word": 1)", Errc::corrupt_file,
       "single_word"},
      {R"("post_processor": null)", R"("post_processor": {"type": "BertProcessing"})",
       Errc::unsupported, "'BertProcessing'"},
      {R"("post_processor": null)", R"("post_processor": {"type": "TemplateProcessing"})",
       Errc::corrupt_file, "TemplateProcessing.single is missing"},
      {R"("post_processor": null)",
       R"("post_processor": {"type": "TemplateProcessing", "single": []})", Errc::unsupported,
       "no Sequence A"},
      {R"("post_processor": null)",
       R"("post_processor": {"type": "TemplateProcessing",
           "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]})",
       Errc::corrupt_file, "special_tokens has no '<s>'"},
      {R"("post_processor": null)",
       R"("post_processor": {"type": "TemplateProcessing",
           "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
           "special_tokens": {"<s>": {"ids": [99]}}})",
       Errc::corrupt_file, "an id of '<s>' is no token"},
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

// A file of SentencePiece's kind. Some bytes have no token.
constexpr std::string_view kSentencePiece = R"({
 "added_tokens": [{"id": 0, "content": "<unk>", "special": true},
  {"id": 1, "content": "<s>", "special": true}, {"id": 9, "content": "[x]", "special": false,
   "normalized": false}],
 "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
  {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
 "pre_tokenizer": null,
 "post_processor": {"type": "TemplateProcessing",
  "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
  "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
 "decoder": {"type": "Sequence", "decoders": [
  {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
  {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
 "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
  "vocab": {"<unk>": 0, "<s>": 1, "<0xC3>": 2, "<0xA9>": 3, "<0xF0>": 4, "\u2581": 5, "a": 6,
   "\u2581a": 7, "\u2581\u2581": 8},
  "merges": ["\u2581 a", "\u2581 \u2581"]}
})";

std::vector<std::int32_t> ids_of(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text);
  EXPECT_TRUE(ids) << ids.error().message;
  return ids ? *ids : std::vector<std::int32_t>();
}

using Ids = std::vector<std::int32_t>;

TEST(TokenizerFile, SentencePieceWithByteFallback) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", kSentencePiece);
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(ids_of(*tokenizer, "a a"), (Ids{7, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "  a"), (Ids{8, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "\u00e9"), (Ids{5, 2, 3}));
  // U+4E00 has no bytes: one unknown for the run, after bytes that follow it.
  EXPECT_EQ(ids_of(*tokenizer, "a\u4e00\u4e00\u00e9a"), (Ids{7, 2, 3, 0, 6}));
  // The prefix goes before each piece between added tokens.
  EXPECT_EQ(ids_of(*tokenizer, "a[x]a"), (Ids{7, 9, 7}));
  EXPECT_EQ(ids_of(*tokenizer, ""), Ids{});
  EXPECT_EQ(*tokenizer->encode_prompt("a"), (Ids{1, 7}));
  EXPECT_EQ(*tokenizer->encode_prompt(""), Ids{1});
  EXPECT_EQ(*tokenizer->decode(Ids{7, 5, 2, 3}), "a \u00e9");
  EXPECT_EQ(*tokenizer->decode(Ids{8, 7}), "  a");
  EXPECT_EQ(*tokenizer->token_bytes(7), " a");
  EXPECT_EQ(*tokenizer->token_bytes(2), "\xC3");
}

// The right sides are Hugging Face's.
TEST(TokenizerFile, AddedTokensOfWhiteSpace) {
  std::string file(kSentencePiece);
  const std::string_view last = R"("content": "[x]", "special": false,)";
  file.replace(file.find(last), last.size(),
               R"("content": "[x]", "special": false, "rstrip": true, "normalized": false},
                  {"id": 10, "content": "\n", "special": false, "rstrip": true,
                   "normalized": false},
                  {"id": 11, "content": "\t", "special": false, "lstrip": true, "rstrip": true,
                   "normalized": false},
                  {"id": 12, "content": "\r", "special": false,)");
  const TemporaryFolder folder;
  folder.write("tokenizer.json", file);
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(ids_of(*tokenizer, "a\n\na"), (Ids{7, 10, 10, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "a \n \n"), (Ids{7, 5, 10, 10}));
  EXPECT_EQ(ids_of(*tokenizer, "\n\r a"), (Ids{10, 12, 5, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "[x]\n a"), (Ids{9, 10, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "a \t \t a"), (Ids{7, 11, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "[x]\t a"), (Ids{9, 7}));
  EXPECT_EQ(ids_of(*tokenizer, "\n\t\n"), (Ids{10, 10}));
}

TEST(Detokenizer, GivesTextAsItBecomesComplete) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", kSentencePiece);
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  const auto stream = [&](const Ids& ids) {
    Detokenizer detokenizer(*tokenizer);
    std::vector<std::string> out;
    for (const std::int32_t id : ids) out.push_back(detokenizer.push(id));
    out.push_back(detokenizer.finish());
    return out;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(stream({7, 7}), (Strings{"a", " a", ""}));
  EXPECT_EQ(stream({5, 5, 6}), (Strings{"", " ", "a", ""}));
  EXPECT_EQ(stream({6, 5}), (Strings{"a", " ", ""}));
  EXPECT_EQ(stream({2, 3, 6}), (Strings{"", "\u00e9", "a", ""}));
  EXPECT_EQ(stream({2, 6}), (Strings{"", "\uFFFDa", ""}));
  EXPECT_EQ(stream({4, 4, 2}), (Strings{"", "\uFFFD", "\uFFFD", "\uFFFD"}));
  // Ids without a token say nothing, whatever they come between.
  EXPECT_EQ(stream({99, 7, -1, 2, INT32_MAX, 3}), (Strings{"", "a", "", "", "", "\u00e9", ""}));
}

constexpr std::string_view kUnigram = R"({
   "added_tokens": [{"id": 0, "content": "<unk>", "special": true}],
   "pre_tokenizer": {"type": "Metaspace", "replacement": "_", "add_prefix_space": false},
   "decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"},
   "model": {"type": "Unigram", "unk_id": 0,
    "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["ab", -1.5], ["_", -3], ["_a", -1]]}
  })";

TEST(TokenizerFile, UnigramWithScores) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", kUnigram);
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(ids_of(*tokenizer, "abba"), (Ids{3, 2, 1}));
  EXPECT_EQ(ids_of(*tokenizer, "b a\u4e00\u4e01b"), (Ids{2, 5, 0, 2}));
  // Text that spells a special token does not become it.
  EXPECT_EQ(ids_of(*tokenizer, "<unk>"), (Ids{0}));
  EXPECT_EQ(ids_of(*tokenizer, "a<unk>b"), (Ids{1, 0, 2}));
  EXPECT_EQ(*tokenizer->decode(Ids{5, 4, 5}), "a  a");
  const std::pair<const char*, const char*> cases[] = {
      {R"("unk_id": 0,)", ""},
      {R"("unk_id": 0)", R"("unk_id": 6)"},
      {R"("unk_id": 0)", R"("unk_id": -1)"},
      {R"(["a", -1.0])", R"(["a"])"},
      {R"(["a", -1.0])", R"(["a", "b"])"},
      {R"(["a", -1.0])", R"([1, 2])"},
      {R"(["a", -1.0])", "7"},
      {R"(["a", -1.0])", R"(["b", -1.0])"},
      {R"([["<unk>", 0.0], ["a", -1.0], ["b", -1.0], ["ab", -1.5], ["_", -3], ["_a", -1]])", "[]"},
  };
  for (const auto& [from, to] : cases) {
    std::string text(kUnigram);
    text.replace(text.find(from), std::string_view(from).size(), to);
    const auto file = parse_tokenizer_file(text, "t.json");
    ASSERT_FALSE(file) << to;
    EXPECT_EQ(file.error().code, Errc::corrupt_file) << file.error().message;
    EXPECT_TRUE(file.error().message.starts_with("t.json: ")) << file.error().message;
  }
  std::string longest(kUnigram);
  longest.replace(longest.find(R"("ab")"), 4, '"' + std::string(5000, 'a') + '"');
  const auto refused = parse_tokenizer_file(longest, "t.json");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::unsupported);
}

// Files with bytes changed and members exchanged either are refused or work.
TEST(TokenizerFile, AnyFileIsSafe) {
  std::mt19937 rng(21);
  const std::vector<std::string> parts = {
      "null",
      "-1",
      "0",
      "7",
      "4194304",
      "1e300",
      "\"\"",
      "\"a\"",
      "\"\u2581\"",
      "[]",
      "{}",
      "true",
      R"({"type": "NFKC"})",
      R"({"type": "Metaspace", "replacement": "\u2581"})",
      R"({"type": "ByteLevel"})",
      R"({"type": "Strip", "content": " ", "start": 9, "stop": 0})",
      R"({"type": "Fuse"})",
      R"({"type": "WhitespaceSplit"})"};
  const std::string text = "a b<s>[x] \u00e9\u4e00aba<unk>  ";
  int read = 0;
  for (int round = 0; round < 60000; ++round) {
    std::string file(round % 3 == 0 ? kFile : round % 3 == 1 ? kSentencePiece : kUnigram);
    for (int i = 0; i < 1 + round % 3; ++i) {
      // From a place where a value may start to a place where one may end.
      const std::size_t begin = file.find_first_of(":[,", rng() % file.size());
      if (begin == std::string::npos) continue;
      const std::size_t end = file.find_first_of(",]}", begin + 1);
      if (rng() % 8 == 0) {
        file[rng() % file.size()] = static_cast<char>(rng());
      } else if (end != std::string::npos && end - begin < 200) {
        file.replace(begin + 1, end - begin - 1, parts[rng() % parts.size()]);
      }
    }
    const auto parsed = parse_tokenizer_file(file, "t.json");
    if (!parsed) {
      EXPECT_TRUE(parsed.error().message.starts_with("t.json")) << parsed.error().message;
      EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos) << parsed.error().message;
      continue;
    }
    ++read;
    auto scratch = RegexScratch::make(text.size());
    ASSERT_TRUE(scratch);
    Piece piece{text, true};
    if (!parsed->normalizer.run(piece, *scratch)) continue;
    Ids ids;
    Bpe::Scratch bpe_scratch;
    Unigram::Scratch unigram_scratch;
    const Status status =
        parsed->pre_tokenizer.run(piece.text, true, *scratch, [&](std::string_view word) {
          if (parsed->bpe != nullptr) parsed->bpe->encode_word(word, bpe_scratch, ids);
          if (parsed->unigram != nullptr) parsed->unigram->encode_word(word, unigram_scratch, ids);
        });
    static_cast<void>(status);
    std::string decoded;
    for (const std::int32_t id : ids) {
      ASSERT_TRUE(parsed->vocabulary.contains(id)) << file;
      decoded += parsed->token_bytes(id, decoded.empty());
    }
    Decoder::Strip strip = parsed->decoder.strip();
    take_strip(strip, decoded);
  }
  EXPECT_GT(read, 1000);
}

TEST(TokenizerFile, DeepNestingIsRefused) {
  const std::pair<const char*, const char*> kinds[] = {
      {R"("normalizer": null)", "normalizers"},
      {R"("post_processor": null)", "processors"},
      {R"("decoder": {"type": "ByteLevel"})", "decoders"},
      {R"("pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})",
       "pretokenizers"}};
  for (const auto& [from, list] : kinds) {
    const std::string member(from, std::string_view(from).find(':') + 1);
    std::string nested = R"({"type": "ByteLevel"})";
    for (int i = 0; i < 20; ++i) {
      nested = std::string(R"({"type": "Sequence", ")") + list + "\": [" + nested + "]}";
    }
    const auto file = parse_tokenizer_file(changed(from, member + nested), "t.json");
    ASSERT_FALSE(file) << list;
    EXPECT_NE(file.error().message.find("nested too deep"), std::string::npos)
        << file.error().message;
  }
  std::string steps;
  for (int i = 0; i < 40; ++i) steps += R"({"type": "NFC"},)";
  const auto many = parse_tokenizer_file(
      changed(R"("normalizer": null)", R"("normalizer": {"type": "Sequence", "normalizers": [)" +
                                           steps + R"({"type": "NFC"}]})"),
      "t.json");
  ASSERT_FALSE(many);
  EXPECT_EQ(many.error().code, Errc::unsupported);
}

TEST(TokenizerFile, TokensOfTheConfig) {
  const TemporaryFolder folder;
  folder.write("tokenizer.json", kFile);
  folder.write("tokenizer_config.json", R"({"bos_token": "<s>", "eos_token": {"content": "<e>"},
    "add_bos_token": true, "add_eos_token": true, "added_tokens_decoder": {
      "4": {"content": "<s>", "special": true}, "7": {"content": "<e>", "special": true},
      "8": {"content": "ba", "lstrip": true}}})");
  const auto tokenizer = open_tokenizer(folder.path());
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->vocab_size(), 9);
  EXPECT_TRUE(tokenizer->is_special(7));
  EXPECT_EQ(*tokenizer->encode_prompt("a  bab"), (Ids{4, 0, 8, 1, 7}));
  const std::pair<const char*, const char*> cases[] = {
      {R"({"added_tokens_decoder": []})", "added_tokens_decoder is an array"},
      {R"({"added_tokens_decoder": {"x": {"content": "y"}}})", "added_tokens_decoder['x'].id"},
      {R"({"added_tokens_decoder": {"99999999999999999999": {"content": "y"}}})", ".id"},
      {R"({"added_tokens_decoder": {"5": {}}})", "has no content"},
      {R"({"added_tokens_decoder": {"0": {"content": "y"}}})", "token id 0"},
      {R"({"add_bos_token": 1})", ": add_bos_token is an integer"},
      {R"({"add_bos_token": true, "bos_token": "<x>"})", "bos_token '<x>' is not in"}};
  for (const auto& [config, message] : cases) {
    folder.write("tokenizer_config.json", config);
    const auto refused = Tokenizer::open(folder.path());
    ASSERT_FALSE(refused) << config;
    EXPECT_NE(refused.error().message.find(message), std::string::npos) << refused.error().message;
    EXPECT_EQ(refused.error().message.find('\n'), std::string::npos);
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
  EXPECT_EQ(sentencepiece.error().code, Errc::corrupt_file);
  EXPECT_NE(sentencepiece.error().message.find("tokenizer.model"), std::string::npos);
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
