#pragma once

#include <cstdint>
#include <span>

// Unicode data for normalization, sorted, without Hangul syllables (they follow a formula).
namespace qmlp::text {

struct Decomposition {
  char32_t code;
  char32_t first;
  char32_t second;  // 0 for one character
};
struct Composition {
  char32_t first;
  char32_t second;
  char32_t code;
};
struct CombiningRange {
  char32_t first;
  char32_t last;
  std::uint8_t combining_class;
};
// A character whose compatibility decomposition is not its canonical one.
struct Compatible {
  char32_t code;
  std::uint16_t begin;  // of the full decomposition in compatible_text
  std::uint16_t length;
};

std::span<const Decomposition> decompositions() noexcept;
std::span<const Composition> compositions() noexcept;  // by first, then second
std::span<const CombiningRange> combining_ranges() noexcept;
std::span<const Compatible> compatible() noexcept;
std::span<const char32_t> compatible_text() noexcept;

}  // namespace qmlp::text
