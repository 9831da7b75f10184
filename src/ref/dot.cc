#include "ref/dot.h"

#include <bit>
#include <cmath>
#include <vector>

#include "ref/rounding.h"

namespace qmlp::ref {
namespace {

constexpr std::uint32_t kNan = 0x7FFFFFFFu;
constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr int kTerms = 17;
constexpr int kFractionBits = 25;  // kept below the largest exponent
constexpr std::int64_t kBlock = 64;
constexpr std::int64_t kStep = 16;

// An operand as the tensor core sees it: `exponent` is that of its leading place, which a subnormal
// keeps at the type's lowest.
struct Operand {
  Parts::Kind kind;
  bool negative;
  std::uint32_t significand;
  int last;  // exponent of the significand's last bit
  int exponent;
};

Operand operand_of(std::uint16_t bits, DType type) {
  const int fraction_bits = type == DType::f16 ? 10 : 7;
  const int bias = type == DType::f16 ? 15 : 127;
  const int mask = type == DType::f16 ? 31 : 255;
  const bool negative = (bits >> 15) != 0;
  const int field = (bits >> fraction_bits) & mask;
  const std::uint32_t fraction = bits & ((1u << fraction_bits) - 1u);
  if (field == mask) {
    return {fraction != 0 ? Parts::Kind::nan : Parts::Kind::infinite, negative, 0, 0, 0};
  }
  if (field == 0) {
    return {fraction != 0 ? Parts::Kind::finite : Parts::Kind::zero, negative, fraction,
            1 - bias - fraction_bits, 1 - bias};
  }
  return {Parts::Kind::finite, negative, fraction | 1u << fraction_bits,
          field - bias - fraction_bits, field - bias};
}

struct Term {
  bool negative;
  std::uint64_t significand;
  int last;
  int exponent;
};

// total * 2^last cut toward zero to f32.
std::uint32_t truncate_to_f32(std::int64_t total, int last) {
  const std::uint32_t sign = total < 0 ? 0x80000000u : 0u;
  auto magnitude = static_cast<std::uint64_t>(total < 0 ? -total : total);
  int width = std::bit_width(magnitude);
  if (width > 24) {
    magnitude >>= width - 24;
    last += width - 24;
    width = 24;
  }
  const int top = last + width - 1;
  if (top > 127) return kInfinity | sign;
  if (top < -126) {  // a subnormal, kept
    const int shift = -149 - last;
    if (shift > 63) return 0;
    magnitude = shift > 0 ? magnitude >> shift : magnitude << -shift;
    return magnitude != 0 ? sign | static_cast<std::uint32_t>(magnitude) : 0;
  }
  const auto fraction = static_cast<std::uint32_t>(magnitude << (24 - width)) & 0x7FFFFFu;
  return sign | static_cast<std::uint32_t>(top + 127) << 23 | fraction;
}

}  // namespace

float dot_f32(const float* x, const float* w, std::int64_t K) noexcept {
  float acc = 0.0f;
  for (std::int64_t k = 0; k < K; ++k) acc = std::fma(x[k], w[k], acc);
  return acc;
}

std::uint32_t step16(const std::uint16_t* a, const std::uint16_t* b, std::uint32_t acc,
                     DType type) noexcept {
  Term terms[kTerms];
  int count = 0;
  bool nan = false;
  bool infinite[2] = {false, false};
  for (int i = 0; i < kStep; ++i) {
    const Operand p = operand_of(a[i], type);
    const Operand q = operand_of(b[i], type);
    const bool any_infinite = p.kind == Parts::Kind::infinite || q.kind == Parts::Kind::infinite;
    const bool any_zero = p.kind == Parts::Kind::zero || q.kind == Parts::Kind::zero;
    if (p.kind == Parts::Kind::nan || q.kind == Parts::Kind::nan || (any_infinite && any_zero)) {
      nan = true;
    } else if (any_infinite) {
      infinite[p.negative != q.negative ? 1 : 0] = true;
    } else if (!any_zero) {
      terms[count++] = {p.negative != q.negative, std::uint64_t{p.significand} * q.significand,
                        p.last + q.last, p.exponent + q.exponent};
    }
  }
  const Parts c = take_apart(std::bit_cast<float>(acc));
  if (c.kind == Parts::Kind::nan) nan = true;
  if (c.kind == Parts::Kind::infinite) infinite[c.negative ? 1 : 0] = true;
  if (c.kind == Parts::Kind::finite) {
    // Parts keeps 24 places even of a subnormal, so its leading place is always 23 above the last.
    terms[count++] = {c.negative, c.significand, c.exponent, c.exponent + 23};
  }
  if (nan || (infinite[0] && infinite[1])) return kNan;
  if (infinite[0] || infinite[1]) return kInfinity | (infinite[1] ? 0x80000000u : 0u);
  if (count == 0) return 0;

  int greatest = terms[0].exponent;
  for (int i = 1; i < count; ++i) {
    if (terms[i].exponent > greatest) greatest = terms[i].exponent;
  }
  const int cut = greatest - kFractionBits;
  std::int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const int shift = terms[i].last - cut;
    std::uint64_t kept = 0;
    if (shift >= 0) {
      kept = terms[i].significand << shift;
    } else if (shift > -64) {
      kept = terms[i].significand >> -shift;
    }
    total += terms[i].negative ? -static_cast<std::int64_t>(kept) : static_cast<std::int64_t>(kept);
  }
  return total == 0 ? 0 : truncate_to_f32(total, cut);
}

float dot_tensor(const float* x, const float* w, std::int64_t K, int segments, DType type) {
  const std::int64_t padded = (K + kStep - 1) / kStep * kStep;  // with zeros, which a step ignores
  std::vector<std::uint16_t> a(static_cast<std::size_t>(padded));
  std::vector<std::uint16_t> b(static_cast<std::size_t>(padded));
  for (std::int64_t k = 0; k < K; ++k) {
    a[static_cast<std::size_t>(k)] = to_bits16(x[k], type);
    b[static_cast<std::size_t>(k)] = to_bits16(w[k], type);
  }
  const std::int64_t blocks = (K + kBlock - 1) / kBlock;
  float sums[8] = {};
  for (int i = 0; i < segments; ++i) {
    const std::int64_t begin = i * blocks / segments * kBlock;
    std::int64_t end = (i + 1) * blocks / segments * kBlock;
    if (end > K) end = K;
    std::uint32_t acc = 0;
    for (std::int64_t k = begin; k < end; k += kStep) {
      acc = step16(a.data() + k, b.data() + k, acc, type);
    }
    sums[i] = std::bit_cast<float>(acc);
  }
  // ((0+1)+(2+3))+((4+5)+(6+7)): halving the list of neighbours' sums.
  for (int width = segments; width > 1; width /= 2) {
    for (int i = 0; i < width / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

float dot(const float* x, const float* w, std::int64_t K, const Contract& contract, DType type) {
  if (contract.accumulation == Accumulation::f32) return dot_f32(x, w, K);
  return dot_tensor(x, w, K, contract.segments, type);
}

}  // namespace qmlp::ref
