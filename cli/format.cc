#include "format.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace qmlp::cli {

std::string format(const char* pattern, ...) {
  std::va_list args;
  va_start(args, pattern);
  std::va_list copy;
  va_copy(copy, args);
  const int length = std::vsnprintf(nullptr, 0, pattern, copy);
  va_end(copy);
  std::string text(length > 0 ? static_cast<std::size_t>(length) : 0, '\0');
  if (length > 0) std::vsnprintf(text.data(), text.size() + 1, pattern, args);
  va_end(args);
  return text;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024.0 && unit < 4) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? format("%llu B", static_cast<unsigned long long>(bytes))
                   : format("%.1f %s", value, kUnits[unit]);
}

std::string spec_text(const QuantSpec& spec) {
  if (spec.is_dense()) return std::string("dense ") + to_string(spec.scale_dtype);
  return format("%d bits/%d %s", spec.bits, spec.group_size, to_string(spec.scale_dtype));
}

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = columns_[c].title.size();
    for (const auto& row : rows_) width = std::max(width, row[c].size());
    widths.push_back(width);
  }
  std::string out;
  const auto add_row = [&](const auto& cell_of) {
    std::string line;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string_view cell = cell_of(c);
      const std::size_t padding = widths[c] - cell.size();
      if (c > 0) line += "  ";
      if (columns_[c].right) line.append(padding, ' ');
      line += cell;
      if (!columns_[c].right) line.append(padding, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  };
  add_row([&](std::size_t c) { return columns_[c].title; });
  for (const auto& row : rows_) {
    add_row([&](std::size_t c) { return std::string_view(row[c]); });
  }
  return out;
}

}  // namespace qmlp::cli
