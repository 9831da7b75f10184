#include "model/pinned_math.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// Reduced arguments and Taylor series whose first dropped term is below 2^-60 of the result. Errors
// stay within 2 ulp (sine and cosine: of 1).
namespace qmlp {
namespace {

// ln 2 and pi / 2 in two parts. ln 2's first has 32 significant bits, so a product with n is exact.
constexpr double kLn2High = 0x1.62e42fee00000p-1;  // 32 significant bits
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kInvLn2 = 0x1.71547652b82fep+0;
constexpr double kHalfPi = 0x1.921fb54442d18p+0;
constexpr double kHalfPiLow = 0x1.1a62633145c07p-54;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kToInteger =
    0x1.8p52;  // adding it rounds to an integer, subtracting gives it back

constexpr double inverse_factorial(int n) {
  double product = 1.0;
  for (int i = 2; i <= n; ++i) product *= i;
  return 1.0 / product;
}

}  // namespace

double pinned_exp(double x) noexcept {
  if (x != x) return x;
  if (x < -745.5) return 0.0;
  if (x > 709.8) return std::numeric_limits<double>::infinity();
  const double n = (x * kInvLn2 + kToInteger) - kToInteger;
  const double r = (x - n * kLn2High) - n * kLn2Low;  // |r| <= 0.347
  constexpr int kTerms = 14;
  constexpr auto kSeries = [] {
    std::array<double, kTerms + 1> series{};
    for (int i = 0; i <= kTerms; ++i) series[i] = inverse_factorial(i);
    return series;
  }();
  // Multiply and add rather than FMA: where FMA is a library call this is ten times faster.
  double sum = kSeries[kTerms];
  for (int i = kTerms - 1; i >= 0; --i) sum = sum * r + kSeries[i];
  // 2^n in two factors, since n may be below the exponents of normal numbers.
  const auto whole = static_cast<std::int64_t>(n);
  const std::int64_t half = whole / 2;
  const auto power = [](std::int64_t exponent) {
    return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
  };
  return sum * power(half) * power(whole - half);
}

double pinned_log(double x) noexcept {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  auto exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  double mantissa =
      std::bit_cast<double>((bits & ((std::uint64_t{1} << 52) - 1)) | (1023ull << 52));
  if (mantissa > 0x1.6a09e667f3bcdp+0) {  // the square root of 2
    mantissa *= 0.5;
    ++exponent;
  }
  // log m = 2 artanh((m - 1) / (m + 1)), |s| <= 0.172
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double sum = 0.0;
  for (int power = 25; power >= 3; power -= 2) sum = (sum + 1.0 / power) * square;
  const double log_mantissa = 2.0 * std::fma(s, sum, s);
  const auto n = static_cast<double>(exponent);
  return n * kLn2High + std::fma(n, kLn2Low, log_mantissa);
}

SinCos pinned_sin_cos(double x) noexcept {
  const double n = (x * kTwoOverPi + kToInteger) - kToInteger;
  const double r = std::fma(n, -kHalfPiLow, std::fma(n, -kHalfPi, x));  // |r| <= pi/4
  const double square = -r * r;
  double sine = 1.0;
  for (int k = 18; k >= 2; k -= 2) sine = std::fma(sine, square / (k * (k + 1)), 1.0);
  sine *= r;
  double cosine = 1.0;
  for (int k = 17; k >= 1; k -= 2) cosine = std::fma(cosine, square / (k * (k + 1)), 1.0);
  switch (static_cast<std::int64_t>(n) & 3) {
    case 0:
      return {sine, cosine};
    case 1:
      return {cosine, -sine};
    case 2:
      return {-sine, -cosine};
    default:
      return {-cosine, sine};
  }
}

}  // namespace qmlp
