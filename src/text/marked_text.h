#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qmlp::text {

// Text that remembers which of its bytes a chat template wrote and which came from a message: only
// the template's own can spell special tokens.
struct MarkedText {
  std::string bytes;
  std::string from_template;  // one character for each byte: 1 if the template wrote it

  static MarkedText of_template(std::string_view text) {
    return {std::string(text), std::string(text.size(), '\1')};
  }
  static MarkedText of_message(std::string_view text) {
    return {std::string(text), std::string(text.size(), '\0')};
  }

  std::size_t size() const noexcept { return bytes.size(); }
  void append(const MarkedText& other) {
    bytes += other.bytes;
    from_template += other.from_template;
  }
  MarkedText substr(std::size_t begin, std::size_t end) const {
    return {bytes.substr(begin, end - begin), from_template.substr(begin, end - begin)};
  }

  // The stretches [begin, end) that the template wrote.
  std::vector<std::pair<std::size_t, std::size_t>> template_parts() const {
    std::vector<std::pair<std::size_t, std::size_t>> parts;
    for (std::size_t at = 0; at < from_template.size();) {
      const std::size_t begin = from_template.find('\1', at);
      if (begin == std::string::npos) break;
      at = std::min(from_template.find('\0', begin), from_template.size());
      parts.emplace_back(begin, at);
    }
    return parts;
  }
};

}  // namespace qmlp::text
