#include "io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"

namespace qmlp {
namespace {

// Closes a descriptor at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

Status read_all(const std::string& path, int file, AlignedBuffer& buffer) {
  std::size_t done = 0;
  while (done < buffer.size()) {
    const ssize_t got =
        ::pread(file, buffer.data() + done, buffer.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(path, "cannot read", errno);
    if (got == 0) return Error{Errc::io, concat(path, ": shrank while it was read")};
    done += static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path, bool use_mmap) {
  // O_NONBLOCK: a named pipe must not make the open wait.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return system_error(path, "cannot open", errno);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return system_error(path, "cannot look at it", errno);
  if (S_ISDIR(info.st_mode)) return Error{Errc::io, concat(path, ": is a directory, not a file")};
  if (!S_ISREG(info.st_mode)) return Error{Errc::io, concat(path, ": is not a regular file")};

  MappedFile out;
  out.path_ = path;
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size == 0) return out;
  if (use_mmap) {
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (data != MAP_FAILED) {
      out.bytes_ = {static_cast<const std::byte*>(data), size};
      out.mapped_ = true;
      out.device_ = info.st_dev;
      out.inode_ = info.st_ino;
      return out;
    }
  }
  auto buffer = AlignedBuffer::allocate(size);
  if (!buffer) {
    return Error{Errc::out_of_memory,
                 concat(path, ": no memory for its ", size, " bytes, mapped or read")};
  }
  out.buffer_ = *std::move(buffer);
  QMLP_TRY(read_all(path, file.get(), out.buffer_));
  out.bytes_ = {out.buffer_.data(), size};
  return out;
}

MappedFile::~MappedFile() {
  if (mapped_) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      buffer_(std::move(other.buffer_)),
      mapped_(std::exchange(other.mapped_, false)),
      device_(other.device_),
      inode_(other.inode_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  std::swap(buffer_, other.buffer_);
  std::swap(mapped_, other.mapped_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  return *this;
}

Status MappedFile::check_size() const {
  struct stat info {};
  if (!mapped_ || ::stat(path_.c_str(), &info) != 0) return {};
  if (info.st_dev != device_ || info.st_ino != inode_) return {};
  const auto size = static_cast<std::uint64_t>(info.st_size);
  if (size >= bytes_.size()) return {};
  return Error{Errc::io, concat(path_, ": shrank while it was used: holds ", size, " bytes, held ",
                                bytes_.size(), " when it was opened")};
}

void MappedFile::release(std::uint64_t offset, std::uint64_t size) const noexcept {
  if (!mapped_ || offset > bytes_.size() || size > bytes_.size() - offset) return;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = (offset + page - 1) / page * page;
  const std::uint64_t end = (offset + size) / page * page;
  if (begin >= end) return;
  ::madvise(const_cast<std::byte*>(bytes_.data()) + begin, end - begin, MADV_DONTNEED);
}

}  // namespace qmlp
