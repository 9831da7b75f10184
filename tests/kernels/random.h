#pragma once

#include <cmath>
#include <cstdint>

namespace qmlp::test {

// SplitMix64: the same numbers from a seed everywhere, which <random>'s distributions do not
// promise.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(n));
  }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double uniform(double low, double high) { return low + (high - low) * unit(); }
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - unit()));
    return radius * std::cos(6.283185307179586 * unit());
  }
  template <class T, std::size_t n>
  T pick(const T (&values)[n]) {
    return values[below(static_cast<std::int64_t>(n))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace qmlp::test
