#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/types.h"

namespace qmlp::cli {

// printf with a checked format, as a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

std::string human_bytes(std::uint64_t bytes);  // "81.3 MiB"
std::string spec_text(const QuantSpec& spec);  // "4 bits/32 f16", "dense f32"

// Text columns: numbers to the right where `right` says so, two spaces apart, no trailing spaces.
class Table {
 public:
  struct Column {
    std::string_view title;
    bool right = false;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace qmlp::cli
