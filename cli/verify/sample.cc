#include "sample.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/float16.h"

namespace qmlp::cli {
namespace {

// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  double unit() {  // [0, 1)
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
  double normal() {
    return std::sqrt(-2.0 * std::log(1.0 - unit())) * std::cos(6.283185307179586 * unit());
  }

 private:
  std::uint64_t state_;
};

}  // namespace

void fill_activations(const MutableMatrixView& x, std::uint64_t seed) {
  Random random(seed);
  std::vector<double> channel(static_cast<std::size_t>(x.cols), 1.0);
  const std::int64_t outliers = std::max<std::int64_t>(1, x.cols / 256);
  for (std::int64_t i = 0; i < outliers; ++i) {
    const auto at = static_cast<std::size_t>(random.unit() * static_cast<double>(x.cols));
    channel[at] = 15.0 + 45.0 * random.unit();
  }
  for (std::int64_t m = 0; m < x.rows; ++m) {
    for (std::int64_t k = 0; k < x.cols; ++k) {
      double value = random.normal() * channel[static_cast<std::size_t>(k)];
      const double kind = random.unit();
      if (kind < 0.002) value = 30.0;
      if (kind > 0.995) value = 0.0;
      store_float(x.data, x.dtype, m * x.row_stride + k, static_cast<float>(value));
    }
  }
}

}  // namespace qmlp::cli
