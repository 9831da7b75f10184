#include "stop_filter.h"

#include <algorithm>

namespace qmlp::cli {

std::string StopFilter::push(std::string_view text) {
  if (stopped_) return {};
  held_ += text;
  // The stop string that is complete first counts, so that pieces of any length stop alike; of
  // those that end together, the longest.
  std::size_t found = std::string::npos;
  std::size_t found_end = std::string::npos;
  for (const std::string& stop : stops_) {
    const std::size_t begin = held_.find(stop);
    if (begin == std::string::npos) continue;
    const std::size_t end = begin + stop.size();
    if (end < found_end || (end == found_end && begin < found)) {
      found = begin;
      found_end = end;
    }
  }
  if (found != std::string::npos) {
    stopped_ = true;
    std::string shown = held_.substr(0, found);
    held_.clear();
    return shown;
  }
  // Keep from the first position whose text is the beginning of a stop string.
  std::size_t keep = held_.size();
  for (const std::string& stop : stops_) {
    const std::size_t longest = std::min(stop.size() - 1, held_.size());
    for (std::size_t length = longest; length > 0; --length) {
      if (std::string_view(held_).substr(held_.size() - length) ==
          std::string_view(stop).substr(0, length)) {
        keep = std::min(keep, held_.size() - length);
        break;
      }
    }
  }
  std::string shown = held_.substr(0, keep);
  held_.erase(0, keep);
  return shown;
}

std::string StopFilter::finish() {
  std::string shown;
  if (!stopped_) shown.swap(held_);
  return shown;
}

}  // namespace qmlp::cli
