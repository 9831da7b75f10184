#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "io/file_limit.h"
#include "io/safetensors_writer.h"
#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;
using test::TempFolder;

std::string with_length(std::uint64_t length, std::string_view rest) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(length >> (8 * i));
  return out + std::string(rest);
}
std::string make_file(std::string_view header, std::size_t data_bytes) {
  std::string out = with_length(header.size(), header);
  for (std::size_t i = 0; i < data_bytes; ++i) out += static_cast<char>(i * 7 + 1);
  return out;
}
Result<SafetensorsHeader> parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span<const char>(file)), "f.safetensors");
}
Result<SafetensorsHeader> parse_header(std::string_view header, std::size_t data_bytes) {
  return parse(make_file(header, data_bytes));
}

TEST(Safetensors, ReadsUnalignedData) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("w":{"dtype":"U32","shape":[2,2],"data_offsets":[1,17]},)"
      R"("s":{"dtype":"F16","shape":[3],"data_offsets":[17,23]},"__metadata__":{"format":"mlx"}} )";
  const auto parsed = parse_header(header, 23);
  ASSERT_TRUE(parsed.has_value()) << parsed.error().message;
  ASSERT_EQ(parsed->entries.size(), 3u);
  EXPECT_EQ(parsed->entries[1].name, "w");
  EXPECT_EQ(parsed->entries[1].begin, 8 + header.size() + 1);
  EXPECT_EQ(parsed->entries[2].shape, std::vector<std::int64_t>{3});
  ASSERT_EQ(parsed->metadata.size(), 1u);
  EXPECT_EQ(parsed->metadata[0].second, "mlx");
}

TEST(Safetensors, ReadsEmptyTensorsAndScalars) {
  const auto parsed =
      parse_header(R"({"e":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]},)"
                   R"("x":{"dtype":"F64","shape":[],"data_offsets":[0,8]},)"
                   R"("z":{"dtype":"F32","shape":[9223372036854775807,0,9],"data_offsets":[8,8]}})",
                   8);
  ASSERT_TRUE(parsed.has_value()) << parsed.error().message;
  EXPECT_EQ(parsed->entries.size(), 3u);
  EXPECT_TRUE(parse_header("{}   ", 0).has_value());
  EXPECT_TRUE(parse_header(R"({"__metadata__":null})", 0).has_value());  // as MLX writes it
}

TEST(Safetensors, RefusesLyingHeaderLengths) {
  for (const std::uint64_t length : {UINT64_MAX, UINT64_MAX - 7, std::uint64_t{1} << 63,
                                     std::uint64_t{100'000'001}, std::uint64_t{94}}) {
    expect_error(parse(with_length(length, std::string(93, ' '))), Errc::corrupt_file,
                 "header length");
  }
  expect_error(parse(with_length(0, "{}")), Errc::corrupt_file, "does not start with '{'");
  expect_error(parse(with_length(1, "{}")), Errc::corrupt_file, "invalid JSON");
  expect_error(parse(""), Errc::corrupt_file, "holds 0 bytes");
  expect_error(parse("1234567"), Errc::corrupt_file, "holds 7 bytes");
  expect_error(parse(with_length(8, std::string(8, ' '))), Errc::corrupt_file,
               "does not start with '{'");
  expect_error(parse(with_length(2, "[]")), Errc::corrupt_file, "does not start with '{'");
  expect_error(parse_header("{nonsense", 0), Errc::corrupt_file, "header: invalid JSON: byte ");
  expect_error(parse_header("{\"a\":" + std::string(200'000, '['), 0), Errc::corrupt_file,
               "nested deeper");
}

TEST(Safetensors, NamesFilesThatAreSomethingElse) {
  expect_error(parse("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
               Errc::corrupt_file, "Git LFS pointer", "download it again");
  expect_error(parse("<!DOCTYPE html><html><body>404</body></html>"), Errc::corrupt_file,
               "web page", "download");
  expect_error(parse("\n<HTML lang=en>"), Errc::corrupt_file, "web page");
  expect_error(
      parse(std::string("\x1F\x8B\x08\x00\x00\x00\x00\x00", 8) + std::string(600'000, 'x')),
      Errc::corrupt_file, "gzip");
  expect_error(parse("PK\x03\x04zipzipzip"), Errc::corrupt_file, "zip archive");
  expect_error(parse("GGUF\x03zipzipzip"), Errc::corrupt_file, "GGUF", "qmlp convert");
}

TEST(Safetensors, ChecksOffsetsAgainstShapeAndFile) {
  const auto with = [](const char* shape, const char* offsets, std::size_t data) {
    return parse_header(std::string(R"({"t":{"dtype":"F32","shape":)") + shape +
                            R"(,"data_offsets":)" + offsets + "}}",
                        data);
  };
  ASSERT_TRUE(with("[2,2]", "[0,16]", 16).has_value());
  expect_error(with("[1000,1000]", "[0,4]", 4), Errc::corrupt_file, "'t'", "hold 4 bytes",
               "needs 4000000");
  expect_error(with("[1]", "[8,4]", 8), Errc::corrupt_file, "'t'", "[8, 4]");
  expect_error(with("[1]", "[0,4,8]", 8), Errc::corrupt_file, "'t'", "data_offsets");
  expect_error(with("[1]", "[4]", 8), Errc::corrupt_file, "'t'", "data_offsets");
  expect_error(with("[1]", "[0,-4]", 8), Errc::corrupt_file, "'t'", "data_offsets");
  expect_error(with("[1]", "[0,4.0]", 8), Errc::corrupt_file, "'t'", "data_offsets");
  expect_error(with("[2,2]", "[0,16]", 15), Errc::corrupt_file, "'t'", "15 data bytes");
  expect_error(with("[1]", "[0,4]", 5), Errc::corrupt_file, "last 1 bytes belong to no tensor");
  expect_error(with("[1]", "[1,5]", 5), Errc::corrupt_file, "'t'", "1 bytes before");
}

TEST(Safetensors, RefusesOverlapAndGaps) {
  const auto two = [](const char* first, const char* second) {
    return parse_header(std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + first +
                            R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}",
                        9);
  };
  expect_error(two("[0,4]", "[3,7]"), Errc::corrupt_file, "'b'", "overlaps", "'a'");
  expect_error(two("[0,4]", "[0,4]"), Errc::corrupt_file, "overlaps");
  expect_error(two("[0,4]", "[5,9]"), Errc::corrupt_file, "'b'", "1 bytes before");
}

TEST(Safetensors, RefusesHostileShapes) {
  const auto with = [](std::string_view shape, const char* offsets, std::size_t data) {
    return parse_header(std::string(R"({"t":{"dtype":"F32","shape":)") + std::string(shape) +
                            R"(,"data_offsets":)" + offsets + "}}",
                        data);
  };
  expect_error(with("[-2,-2]", "[0,16]", 16), Errc::corrupt_file, "'t'", "shape", "-2");
  expect_error(with("[4294967300]", "[0,16]", 16), Errc::corrupt_file, "'t'", "17179869200");
  expect_error(with("[2.9]", "[0,8]", 8), Errc::corrupt_file, "'t'", "shape", "2.9");
  expect_error(with("[\"2\"]", "[0,8]", 8), Errc::corrupt_file, "'t'", "shape");
  expect_error(with("[18446744073709551615]", "[0,8]", 8), Errc::corrupt_file, "'t'", "shape");
  expect_error(with("[9223372036854775807,9]", "[0,8]", 8), Errc::corrupt_file, "'t'", "overflows");
  expect_error(with("7", "[0,8]", 8), Errc::corrupt_file, "'t'", "shape");
  std::string many = "[1";
  for (int i = 0; i < 64; ++i) many += ",1";
  expect_error(with(many + "]", "[0,4]", 4), Errc::corrupt_file, "'t'", "65 dims");
}

TEST(Safetensors, RefusesBadEntries) {
  expect_error(parse_header(R"({"t":{"dtype":"Q4_X","shape":[1],"data_offsets":[0,1]}})", 1),
               Errc::corrupt_file, "'t'", "dtype \"Q4_X\"");
  expect_error(parse_header(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", 1), Errc::corrupt_file,
               "'t'", "dtype");
  expect_error(parse_header(R"({"t":[]})", 0), Errc::corrupt_file, "'t'", "an array");
  expect_error(parse_header(R"({"__metadata__":{"n":1}})", 0), Errc::corrupt_file, "__metadata__",
               "'n'");
  expect_error(parse_header(R"({"__metadata__":3})", 0), Errc::corrupt_file, "__metadata__");
  expect_error(parse_header(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1),
               Errc::corrupt_file, "empty name");
  expect_error(parse_header(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                            R"("t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                            2),
               Errc::corrupt_file, "duplicate key 't'");
  expect_error(
      parse_header(R"({"t":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
      Errc::corrupt_file, "duplicate key 'shape'");
  expect_error(parse_header(R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1),
               Errc::corrupt_file, "'t'", "whole number of bytes");
}

TEST(SafetensorsFile, RefusesWhatIsNoFile) {
  const TempFolder folder;
  expect_error(SafetensorsFile::open(folder.file("none")), Errc::io, "none", "No such file");
  expect_error(SafetensorsFile::open(folder.path()), Errc::io, "is a directory");
  ASSERT_EQ(mkfifo(folder.file("pipe").c_str(), 0600), 0);
  expect_error(SafetensorsFile::open(folder.file("pipe")), Errc::io, "not a regular file");
  if (geteuid() != 0) {  // root may read everything
    const std::string path = folder.write("secret", "x");
    ASSERT_EQ(chmod(path.c_str(), 0), 0);
    expect_error(SafetensorsFile::open(path), Errc::io, "secret", "Permission denied");
  }
}

TEST(SafetensorsFile, MappedAndReadBytesAreEqual) {
  const TempFolder folder;
  const std::string contents =
      make_file(R"({"t":{"dtype":"U8","shape":[9999],"data_offsets":[0,9999]}})", 9999);
  const std::string path = folder.write("t.safetensors", contents);
  const auto mapped = SafetensorsFile::open(path, true);
  const auto read = SafetensorsFile::open(path, false);
  ASSERT_TRUE(mapped.has_value() && read.has_value());
  EXPECT_TRUE(mapped->file().mapped());
  EXPECT_FALSE(read->file().mapped());
  const auto a = mapped->data(mapped->header().entries[0]);
  mapped->file().release(0, contents.size());  // the pages come back from the file
  const auto b = read->data(read->header().entries[0]);
  ASSERT_EQ(a.size(), 9999u);
  EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
  EXPECT_EQ(static_cast<char>(a[9998]), contents.back());
}

TEST(SafetensorsFile, ReadsWhenMappingFails) {
  const TempFolder folder;
  const std::string path = folder.write(
      "t.safetensors", make_file(R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 3));
  // No address space for another mapping, while the heap still has room for a small read.
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &old), 0);
  rlimit none = old;
  none.rlim_cur = 1;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &none), 0);
  const auto file = SafetensorsFile::open(path, true);
  ASSERT_EQ(setrlimit(RLIMIT_AS, &old), 0);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_FALSE(file->file().mapped());
  EXPECT_EQ(file->data(file->header().entries[0]).size(), 3u);
}

TEST(SafetensorsWriter, WritesWhatTheReaderReads) {
  const TempFolder folder;
  const std::string path = folder.file("w.safetensors");
  {
    auto writer = SafetensorsWriter::create(
        path, {{"b", "U32", {2, 3}, 24}, {"a", "BF16", {5}, 10}, {"n", "F32", {0}, 0}});
    ASSERT_TRUE(writer.has_value()) << writer.error().message;
    const std::string data = "0123456789012345678901234567890123";
    const auto bytes = std::as_bytes(std::span<const char>(data));
    ASSERT_TRUE(writer->write(bytes.first(20)).has_value());
    ASSERT_FALSE(writer->finish().has_value());  // 14 bytes are missing
    ASSERT_TRUE(writer->write(bytes.subspan(20)).has_value());
    ASSERT_FALSE(writer->write(bytes.first(1)).has_value());
    EXPECT_FALSE(std::filesystem::exists(path));
    ASSERT_TRUE(writer->finish().has_value());
  }
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  const SafetensorsHeader& header = file->header();
  ASSERT_EQ(header.entries.size(), 3u);
  EXPECT_EQ(header.entries[0].name, "b");
  EXPECT_EQ(header.entries[0].begin % 64, 0u);
  EXPECT_EQ(header.entries[0].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(header.entries[1].dtype, "BF16");
  EXPECT_EQ(static_cast<char>(file->data(header.entries[1])[0]), '4');
}

TEST(SafetensorsWriter, ReportsAFullDisk) {
  const TempFolder folder;
  {
    const test::FileLimit limit(100'000);
    auto writer =
        SafetensorsWriter::create(folder.file("w"), {{"t", "U8", {1'000'000}, 1'000'000}});
    Status status =
        writer ? writer->write(std::vector<std::byte>(1'000'000)) : Status(writer.error());
    expect_error(status, Errc::io, folder.file("w") + ": cannot write", "File too large");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace qmlp
