#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace qmlp::cli {

// One line on standard error that is rewritten as work goes on; plain lines where that is no
// terminal.
class Progress {
 public:
  explicit Progress(bool enabled);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  // total 0: unknown. Shown at most ten times a second, every two seconds without a terminal.
  void update(std::string_view what, std::int64_t done, std::int64_t total);
  void clear();  // erases the line

 private:
  bool enabled_ = false;
  bool terminal_ = false;
  bool shown_ = false;
  std::chrono::steady_clock::time_point next_{};
};

// Whether progress is shown unless an option says otherwise: standard error is a terminal.
bool progress_by_default();

}  // namespace qmlp::cli
