#include "convert/gguf.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <random>
#include <string>

#include "convert/tiny_gguf.h"
#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;
using test::Ggml;
using test::GgufBuilder;
using test::TempFolder;
using test::TinyGguf;

Result<GgufFile> open(const std::string& contents) {
  const TempFolder folder;
  return GgufFile::open(folder.write("m.gguf", contents), false);
}

TEST(Gguf, ReadsMetadataAndTensors) {
  TinyGguf gguf;
  gguf.set("n.i8", 1, std::string("\xFB", 1));
  gguf.set("n.u64", 10, GgufBuilder::raw(std::numeric_limits<std::uint64_t>::max()));
  gguf.set("n.f64", 12, GgufBuilder::raw(0.25));
  gguf.flag("n.bool", true);
  const auto file = open(gguf.build());
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_EQ(*file->find("general.architecture")->text(), "llama");
  EXPECT_EQ(file->find("n.i8")->integer(), -5);
  EXPECT_EQ(file->find("n.u64")->integer(), std::nullopt);
  EXPECT_EQ(file->find("n.f64")->number(), 0.25);
  EXPECT_EQ(file->find("n.bool")->boolean(), true);
  EXPECT_EQ(file->find("llama.rope.freq_base")->number(), 100000.0);
  EXPECT_EQ(file->find("tokenizer.ggml.tokens")->texts()->at(5), "ab");
  EXPECT_EQ(file->find("tokenizer.ggml.token_type")->integers()->integer(2), 4);
  EXPECT_EQ(file->find("nothing"), nullptr);
  ASSERT_EQ(file->tensors().size(), 11u);
  const auto down =
      std::find_if(file->tensors().begin(), file->tensors().end(),
                   [](const GgufTensor& tensor) { return tensor.name == "blk.0.ffn_down.weight"; });
  ASSERT_NE(down, file->tensors().end());
  EXPECT_EQ(down->shape, (std::vector<std::int64_t>{64, 96}));
  EXPECT_EQ(down->bytes, 64u * 3 * 20);
  const std::string& stored = gguf.tensor("blk.0.ffn_down.weight").bytes;
  EXPECT_EQ(std::memcmp(file->data(*down).data(), stored.data(), stored.size()), 0);
  gguf.version = 2;
  EXPECT_TRUE(open(gguf.build()).has_value());
  gguf.alignment = 256;
  gguf.u32("general.alignment", 256);
  EXPECT_TRUE(open(gguf.build()).has_value());
}

TEST(Gguf, RefusesOtherFilesAndVersions) {
  expect_error(open(""), Errc::corrupt_file, "m.gguf", "GGUF");
  expect_error(open("GGU"), Errc::corrupt_file, "GGUF");
  expect_error(open("version https://git-lfs.github.com/spec/v1\n"), Errc::corrupt_file, "Git LFS");
  TinyGguf gguf;
  gguf.version = 1;
  expect_error(open(gguf.build()), Errc::unsupported, "version 1", "2 and 3");
  gguf.version = 4;
  expect_error(open(gguf.build()), Errc::unsupported, "version 4");
  gguf.version = 0x03000000;
  expect_error(open(gguf.build()), Errc::unsupported, "big-endian");
}

TEST(Gguf, RefusesEveryTruncation) {
  const TinyGguf gguf;
  const std::string whole = gguf.build();
  const std::size_t header = gguf.header().size();
  const TempFolder folder;
  const std::string path = folder.write("m.gguf", whole);
  for (std::size_t size = header; size > 0; --size) {
    std::filesystem::resize_file(path, size);
    const auto file = GgufFile::open(path);
    ASSERT_FALSE(file.has_value()) << size;
    const std::string& message = file.error().message;
    ASSERT_EQ(message.find('\n'), std::string::npos);
    if (size < 4) continue;  // not recognised as GGUF at all
    const auto at = message.find(": byte ");
    ASSERT_NE(at, std::string::npos) << message;
    ASSERT_LE(std::stoull(message.substr(at + 7)), size) << message;
  }
  expect_error(open(whole.substr(0, whole.size() - 32)), Errc::corrupt_file, "truncated");
}

// A file that ends where a record begins says so with that byte.
TEST(Gguf, NamesTheByteOfATruncation) {
  const TinyGguf gguf;
  const std::string whole = gguf.build();
  gguf.header();
  for (const std::size_t at : gguf.boundaries()) {
    if (at == 0) continue;
    const auto file = open(whole.substr(0, at));
    // The counts are compared with what is left as soon as they are known.
    expect_error(file, Errc::corrupt_file, at < 24 ? "byte " + std::to_string(at) : "byte ");
  }
  // Inside the data of the last tensor: its record is named.
  const std::string record = "byte " + std::to_string(gguf.boundaries().back());
  expect_error(open(whole.substr(0, whole.size() - 32)), Errc::corrupt_file, record, "ffn_down");
}

TEST(Gguf, NamesTheByteOfARepetition) {
  TinyGguf gguf;
  gguf.tensors.push_back(gguf.tensor("output_norm.weight"));
  gguf.header();
  expect_error(open(gguf.build()), Errc::corrupt_file, "duplicate tensor",
               "byte " + std::to_string(gguf.boundaries().back()) + ":");
  std::string whole = TinyGguf().build();
  const auto at = whole.find("llama.context_length");
  whole.replace(at, 20, "general.architecture");
  expect_error(open(whole), Errc::corrupt_file, "duplicate key",
               "byte " + std::to_string(at) + ":");
}

TEST(Gguf, ReadsNumbersOfEveryType) {
  TinyGguf gguf;
  const auto array = [&gguf](const std::string& key, std::uint32_t type, const std::string& body,
                             std::uint64_t count) {
    gguf.set(key, 9, GgufBuilder::raw(type) + GgufBuilder::raw(count) + body);
  };
  array("u8", 0, "\xFE\x01", 2);
  array("i8", 1, "\xFE\x01", 2);
  array("i16", 3, GgufBuilder::raw(std::int16_t{-300}), 1);
  array("u64", 10, GgufBuilder::raw(std::uint64_t{1} << 62), 1);
  array("i64", 11, GgufBuilder::raw(std::int64_t{-5}), 1);
  array("f32", 6, GgufBuilder::raw(1.5f) + GgufBuilder::raw(-2.0f), 2);
  array("f64", 12, GgufBuilder::raw(0.1), 1);
  array("none", 4, "", 0);
  const auto file = open(gguf.build());
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_EQ(file->find("u8")->integers()->integer(0), 254);
  EXPECT_EQ(file->find("i8")->integers()->integer(0), -2);
  EXPECT_EQ(file->find("i8")->integers()->number(1), 1.0);
  EXPECT_EQ(file->find("i16")->integers()->integer(0), -300);
  EXPECT_EQ(file->find("u64")->integers()->integer(0), std::int64_t{1} << 62);
  EXPECT_EQ(file->find("i64")->integers()->integer(0), -5);
  EXPECT_EQ(file->find("f32")->integers(), nullptr);
  EXPECT_EQ(file->find("f32")->numbers()->number(1), -2.0);
  EXPECT_EQ(file->find("f64")->numbers()->number(0), 0.1);
  EXPECT_EQ(file->find("none")->numbers()->size(), 0u);
}

TEST(Gguf, SurvivesRandomDamage) {
  const TinyGguf gguf;
  const std::string whole = gguf.build();
  const std::size_t header = gguf.header().size();
  std::mt19937 random(5);
  const TempFolder folder;
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string damaged = whole;
    for (int j = 0; j < 1 + i % 4; ++j) {
      damaged[random() % header] = static_cast<char>(i % 2 == 0 ? random() : 0xFF);
    }
    refused += GgufFile::open(folder.write("m.gguf", damaged)).has_value() ? 0 : 1;
  }
  EXPECT_GT(refused, 300);
}

TEST(Gguf, RefusesLyingCounts) {
  const TinyGguf gguf;
  const std::string whole = gguf.build();
  const auto with_u64 = [&whole](std::size_t at, std::uint64_t value) {
    std::string out = whole;
    return out.replace(at, 8, GgufBuilder::raw(value));
  };
  expect_error(open(with_u64(8, UINT64_MAX)), Errc::corrupt_file, "cannot fit");
  expect_error(open(with_u64(16, std::uint64_t{1} << 60)), Errc::corrupt_file, "cannot fit");
  expect_error(open(with_u64(24, UINT64_MAX - 3)), Errc::corrupt_file, "byte 24", "length");

  TinyGguf arrays;
  arrays.set("a", 9, GgufBuilder::raw(std::uint32_t{4}) + GgufBuilder::raw(UINT64_MAX / 2));
  expect_error(open(arrays.build()), Errc::corrupt_file, "'a'", "passes the end");
  arrays.set("a", 9, GgufBuilder::raw(std::uint32_t{8}) + GgufBuilder::raw(UINT64_MAX / 2));
  expect_error(open(arrays.build()), Errc::corrupt_file, "'a'", "passes the end");
  arrays.set("a", 9, GgufBuilder::raw(std::uint32_t{9}) + GgufBuilder::raw(std::uint64_t{0}));
  expect_error(open(arrays.build()), Errc::corrupt_file, "'a'", "arrays of type 9");
  arrays.set("a", 77, "");
  expect_error(open(arrays.build()), Errc::corrupt_file, "'a'", "type 77");
  arrays.set("a", 7, "\x02");
  expect_error(open(arrays.build()), Errc::corrupt_file, "'a'", "boolean is 2");
}

TEST(Gguf, RefusesRepeatedNamesAndBadTensors) {
  {
    TinyGguf gguf;
    gguf.tensors.push_back(gguf.tensor("output_norm.weight"));
    expect_error(open(gguf.build()), Errc::corrupt_file, "duplicate tensor 'output_norm.weight'");
  }
  {
    TinyGguf gguf;
    std::string whole = gguf.build();
    const auto at = whole.find("llama.context_length");
    whole.replace(at, 20, "general.architecture");
    expect_error(open(whole), Errc::corrupt_file, "duplicate key 'general.architecture'");
  }
  {
    TinyGguf gguf;
    gguf.tensor("output_norm.weight").type = static_cast<Ggml>(99);
    expect_error(open(gguf.build()), Errc::corrupt_file, "'output_norm.weight'", "type 99");
  }
  {
    TinyGguf gguf;
    gguf.tensor("blk.0.ffn_up.weight").dims = {48, 128};
    expect_error(open(gguf.build()), Errc::corrupt_file, "'blk.0.ffn_up.weight'", "48", "Q4_1");
  }
  {
    TinyGguf gguf;
    gguf.tensor("blk.0.ffn_up.weight").dims = {std::uint64_t{1} << 40, std::uint64_t{1} << 40};
    expect_error(open(gguf.build()), Errc::corrupt_file, "'blk.0.ffn_up.weight'", "too large");
    gguf.tensor("blk.0.ffn_up.weight").dims = {0, 4};
    expect_error(open(gguf.build()), Errc::corrupt_file, "dim 0");
    gguf.tensor("blk.0.ffn_up.weight").dims = {1, 1, 1, 1, 1};
    expect_error(open(gguf.build()), Errc::corrupt_file, "5 dims");
    gguf.tensor("blk.0.ffn_up.weight").dims = {1024, 1024};
    expect_error(open(gguf.build()), Errc::corrupt_file, "'blk.0.ffn_up.weight'", "truncated");
  }
  {
    TinyGguf gguf;
    gguf.u32("general.alignment", 48);
    expect_error(open(gguf.build()), Errc::corrupt_file, "general.alignment is 48");
  }
  {
    TinyGguf gguf;  // offsets written for another alignment
    gguf.u32("general.alignment", 4096);
    expect_error(open(gguf.build()), Errc::corrupt_file, "multiple of the alignment 4096");
  }
  {
    TinyGguf gguf;  // the second tensor's record points at the first's data
    std::string whole = gguf.build();
    const std::string record =
        GgufBuilder::sized(gguf.tensors[1].name) + GgufBuilder::raw(std::uint32_t{1}) +
        GgufBuilder::raw(std::uint64_t{64}) + GgufBuilder::raw(std::uint32_t{0});
    const auto at = whole.find(record);
    ASSERT_NE(at, std::string::npos);
    whole.replace(at + record.size(), 8, GgufBuilder::raw(std::uint64_t{32}));
    expect_error(open(whole), Errc::corrupt_file, "overlaps", "token_embd.weight");
  }
}

}  // namespace
}  // namespace qmlp
