#include "ref/ops.h"

#include "ref/rounding.h"

namespace qmlp::ref {

float linear_epilogue(float acc, const float* linear_bias, const float* residual, DType type) {
  // A sum of two values of a 16-bit type may round in f32 first: 24 bits are enough for the second
  // rounding to be the single one.
  float y = round_to_type(acc, type);
  if (linear_bias != nullptr) y = round_to_type(y + *linear_bias, type);
  if (residual != nullptr) y = round_to_type(*residual + y, type);
  return y;
}

float match_epilogue(float gate, float up, DType type, SigmoidKind kind) {
  const float p = sigmoid(gate, type, kind);
  const float a = round_to_type(gate * p, type);
  return round_to_type(a * up, type);
}

float wide_epilogue(float acc_gate, float acc_up, DType type) {
  const float silu = acc_gate * sigmoid_f32(acc_gate);
  const float product = silu * acc_up;
  return round_to_type(product, type);
}

std::vector<float> linear(std::span<const float> x, std::span<const float> w, std::int64_t M,
                          std::int64_t N, std::int64_t K, const Rules& rules,
                          const float* linear_bias, const float* residual) {
  std::vector<float> out(static_cast<std::size_t>(M * N));
  for (std::int64_t m = 0; m < M; ++m) {
    for (std::int64_t n = 0; n < N; ++n) {
      const float acc = dot(x.data() + m * K, w.data() + n * K, K, rules.contract, rules.type);
      const float* bias = linear_bias != nullptr ? linear_bias + n : nullptr;
      const float* added = residual != nullptr ? residual + m * N + n : nullptr;
      out[static_cast<std::size_t>(m * N + n)] = linear_epilogue(acc, bias, added, rules.type);
    }
  }
  return out;
}

SwigluResult swiglu(std::span<const float> x, std::span<const float> gate,
                    std::span<const float> up, std::int64_t M, std::int64_t N, std::int64_t K,
                    const Rules& rules, const float* gate_bias, const float* up_bias) {
  SwigluResult result;
  result.gate.resize(static_cast<std::size_t>(M * N));
  result.out.resize(static_cast<std::size_t>(M * N));
  for (std::int64_t m = 0; m < M; ++m) {
    for (std::int64_t n = 0; n < N; ++n) {
      const auto at = static_cast<std::size_t>(m * N + n);
      float acc_g = dot(x.data() + m * K, gate.data() + n * K, K, rules.contract, rules.type);
      float acc_u = dot(x.data() + m * K, up.data() + n * K, K, rules.contract, rules.type);
      const float* g_bias = gate_bias != nullptr ? gate_bias + n : nullptr;
      const float* u_bias = up_bias != nullptr ? up_bias + n : nullptr;
      const float g = linear_epilogue(acc_g, g_bias, nullptr, rules.type);
      const float u = linear_epilogue(acc_u, u_bias, nullptr, rules.type);
      result.gate[at] = g;
      if (rules.precision == Precision::match) {
        result.out[at] = match_epilogue(g, u, rules.type, rules.sigmoid);
        continue;
      }
      if (g_bias != nullptr) acc_g += *g_bias;
      if (u_bias != nullptr) acc_u += *u_bias;
      result.out[at] = wide_epilogue(acc_g, acc_u, rules.type);
    }
  }
  return result;
}

}  // namespace qmlp::ref
