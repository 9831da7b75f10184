#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/checked.h"
#include "base/concat.h"
#include "base/try.h"
#include "io/files.h"
#include "model/hash.h"
#include "model/key_blocks.h"
#include "model/session_impl.h"

// The prompt cache file, little endian: Header, token ids (int32), then for each layer and KV head
// the keys [position, head_dim] and the values [position, head_dim]. docs/forward.md describes it.
namespace qmlp {
namespace {

constexpr char kMagic[8] = {'Q', 'M', 'L', 'P', 'K', 'V', '\r', '\n'};
constexpr std::uint32_t kVersion = 1;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t dtype;
  std::uint64_t fingerprint;  // Model::Impl::fingerprint
  std::uint64_t num_layers;
  std::uint64_t num_kv_heads;
  std::uint64_t head_dim;
  std::uint64_t num_tokens;
  std::uint64_t checksum;  // of the header with this field 0, and of all that follows
};
static_assert(sizeof(Header) == 64);

Error io_error(const std::string& path, const char* what) {
  return Error{Errc::io, concat(path, ": cannot ", what, ": ", std::strerror(errno))};
}

class File {
 public:
  explicit File(int fd) noexcept : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const noexcept { return fd_; }
  // Closing reports late write errors.
  bool close() noexcept { return ::close(std::exchange(fd_, -1)) == 0; }

  bool write(const void* data, std::size_t size) noexcept {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t written = ::write(fd_, bytes, size);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return false;
      bytes += written;
      size -= static_cast<std::size_t>(written);
    }
    return true;
  }
  bool read(void* data, std::size_t size) noexcept {
    auto* bytes = static_cast<char*>(data);
    while (size > 0) {
      const ssize_t got = ::read(fd_, bytes, size);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return false;
      if (got == 0) {
        errno = ENODATA;
        return false;
      }
      bytes += got;
      size -= static_cast<std::size_t>(got);
    }
    return true;
  }

 private:
  int fd_;
};

// The rows of one head's keys (part 0) or values (part 1), to or from `rows`.
void copy_head(const KvCache& cache, std::int64_t layer, std::int64_t head, int part,
               std::int64_t positions, std::byte* rows, bool to_rows) {
  const auto element = static_cast<std::int64_t>(cache.element_bytes);
  if (part == 0) {
    auto* keys = const_cast<std::byte*>(cache.keys(layer)) + head * cache.k_head_stride * element;
    if (element == 4) {
      copy_keys(reinterpret_cast<std::uint32_t*>(keys), reinterpret_cast<std::uint32_t*>(rows),
                positions, cache.head_dim, to_rows);
    } else {
      copy_keys(reinterpret_cast<std::uint16_t*>(keys), reinterpret_cast<std::uint16_t*>(rows),
                positions, cache.head_dim, to_rows);
    }
    return;
  }
  auto* values = const_cast<std::byte*>(cache.values(layer)) + head * cache.v_head_stride * element;
  const auto row_bytes = static_cast<std::size_t>(cache.head_dim * element);
  for (std::int64_t p = 0; p < positions; ++p) {
    std::byte* in_cache = values + p * cache.v_row_stride * element;
    std::byte* row = rows + p * cache.head_dim * element;
    std::memcpy(to_rows ? row : in_cache, to_rows ? in_cache : row, row_bytes);
  }
}

void hash_header(const Header& header, Hash64& hash) {
  Header copy = header;
  copy.checksum = 0;
  hash.update(&copy, sizeof(copy));
}

Header make_header(const Model::Impl& model, const KvCache& cache, std::int64_t position) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.dtype = static_cast<std::uint32_t>(model.activations);
  header.fingerprint = model.fingerprint;
  header.num_layers = static_cast<std::uint64_t>(cache.num_layers);
  header.num_kv_heads = static_cast<std::uint64_t>(cache.num_kv_heads);
  header.head_dim = static_cast<std::uint64_t>(cache.head_dim);
  header.num_tokens = static_cast<std::uint64_t>(position);
  return header;
}

Status check_header(const std::string& path, const Header& header, const Model::Impl& model,
                    const KvCache& cache, std::int64_t max_tokens, std::uint64_t file_bytes) {
  const auto corrupt = [&](std::string_view why) -> Status {
    return Error{Errc::corrupt_file, concat(path, ": ", why)};
  };
  const auto mismatch = [&](std::string_view why) -> Status {
    return Error{Errc::invalid_argument, concat(path, ": ", why)};
  };
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return corrupt("is not a qmlp prompt cache");
  }
  if (header.version != kVersion) {
    return corrupt(
        concat("has format version ", header.version, ", this program reads ", kVersion));
  }
  if (header.dtype > static_cast<std::uint32_t>(DType::bf16)) {
    return corrupt(concat("names an unknown type, ", header.dtype));
  }
  const auto dtype = static_cast<DType>(header.dtype);
  if (dtype != model.activations) {
    return mismatch(concat("was made with ", to_string(dtype), " activations, this session has ",
                           to_string(model.activations)));
  }
  if (header.num_layers != static_cast<std::uint64_t>(cache.num_layers) ||
      header.num_kv_heads != static_cast<std::uint64_t>(cache.num_kv_heads) ||
      header.head_dim != static_cast<std::uint64_t>(cache.head_dim)) {
    return mismatch(concat("has ", header.num_layers, " layers of ", header.num_kv_heads, " x ",
                           header.head_dim, ", this model has ", cache.num_layers, " of ",
                           cache.num_kv_heads, " x ", cache.head_dim));
  }
  if (header.fingerprint != model.fingerprint) {
    return mismatch(
        "was made by another model, or with another precision or accumulation, than this "
        "session's");
  }
  if (header.num_tokens > static_cast<std::uint64_t>(max_tokens)) {
    return mismatch(
        concat("holds ", header.num_tokens, " tokens, this session has room for ", max_tokens));
  }
  // At most max_tokens of them, whose cache fits in memory: nothing here can overflow.
  const std::uint64_t token_bytes =
      sizeof(std::int32_t) +
      2 * header.num_layers * header.num_kv_heads * header.head_dim * cache.element_bytes;
  const std::uint64_t expected = sizeof(Header) + header.num_tokens * token_bytes;
  if (file_bytes != expected) {
    return corrupt(concat(file_bytes < expected ? "is truncated" : "is too long", ": holds ",
                          file_bytes, " bytes, its ", header.num_tokens, " tokens need ",
                          expected));
  }
  return {};
}

}  // namespace

Status Session::Impl::save(const std::string& path) const {
  if (path.empty()) return Error{Errc::invalid_argument, "path: is empty"};
  QMLP_ASSIGN(const ReplaceTarget target, regular_target(path));
  const std::string temporary = concat(target.path, ".tmp.", static_cast<std::int64_t>(::getpid()));
  File file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.fd() < 0) return io_error(temporary, "create");
  if (target.mode >= 0) ::fchmod(file.fd(), static_cast<mode_t>(target.mode));
  const auto fail = [&](const char* what) -> Status {
    const Error error = io_error(temporary, what);
    ::unlink(temporary.c_str());
    return error;
  };

  Header header = make_header(impl(), cache, position);
  Hash64 hash;
  hash_header(header, hash);
  hash.update(tokens.data(), tokens.size() * sizeof(std::int32_t));
  if (!file.write(&header, sizeof(header)) ||
      !file.write(tokens.data(), tokens.size() * sizeof(std::int32_t))) {
    return fail("write");
  }
  std::vector<std::byte> rows(static_cast<std::size_t>(position * cache.head_dim) *
                              cache.element_bytes);
  for (std::int64_t layer = 0; layer < cache.num_layers; ++layer) {
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (int part = 0; part < 2; ++part) {
        copy_head(cache, layer, head, part, position, rows.data(), true);
        hash.update(rows.data(), rows.size());
        if (!file.write(rows.data(), rows.size())) return fail("write");
      }
    }
  }
  header.checksum = hash.value();
  if (::lseek(file.fd(), 0, SEEK_SET) != 0 || !file.write(&header, sizeof(header)) ||
      ::fsync(file.fd()) != 0 || !file.close()) {
    return fail("write");
  }
  if (std::rename(temporary.c_str(), target.path.c_str()) != 0) return fail("rename");
  return {};
}

Status Session::Impl::load(const std::string& path) {
  File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd() < 0) return io_error(path, "open");
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return io_error(path, "read");
  if (!S_ISREG(info.st_mode)) return Error{Errc::io, concat(path, ": is not a regular file")};
  const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
  Header header{};
  if (file_bytes < sizeof(header)) {
    return Error{Errc::corrupt_file, concat(path, ": is truncated: holds ", file_bytes,
                                            " bytes, the header alone needs ", sizeof(header))};
  }
  if (!file.read(&header, sizeof(header))) return io_error(path, "read");
  QMLP_TRY(check_header(path, header, impl(), cache, max_tokens, file_bytes));

  const auto count = static_cast<std::int64_t>(header.num_tokens);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::vector<std::byte> rows(static_cast<std::size_t>(count * cache.head_dim) *
                              cache.element_bytes);
  // Twice over the file: a damaged one is refused before the cache changes.
  for (const bool keep : {false, true}) {
    if (::lseek(file.fd(), sizeof(header), SEEK_SET) < 0) return io_error(path, "read");
    if (keep) {
      position = 0;
      tokens.clear();
    }
    Hash64 hash;
    hash_header(header, hash);
    if (!file.read(ids.data(), ids.size() * sizeof(std::int32_t))) return io_error(path, "read");
    hash.update(ids.data(), ids.size() * sizeof(std::int32_t));
    for (std::int64_t layer = 0; layer < cache.num_layers; ++layer) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
        for (int part = 0; part < 2; ++part) {
          if (!file.read(rows.data(), rows.size())) return io_error(path, "read");
          hash.update(rows.data(), rows.size());
          if (keep) copy_head(cache, layer, head, part, count, rows.data(), false);
        }
      }
    }
    if (hash.value() != header.checksum) {
      return Error{Errc::corrupt_file, concat(path, ": is damaged: its checksum does not match")};
    }
    const auto vocab = impl().config.vocab_size;
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocab) {
        return Error{Errc::corrupt_file,
                     concat(path, ": token id ", id, " is outside the vocabulary of ", vocab)};
      }
    }
  }
  tokens.assign(ids.begin(), ids.end());
  position = count;
  return {};
}

}  // namespace qmlp
