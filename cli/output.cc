#include "output.h"

#include <cerrno>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "context.h"
#include "io/descriptor.h"

namespace qmlp::cli {
namespace {

constexpr std::size_t kBufferBytes = 1 << 16;

std::string errno_text() { return std::strerror(errno); }

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
  // O_NONBLOCK: opening a FIFO would wait for its writer where a stop request is not seen.
  const Descriptor file(standard_input ? -1
                                       : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  const int fd = standard_input ? STDIN_FILENO : file.get();
  if (fd < 0) fail(Errc::io, name + ": " + errno_text());
  std::string text;
  char chunk[1 << 16];
  for (;;) {
    wait_readable(fd);
    const ssize_t n = ::read(fd, chunk, sizeof chunk);
    if (n < 0 && errno != EINTR && errno != EAGAIN) fail(Errc::io, name + ": " + errno_text());
    check_stop();
    if (n == 0) return text;
    if (n > 0) text.append(chunk, static_cast<std::size_t>(n));
  }
}

}  // namespace qmlp::cli
