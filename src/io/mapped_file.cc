#include "io/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "io/input_file.h"

namespace qmlp {

Result<MappedFile> MappedFile::open(const std::string& path, bool use_mmap) {
  QMLP_ASSIGN(const InputFile file, InputFile::open(path));
  MappedFile out;
  out.path_ = path;
  const auto size = static_cast<std::size_t>(file.size);
  if (size == 0) return out;
  if (use_mmap) {
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.descriptor.get(), 0);
    if (data != MAP_FAILED) {
      out.bytes_ = {static_cast<const std::byte*>(data), size};
      out.mapped_ = true;
      out.device_ = file.device;
      out.inode_ = file.inode;
      return out;
    }
  }
  auto buffer = AlignedBuffer::allocate(size);
  if (!buffer) {
    return Error{Errc::out_of_memory,
                 concat(path, ": no memory for its ", size, " bytes, mapped or read")};
  }
  out.buffer_ = *std::move(buffer);
  QMLP_TRY(file.read(0, {out.buffer_.data(), size}));
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
