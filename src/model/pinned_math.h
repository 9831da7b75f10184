#pragma once

// Elementary functions in double, made of IEEE operations in a fixed order. A C library's own may
// differ in the last bit from machine to machine, and with it a rotary table or a drawn token.
namespace qmlp {

double pinned_exp(double x) noexcept;  // 0 below -745, infinity above 709.8
double pinned_log(double x) noexcept;  // x positive and normal
struct SinCos {
  double sine;
  double cosine;
};
SinCos pinned_sin_cos(double x) noexcept;  // |x| < 2^30

}  // namespace qmlp
