#include "gpu_problem.h"

#include "base/float16.h"

namespace gpu {

using namespace qmlp;

float widened(std::uint16_t bits, DType type) {
  return type == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

bool same(std::uint16_t a, std::uint16_t b, DType type) {
  if (a == b) return true;
  const float x = widened(a, type), y = widened(b, type);
  return x != x && y != y;
}

QuantizedTensor random_weight(Rng& rng, std::int64_t N, std::int64_t K, const QuantSpec& spec) {
  QuantizedTensor tensor;
  tensor.N = N;
  tensor.K = K;
  tensor.spec = spec;
  const QuantSizes sizes = value(quant_sizes(N, K, spec));
  tensor.codes.resize(sizes.codes_bytes);
  std::normal_distribution<float> normal;
  if (spec.is_dense()) {
    for (std::int64_t i = 0; i < N * K; ++i) {
      store_float(tensor.codes.data(), spec.scale_dtype, i, 0.03f * normal(rng));
    }
    return tensor;
  }
  for (std::byte& code : tensor.codes) code = static_cast<std::byte>(rng());
  tensor.scales.resize(sizes.scales_bytes);
  tensor.biases.resize(sizes.scales_bytes);
  const auto groups = static_cast<std::int64_t>(sizes.scales_bytes / size_of(spec.scale_dtype));
  const float levels = static_cast<float>((1 << spec.bits) - 1);
  // Now and then a tensor whose scales are past the window of the fast decoding.
  const float width = rng() % 8 == 0 ? 1.5f : 0.1f;
  for (std::int64_t i = 0; i < groups; ++i) {
    const float sign = rng() % 2 == 0 ? 1.0f : -1.0f;
    const float s = sign * width * (0.5f + static_cast<float>(rng() % 1000) / 1000.0f) / levels;
    store_float(tensor.scales.data(), spec.scale_dtype, i, s);
    store_float(tensor.biases.data(), spec.scale_dtype, i,
                rng() % 16 == 0
                    ? 0.0f
                    : -s * levels * (0.3f + 0.4f * static_cast<float>(rng() % 100) / 100.0f));
  }
  return tensor;
}

std::vector<std::uint16_t> random_rows(Rng& rng, std::int64_t count, DType type) {
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(count));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) {
    const float outlier = rng() % 97 == 0 ? 50.0f : 1.0f;
    store_float(rows.data(), type, i, normal(rng) * outlier);
  }
  return rows;
}

}  // namespace gpu
