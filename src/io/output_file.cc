#include "io/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"

namespace qmlp {
namespace {

// What a new file of a name replaces.
struct Target {
  std::string path;
  bool is_special = false;
  int mode = -1;  // rights of the file that is there; -1: none is
};

Result<Target> find_target(const std::string& path, OutputFile::Special special) {
  if (path.empty()) return Error{Errc::invalid_argument, "path: is empty"};
  Target target{path};
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const int code = errno;
    if (code != ENOENT) return system_error(path, "cannot look at it", code);
    if (::lstat(path.c_str(), &info) == 0) {
      return Error{Errc::io, concat(path, ": is a symbolic link to nothing")};
    }
    return target;
  }
  if (S_ISDIR(info.st_mode)) return system_error(path, "cannot write to it", EISDIR);
  target.is_special = !S_ISREG(info.st_mode);
  if (target.is_special) {
    if (special == OutputFile::Special::written) return target;
    return Error{Errc::io, concat(path, ": is not a regular file")};
  }
  target.mode = static_cast<int>(info.st_mode & 07777);
  char* const resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return system_error(path, "cannot look at it", errno);
  target.path = resolved;
  ::free(resolved);
  return target;
}

// Opens a file that was not there and puts its name into `temporary`. Another thread may be writing
// the same target, and one of our id that was killed may have left its file.
Result<Descriptor> open_temporary(const Target& target, const std::string& name,
                                  std::string& temporary) {
  constexpr int kAttempts = 1000;
  constexpr std::size_t kLongestBase = 230;  // of the 255 bytes that a name may have
  const auto rights = static_cast<mode_t>(target.mode < 0 ? 0666 : target.mode & 0777);
  const std::string stem = target.path.substr(0, target.path.rfind('/') + 1 + kLongestBase);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string path = concat(stem, ".tmp.", ::getpid(), ".", attempt);
    Descriptor made(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, rights));
    if (made) {
      temporary = path;
      return made;
    }
    if (errno != EEXIST) break;
  }
  return system_error(name, "cannot create", errno);
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path, Special special) {
  QMLP_ASSIGN(const Target target, find_target(path, special));
  OutputFile out;
  out.name_ = path;
  out.target_ = target.path;
  if (target.is_special) {
    out.descriptor_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!out.descriptor_) return system_error(path, "cannot open", errno);
    return out;
  }
  QMLP_ASSIGN(out.descriptor_, open_temporary(target, path, out.temporary_));
  // Before the first byte: nobody may read what the file that is there would not show.
  if (target.mode >= 0 && ::fchmod(out.descriptor_.get(), static_cast<mode_t>(target.mode)) != 0) {
    return system_error(path, "cannot keep its rights", errno);
  }
  return out;
}

Status OutputFile::check(const std::string& path, Special special) {
  QMLP_ASSIGN(const Target target, find_target(path, special));
  if (target.is_special) {
    if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) == 0) return {};
    return system_error(path, "cannot open", errno);
  }
  const std::string folder = target.path.substr(0, target.path.rfind('/') + 1);
  const char* const where = folder.empty() ? "." : folder.c_str();
  if (::faccessat(AT_FDCWD, where, W_OK | X_OK, AT_EACCESS) == 0) return {};
  return system_error(path, "cannot create", errno);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : name_(std::move(other.name_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::move(other.descriptor_)) {}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status OutputFile::reserve([[maybe_unused]] std::uint64_t bytes) {
#ifdef __linux__
  if (::fallocate(descriptor_.get(), 0, 0, static_cast<off_t>(bytes)) != 0 &&
      (errno == ENOSPC || errno == EFBIG || errno == EDQUOT)) {
    return system_error(name_, concat("cannot write ", bytes, " bytes"), errno);
  }
#endif
  return {};
}

Status OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_.get(), bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return system_error(name_, "cannot write", put < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
  return {};
}

Status OutputFile::rewind() {
  if (::lseek(descriptor_.get(), 0, SEEK_SET) == 0) return {};
  return system_error(name_, "cannot write", errno);
}

Status OutputFile::commit() {
  // Some file systems report a full disk only here. A device or FIFO has nothing to flush.
  const bool flushed = ::fsync(descriptor_.get()) == 0 || errno == EINVAL || errno == ENOTSUP;
  if (!flushed || !descriptor_.close()) return system_error(name_, "cannot write", errno);
  if (temporary_.empty()) return {};
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    return system_error(name_, "cannot put it in place", errno);
  }
  temporary_.clear();
  return {};
}

Status write_text_file(const std::string& path, std::string_view text,
                       OutputFile::Special special) {
  QMLP_ASSIGN(OutputFile file, OutputFile::create(path, special));
  QMLP_TRY(file.write(std::as_bytes(std::span(text))));
  return file.commit();
}

}  // namespace qmlp
