#include "quant/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "qmlp/quant.h"
#include "quant/codes.h"

namespace qmlp {
namespace {

constexpr float kEpsilon = 1e-7f;
constexpr int kMaxGroup = 128;

struct GroupFit {
  float scale = 0.0f;
  float bias = 0.0f;
};

// The end of larger magnitude gets code 0 exactly, and zero falls on a code. Every operation, its
// order and its rounding are MLX's CPU quantizer's.
bool fit_group(const float* group, int group_size, float top_code, GroupFit& fit) noexcept {
  float low = std::numeric_limits<float>::infinity();
  float high = -low;
  bool finite = true;
  for (int i = 0; i < group_size; ++i) {
    high = high < group[i] ? group[i] : high;
    low = group[i] < low ? group[i] : low;
    finite = finite && group[i] - group[i] == 0.0f;
  }
  if (!finite || !std::isfinite(high - low)) return false;
  const bool low_edge = std::fabs(low) > std::fabs(high);
  float scale = std::max((high - low) / top_code, kEpsilon);
  if (!low_edge) scale = -scale;
  const float edge = low_edge ? low : high;
  const float edge_steps = std::rint(edge / scale);
  fit.bias = 0.0f;
  if (edge_steps != 0.0f) {
    scale = edge / edge_steps;
    fit.bias = edge;
  }
  fit.scale = scale;
  return true;
}

void encode_group(const float* group, int group_size, float top_code, const GroupFit& fit,
                  std::uint8_t* codes) noexcept {
  for (int i = 0; i < group_size; ++i) {
    float steps = (group[i] - fit.bias) / fit.scale;
    // Clamping first gives the same code as rounding first, and turns the 0/0 of a constant group
    // near f32's limit into 0.
    steps = steps > 0.0f ? steps : 0.0f;
    steps = steps < top_code ? steps : top_code;
    constexpr float kRoundToInteger = 0x1.8p23f;  // ties to even, as rint
    codes[i] =
        static_cast<std::uint8_t>(static_cast<int>((steps + kRoundToInteger) - kRoundToInteger));
  }
}

}  // namespace

std::int64_t quantize_rows(const float* weights, std::int64_t rows, std::int64_t K,
                           const QuantSpec& spec, std::byte* codes, std::byte* scales,
                           std::byte* biases) noexcept {
  const auto top_code = static_cast<float>((1 << spec.bits) - 1);
  const std::int64_t groups = rows * (K / spec.group_size);
  const std::int64_t group_bytes = packed_row_bytes(spec.group_size, spec.bits);
  std::uint8_t unpacked[kMaxGroup];
  for (std::int64_t g = 0; g < groups; ++g) {
    const float* group = weights + g * spec.group_size;
    GroupFit fit;
    if (!fit_group(group, spec.group_size, top_code, fit)) return g * spec.group_size;
    encode_group(group, spec.group_size, top_code, fit, unpacked);
    pack_row(unpacked, spec.bits, spec.group_size, codes + g * group_bytes);
    store_float(scales, spec.scale_dtype, g, fit.scale);
    store_float(biases, spec.scale_dtype, g, fit.bias);
  }
  return -1;
}

Result<QuantizedTensor> quantize(std::span<const float> weights, std::int64_t N, std::int64_t K,
                                 const QuantSpec& spec) {
  if (spec.is_dense()) {
    return Error{Errc::invalid_argument, "quantize: group_size is 0, needs 32, 64 or 128"};
  }
  QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(N, K, spec));
  // quant_sizes has shown that N * K fits.
  if (weights.size() != static_cast<std::size_t>(N) * static_cast<std::size_t>(K)) {
    return Error{Errc::invalid_argument, concat("quantize: weights hold ", weights.size(),
                                                " values, [", N, ", ", K, "] needs ", N * K)};
  }
  QuantizedTensor out;
  out.N = N;
  out.K = K;
  out.spec = spec;
  out.codes.resize(sizes.codes_bytes);
  out.scales.resize(sizes.scales_bytes);
  out.biases.resize(sizes.scales_bytes);
  const std::int64_t bad = quantize_rows(weights.data(), N, K, spec, out.codes.data(),
                                         out.scales.data(), out.biases.data());
  if (bad >= 0) {
    return Error{Errc::invalid_argument,
                 concat("quantize: row ", bad / K, ", group at column ", bad % K,
                        " holds a NaN or an infinity, or spans more than f32")};
  }
  return out;
}

}  // namespace qmlp
