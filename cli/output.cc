#include "output.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "context.h"

namespace qmlp::cli {
namespace {

constexpr std::size_t kBufferBytes = 1 << 16;

std::string errno_text() { return std::strerror(errno); }

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd > STDERR_FILENO) ::close(fd);
  }
};

// Blocks until there is something to read or a stop is requested. A signal that comes between the
// check and the wait ends the wait, since it is let in only there.
void wait_readable(int fd) {
  sigset_t stops;
  sigset_t before;
  sigemptyset(&stops);
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&stops, number);
  sigprocmask(SIG_BLOCK, &stops, &before);
  if (!stop_requested()) {
    pollfd entry{fd, POLLIN, 0};
    ::ppoll(&entry, 1, nullptr, &before);
  }
  sigprocmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void Output::write(std::string_view text) {
  if (reader_gone_) return;
  buffer_ += text;
  if (buffer_.size() >= kBufferBytes) flush();
}

void Output::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, rest.data(), rest.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = n < 0 ? errno : ENOSPC;
      buffer_.clear();
      if (error == EPIPE) {
        reader_gone_ = true;
        return;
      }
      fail(Errc::io, std::string("standard output: ") + std::strerror(error));
    }
    rest.remove_prefix(static_cast<std::size_t>(n));
  }
  buffer_.clear();
}

void reserve_standard_descriptors() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    // Opened the wrong way round on purpose; open takes the lowest free number, which is fd.
    (void)::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

std::string read_input(const std::string& path) {
  const bool standard_input = path == "-";
  const std::string name = standard_input ? "standard input" : path;
  Descriptor file;
  // O_NONBLOCK: opening a FIFO would wait for its writer where a stop request is not seen.
  file.fd = standard_input ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd < 0) fail(Errc::io, name + ": " + errno_text());
  std::string text;
  char chunk[1 << 16];
  for (;;) {
    wait_readable(file.fd);
    const ssize_t n = ::read(file.fd, chunk, sizeof chunk);
    if (n < 0 && errno != EINTR && errno != EAGAIN) fail(Errc::io, name + ": " + errno_text());
    check_stop();
    if (n == 0) return text;
    if (n > 0) text.append(chunk, static_cast<std::size_t>(n));
  }
}

namespace {

void require_access(const std::string& path, int rights, const std::string& name) {
  if (::access(path.c_str(), rights) != 0) fail(Errc::io, name + ": " + errno_text());
}

void require_folder_access(const ReplaceTarget& target, const std::string& name) {
  const std::size_t slash = target.path.rfind('/');
  require_access(slash == std::string::npos ? "." : target.path.substr(0, slash + 1), W_OK | X_OK,
                 name);
}

}  // namespace

void require_writable(const std::string& path) {
  const ReplaceTarget target = value_or_throw(replace_target(path));
  if (target.is_special) return require_access(path, W_OK, path);
  require_folder_access(target, path);
}

void require_replaceable(const std::string& path) {
  require_folder_access(value_or_throw(regular_target(path)), path);
}

PendingFile::PendingFile(const std::string& path)
    : name_(path),
      target_(value_or_throw(regular_target(path))),
      temporary_(target_.path + ".tmp" + std::to_string(::getpid())) {}

PendingFile::~PendingFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

void PendingFile::commit() {
  if ((target_.mode >= 0 && ::chmod(temporary_.c_str(), static_cast<mode_t>(target_.mode)) != 0) ||
      std::rename(temporary_.c_str(), target_.path.c_str()) != 0) {
    fail(Errc::io, name_ + ": " + errno_text());
  }
  committed_ = true;
}

void write_file(const std::string& path, std::string_view bytes) {
  if (value_or_throw(replace_target(path)).is_special) {
    return value_or_throw(write_text_file(path, bytes));
  }
  PendingFile pending(path);
  value_or_throw(write_text_file(pending.temporary(), bytes, path));
  pending.commit();
}

}  // namespace qmlp::cli
