#include "context.h"

#include <csignal>

#include <unistd.h>

namespace qmlp::cli {
namespace {

volatile std::sig_atomic_t g_stop = 0;

void on_signal(int) { g_stop = 1; }

void write_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n <= 0) return;  // nowhere left to report it
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

}  // namespace

int exit_code(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument:
    case Errc::unsupported:
    case Errc::corrupt_file:
      return kBadInput;
    case Errc::interrupted:
      return kInterrupted;
    case Errc::io:
    case Errc::out_of_memory:
    case Errc::device:
    case Errc::internal:
      break;
  }
  return kSystemError;
}

void fail(Errc code, std::string message) { throw Exception(Error{code, std::move(message)}); }
void fail_usage(std::string message) { fail(Errc::invalid_argument, std::move(message)); }

void print_error(std::string_view text) {
  std::string line = "qmlp: ";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    line += byte < 0x20 || byte == 0x7F ? ' ' : c;
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  line += '\n';
  write_stderr(line);
}

void print_note(std::string_view text) { write_stderr(text); }

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);  // and no SA_RESTART: a blocked read returns
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction old {};
    sigaction(signal, nullptr, &old);
    if (old.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // nohup keeps ignoring
  }
  // A closed pipe and a file-size limit show up as errors of write, which Output reports.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

bool stop_requested() noexcept { return g_stop != 0; }

void check_stop() {
  if (stop_requested()) fail(Errc::interrupted, "interrupted");
}

}  // namespace qmlp::cli
