#include "io/files.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/concat.h"
#include "base/try.h"
#include "io/input_file.h"

namespace qmlp {

Error system_error(std::string_view path, std::string_view what, int code) {
  return Error{code == ENOMEM ? Errc::out_of_memory : Errc::io,
               concat(path, ": ", what, ": ", std::generic_category().message(code))};
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
  QMLP_ASSIGN(const InputFile file, InputFile::open(path));
  if (file.size > limit) {
    return Error{Errc::corrupt_file,
                 concat(path, ": holds ", file.size, " bytes, at most ", limit, " are expected")};
  }
  std::string text(static_cast<std::size_t>(file.size), '\0');
  QMLP_TRY(file.read(0, std::as_writable_bytes(std::span(text))));
  return text;
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

std::string five_digits(std::int64_t number) {
  std::string text = std::to_string(number);
  return text.insert(0, 5 - std::min<std::size_t>(5, text.size()), '0');
}

std::string_view describe_contents(std::span<const std::byte> head) {
  std::string text(reinterpret_cast<const char*>(head.data()),
                   std::min<std::size_t>(head.size(), 256));
  const auto starts = [&text](std::string_view prefix) { return text.starts_with(prefix); };
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
