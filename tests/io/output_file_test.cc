#include "io/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/concat.h"
#include "io/file_limit.h"
#include "io/files.h"
#include "io/input_file.h"
#include "io/temp_folder.h"

namespace qmlp {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::FileLimit;
using test::read_file;
using test::TempFolder;
constexpr auto kSpecial = OutputFile::Special::written;

std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// The names in a folder, to see that no temporary file is left.
std::string names(const TempFolder& folder) {
  std::string out;
  const auto listed = list_directory(folder.path());
  EXPECT_TRUE(listed);
  for (const std::string& name : *listed) out += concat(out.empty() ? "" : " ", name);
  return out;
}

unsigned rights(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

// Files are asked for with nobody's rights, since root may write anywhere.
class Unprivileged {
 public:
  Unprivileged() : done_(::geteuid() != 0 || ::seteuid(kNobody) == 0) {}
  ~Unprivileged() { EXPECT_EQ(::seteuid(::getuid()), 0); }
  bool can_enter(const std::string& folder) const {
    return done_ && ::faccessat(AT_FDCWD, folder.c_str(), X_OK, AT_EACCESS) == 0;
  }

 private:
  static constexpr uid_t kNobody = 65534;
  bool done_;
};

TEST(OutputFile, AppearsWhenItIsCommitted) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  for (const std::string_view old : {"", "old"}) {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(file->name(), path);
    ASSERT_TRUE(file->write(bytes("_ne")));
    ASSERT_TRUE(file->write(bytes("w")));
    ASSERT_TRUE(file->rewind());
    ASSERT_TRUE(file->write(bytes("a")));
    EXPECT_EQ(fs::exists(path), !old.empty());
    EXPECT_EQ(read_file(path), old);
    ASSERT_TRUE(file->commit());
    EXPECT_EQ(read_file(path), "anew");
    EXPECT_EQ(names(folder), "f");
    folder.write("f", "old");
  }
}

TEST(OutputFile, DroppedLeavesTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.write("f", "old");
  {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file);
    ASSERT_TRUE(file->write(bytes("new")));
    const OutputFile moved = *std::move(file);
    EXPECT_NE(names(folder), "f");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names(folder), "f");
}

TEST(OutputFile, FollowsLinksAndKeepsRights) {
  const TempFolder folder;
  fs::create_directory(folder.file("d"));
  const std::string target = folder.write("d/target", "old");
  fs::create_symlink("d/target", folder.file("link"));
  fs::create_symlink("link", folder.file("link2"));
  for (const unsigned mode : {0600u, 0444u, 0666u}) {
    ASSERT_EQ(::chmod(target.c_str(), mode), 0);
    auto file = OutputFile::create(folder.file("link2"));
    ASSERT_TRUE(file);
    // Nor may the temporary file show others what the old one would not.
    for (const auto& entry : fs::directory_iterator(folder.file("d"))) {
      EXPECT_EQ(rights(entry.path().string()), mode) << entry.path();
    }
    ASSERT_TRUE(file->write(bytes("new")));
    ASSERT_TRUE(file->commit());
    EXPECT_EQ(rights(target), mode);
    EXPECT_EQ(read_file(target), "new");
    EXPECT_TRUE(fs::is_symlink(folder.file("link")));
    EXPECT_TRUE(fs::is_symlink(folder.file("link2")));
  }
  EXPECT_EQ(names(folder), "d link link2");
}

// The temporary name must not be the one that is too long.
TEST(OutputFile, TakesTheLongestNames) {
  const TempFolder folder;
  const std::string longest(255, 'n');
  for (const char* text : {"new", "newer"}) {
    ASSERT_TRUE(OutputFile::check(folder.file(longest)));
    const Status status = write_text_file(folder.file(longest), text);
    ASSERT_TRUE(status) << status.error().message;
    EXPECT_EQ(read_file(folder.file(longest)), text);
    EXPECT_EQ(names(folder), longest);
  }
  expect_error(OutputFile::check(folder.file(longest + "n")), Errc::io, "File name too long");
}

TEST(OutputFile, NewFilesHaveTheRightsOfTheUmask) {
  const TempFolder folder;
  const mode_t before = ::umask(027);
  const Status status = write_text_file(folder.file("f"), "x");
  ::umask(before);
  ASSERT_TRUE(status);
  EXPECT_EQ(rights(folder.file("f")), 0640u);
}

TEST(OutputFile, RefusesWhatItCannotReplace) {
  const TempFolder folder;
  fs::create_symlink("nowhere", folder.file("dangling"));
  fs::create_symlink("loop", folder.file("loop"));
  fs::create_directory(folder.file("d"));
  fs::create_symlink("d", folder.file("to_d"));
  folder.write("f", "x");
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  const std::string before = names(folder);
  struct Case {
    std::string path;
    Errc code;
    std::string message;
  };
  for (const Case& c : {Case{"", Errc::invalid_argument, "path: is empty"},
                        {folder.file("dangling"), Errc::io, ": is a symbolic link to nothing"},
                        {folder.file("loop"), Errc::io, ": cannot look at it: Too many levels"},
                        {folder.file("d"), Errc::io, ": cannot write to it: Is a directory"},
                        {folder.file("to_d"), Errc::io, ": cannot write to it: Is a directory"},
                        {folder.file("no/f"), Errc::io, ": cannot create: No such file"},
                        {folder.file("f/f"), Errc::io, ": cannot look at it: Not a directory"},
                        {folder.file("pipe"), Errc::io, ": is not a regular file"},
                        {"/dev/null", Errc::io, ": is not a regular file"}}) {
    const std::string message = c.path + c.message;
    expect_error(OutputFile::create(c.path), c.code, message);
    expect_error(OutputFile::check(c.path), c.code, message);
    expect_error(write_text_file(c.path, "x"), c.code, message);
  }
  EXPECT_EQ(names(folder), before);
  EXPECT_TRUE(fs::is_fifo(folder.file("pipe")));
  EXPECT_TRUE(OutputFile::check(folder.file("f")));
  EXPECT_TRUE(OutputFile::check(folder.file("new")));
  EXPECT_EQ(OutputFile::check("new").has_value(), ::access(".", W_OK) == 0);
  EXPECT_EQ(names(folder), before);
}

TEST(OutputFile, NamesAFolderThatItCannotWriteTo) {
  const TempFolder folder;
  const std::string path = folder.write("f", "old");
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0400), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0555), 0);
  {
    const Unprivileged nobody;
    if (!nobody.can_enter(folder.path())) {
      GTEST_SKIP() << "run by root, and no other user can enter " << folder.path();
    }
    for (const std::string& name : {path, folder.file("new")}) {
      expect_error(OutputFile::create(name), Errc::io, name + ": cannot create: Permission denied");
      expect_error(OutputFile::check(name), Errc::io, name + ": cannot create: Permission denied");
    }
    const std::string pipe = folder.file("pipe");
    expect_error(OutputFile::create(pipe, kSpecial), Errc::io, ": cannot open: Permission denied");
    expect_error(OutputFile::check(pipe, kSpecial), Errc::io, ": cannot open: Permission denied");
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names(folder), "f pipe");
}

TEST(OutputFile, WritesIntoDevicesAndFifosWhenAsked) {
  EXPECT_TRUE(OutputFile::check("/dev/full", kSpecial));
  expect_error(write_text_file("/dev/full", "x", kSpecial), Errc::io,
               "/dev/full: cannot write: No space left on device");
  EXPECT_TRUE(write_text_file("/dev/null", "x", kSpecial));
  struct stat info {};
  ASSERT_EQ(::stat("/dev/null", &info), 0);
  EXPECT_TRUE(S_ISCHR(info.st_mode));

  const TempFolder folder;
  const std::string pipe = folder.file("pipe");
  const std::string link = folder.file("link");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  fs::create_symlink("pipe", link);
  EXPECT_TRUE(OutputFile::check(link, kSpecial));
  const Descriptor reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader);
  const Status status = write_text_file(link, "text", kSpecial);
  ASSERT_TRUE(status) << status.error().message;
  char got[16] = {};
  EXPECT_EQ(::read(reader.get(), got, sizeof got), 4);
  EXPECT_EQ(std::string_view(got), "text");
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(names(folder), "link pipe");
}

TEST(OutputFile, AFullDiskLeavesTheOldFileAndNoOther) {
  const TempFolder folder;
  const std::string path = folder.write("f", "old");
  const std::string text(100'000, 'x');
  {
    const FileLimit limit(50'000);
    expect_error(write_text_file(path, text), Errc::io, path + ": cannot write: File too large");
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file);
    expect_error(file->reserve(100'000), Errc::io,
                 path + ": cannot write 100000 bytes: File too large");
    // A write that is cut short is an error too, once the rest does not fit either.
    ASSERT_TRUE(file->write(bytes(text).first(40'000)));
    expect_error(file->write(bytes(text).first(40'000)), Errc::io,
                 path + ": cannot write: File too large");
  }
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(names(folder), "f");
  EXPECT_TRUE(write_text_file(path, text));
  EXPECT_EQ(read_file(path), text);
}

TEST(OutputFile, ATargetThatChangedMeanwhileIsAnError) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  {
    auto file = OutputFile::create(path);
    ASSERT_TRUE(file);
    fs::create_directory(path);
    expect_error(file->commit(), Errc::io, path + ": cannot put it in place: Is a directory");
  }
  EXPECT_EQ(names(folder), "f");
}

TEST(OutputFile, TwoOfOneNameDoNotMeet) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  std::optional<Result<OutputFile>> first = OutputFile::create(path);
  auto second = OutputFile::create(path);
  ASSERT_TRUE(*first && second);
  ASSERT_TRUE((*first)->write(bytes("first, and longer")));
  ASSERT_TRUE(second->write(bytes("second")));
  ASSERT_TRUE((*first)->commit());
  EXPECT_EQ(read_file(path), "first, and longer");
  auto third = OutputFile::create(path);  // under the name that the first no longer needs
  ASSERT_TRUE(third && third->write(bytes("third")));
  first.reset();
  ASSERT_TRUE(second->commit());
  EXPECT_EQ(read_file(path), "second");
  ASSERT_TRUE(third->commit());
  EXPECT_EQ(read_file(path), "third");
  EXPECT_EQ(names(folder), "f");
}

TEST(OutputFile, WhatLiesUnderATemporaryNameIsLeftAlone) {
  const TempFolder folder;
  const std::string path = folder.file("f");
  const std::string stale = concat("f.tmp.", ::getpid(), ".0");
  const std::string planted = concat("f.tmp.", ::getpid(), ".1");
  folder.write(stale, "stale");
  folder.write("victim", "victim");
  fs::create_symlink("victim", folder.file(planted));
  ASSERT_TRUE(write_text_file(path, "new"));
  EXPECT_EQ(read_file(path), "new");
  EXPECT_EQ(read_file(folder.file(stale)), "stale");
  EXPECT_EQ(read_file(folder.file("victim")), "victim");
  EXPECT_EQ(names(folder), concat("f ", stale, " ", planted, " victim"));
}

TEST(InputFile, ReadsARegularFileAndNothingElse) {
  const TempFolder folder;
  const std::string path = folder.write("f", "0123456789");
  const auto file = InputFile::open(path);
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->size, 10u);
  std::string part(4, ' ');
  ASSERT_TRUE(file->read(3, std::as_writable_bytes(std::span(part))));
  EXPECT_EQ(part, "3456");
  expect_error(file->read(7, std::as_writable_bytes(std::span(part))), Errc::io,
               path + ": shrank while it was read");

  expect_error(InputFile::open(folder.path()), Errc::io,
               folder.path() + ": is a directory, not a file");
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_error(InputFile::open(pipe), Errc::io, pipe + ": is not a regular file");
  expect_error(InputFile::open(folder.file("none")), Errc::io, "none: cannot open: No such file");
}

TEST(Files, ReadTextFileHasALimit) {
  const TempFolder folder;
  const std::string path = folder.write("f", "0123456789");
  const auto text = read_text_file(path, 10);
  ASSERT_TRUE(text);
  EXPECT_EQ(*text, "0123456789");
  expect_error(read_text_file(path, 9), Errc::corrupt_file,
               path + ": holds 10 bytes, at most 9 are expected");
}

TEST(Files, LackOfMemoryIsToldFromOtherSystemErrors) {
  const Error memory = system_error("f", "cannot open", ENOMEM);
  EXPECT_EQ(memory.code, Errc::out_of_memory);
  EXPECT_EQ(memory.message, "f: cannot open: Cannot allocate memory");
  EXPECT_EQ(system_error("f", "cannot open", EACCES).code, Errc::io);
}

}  // namespace
}  // namespace qmlp
