#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace qmlp::cli {

// Passes text on until a stop string appears in it, however the text was cut into pieces. Text that
// may still become a stop string is held back, so none of a stop string is ever shown.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}

  std::string push(std::string_view text);  // what may be shown
  std::string finish();                     // what was held back, when the text ends
  bool stopped() const noexcept { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace qmlp::cli
