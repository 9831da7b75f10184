#include "io/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/concat.h"
#include "io/files.h"

namespace qmlp {

Result<InputFile> InputFile::open(const std::string& path) {
  InputFile out;
  out.path = path;
  // O_NONBLOCK: a named pipe must not make the open wait.
  out.descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!out.descriptor) return system_error(path, "cannot open", errno);
  struct stat info {};
  if (::fstat(out.descriptor.get(), &info) != 0) {
    return system_error(path, "cannot look at it", errno);
  }
  if (S_ISDIR(info.st_mode)) return Error{Errc::io, concat(path, ": is a directory, not a file")};
  if (!S_ISREG(info.st_mode)) return Error{Errc::io, concat(path, ": is not a regular file")};
  out.size = static_cast<std::uint64_t>(info.st_size);
  out.device = info.st_dev;
  out.inode = info.st_ino;
  return out;
}

Status InputFile::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got =
        ::pread(descriptor.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(path, "cannot read", errno);
    if (got == 0) return Error{Errc::io, concat(path, ": shrank while it was read")};
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return {};
}

}  // namespace qmlp
