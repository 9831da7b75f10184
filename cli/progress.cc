#include "progress.h"

#include <unistd.h>

#include "context.h"
#include "format.h"

namespace qmlp::cli {

Progress::Progress(bool enabled) : enabled_(enabled), terminal_(::isatty(STDERR_FILENO) == 1) {}

void Progress::update(std::string_view what, std::int64_t done, std::int64_t total) {
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + (terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(2000));
  std::string text(what);
  if (total > 0) {
    text += format(" %lld/%lld", static_cast<long long>(done), static_cast<long long>(total));
  }
  print_note(terminal_ ? "\r\x1b[K" + text : text + "\n");
  shown_ = terminal_;
}

void Progress::clear() {
  if (shown_) print_note("\r\x1b[K");
  shown_ = false;
}

bool progress_by_default() { return ::isatty(STDERR_FILENO) == 1; }

}  // namespace qmlp::cli
