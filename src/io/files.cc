#include "io/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "base/concat.h"
#include "base/try.h"

namespace qmlp {

std::string system_message(int code) { return std::generic_category().message(code); }

Error system_error(std::string_view path, std::string_view what, int code) {
  return Error{code == ENOMEM ? Errc::out_of_memory : Errc::io,
               concat(path, ": ", what, ": ", system_message(code))};
}

Result<PathKind> path_kind(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return PathKind::missing;
    return system_error(path, "cannot look at it", errno);
  }
  if (S_ISREG(info.st_mode)) return PathKind::file;
  return S_ISDIR(info.st_mode) ? PathKind::directory : PathKind::other;
}

Result<std::string> read_text_file(const std::string& path, std::uint64_t limit) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return system_error(path, "cannot open", errno);
  struct stat info {};
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(file);
    return Error{Errc::io, concat(path, ": is not a regular file")};
  }
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size > limit) {
    ::close(file);
    return Error{Errc::corrupt_file,
                 concat(path, ": holds ", size, " bytes, at most ", limit, " are expected")};
  }
  std::string text(static_cast<std::size_t>(size), '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file, text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int code = errno;
      ::close(file);
      return system_error(path, "cannot read", code);
    }
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  ::close(file);
  if (done != text.size()) {
    return Error{Errc::io, concat(path, ": shrank while it was read")};
  }
  return text;
}

Status write_all(int file, std::string_view bytes, std::string_view name) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(file, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return system_error(name, "cannot write", errno);
    bytes.remove_prefix(static_cast<std::size_t>(put));
  }
  return {};
}

Status flush_and_close(int file, std::string_view name) {
  // Some file systems report a full disk only here. A device or FIFO has nothing to flush.
  int code = ::fsync(file) != 0 && errno != EINVAL && errno != ENOTSUP ? errno : 0;
  if (::close(file) != 0 && code == 0) code = errno;
  if (code != 0) return system_error(name, "cannot write", code);
  return {};
}

Status write_text_file(const std::string& path, std::string_view text, std::string_view name) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return system_error(name, "cannot create", errno);
  const Status written = write_all(file, text, name);
  const Status closed = flush_and_close(file, name);
  return written ? closed : written;
}

Result<ReplaceTarget> replace_target(const std::string& path) {
  ReplaceTarget target{path};
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
  target.mode = static_cast<int>(info.st_mode & 07777);
  char* const resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return system_error(path, "cannot look at it", errno);
  target.path = resolved;
  ::free(resolved);
  return target;
}

Result<ReplaceTarget> regular_target(const std::string& path) {
  QMLP_ASSIGN(ReplaceTarget target, replace_target(path));
  if (target.is_special) return Error{Errc::io, concat(path, ": is not a regular file")};
  return target;
}

Result<std::vector<std::string>> list_directory(const std::string& path) {
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) return system_error(path, "cannot list", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int code = errno;
  ::closedir(directory);
  if (code != 0) return system_error(path, "cannot list", code);
  std::sort(names.begin(), names.end());
  return names;
}

std::string join_path(std::string_view directory, std::string_view name) {
  std::string path(directory);
  if (!path.empty() && path.back() != '/') path += '/';
  path += name;
  return path;
}

std::string_view base_name(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const auto slash = path.rfind('/');
  return slash == std::string_view::npos || path.size() == 1 ? path : path.substr(slash + 1);
}

std::string_view describe_contents(std::span<const std::byte> head) {
  std::string text(reinterpret_cast<const char*>(head.data()),
                   std::min<std::size_t>(head.size(), 256));
  const auto starts = [&text](std::string_view prefix) { return text.rfind(prefix, 0) == 0; };
  if (starts("version https://git-lfs")) {
    return "a Git LFS pointer, not the file itself: download it again (git lfs pull)";
  }
  if (starts("\x1F\x8B")) return "gzip-compressed data: unpack it, or download it again";
  if (starts("\x28\xB5\x2F\xFD")) return "zstd-compressed data: unpack it, or download it again";
  if (starts("PK\x03\x04")) return "a zip archive (perhaps a PyTorch file): safetensors is needed";
  if (starts("GGUF")) return "a GGUF file: convert it first (qmlp convert)";
  if (starts("\x80\x02")) return "a Python pickle: safetensors is needed";
  text.erase(0, text.find_first_not_of(" \t\r\n\xEF\xBB\xBF"));
  std::transform(text.begin(), text.end(), text.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  if (starts("<!doctype") || starts("<html") || starts("<?xml")) {
    return "a web page, perhaps an error or a login page: download the file again";
  }
  return {};
}

}  // namespace qmlp
