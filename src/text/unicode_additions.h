#pragma once

#include <span>

namespace qmlp::text {

struct CategoryRange {
  char category[3];  // general category, such as "Lu"
  char32_t first;
  char32_t last;
};

// The characters that Unicode 15 to 16 assigned, which PCRE2 10.42 does not know.
std::span<const CategoryRange> unicode_additions() noexcept;

}  // namespace qmlp::text
