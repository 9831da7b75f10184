#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "qmlp/quant.h"
#include "qmlp/status.h"
#include "qmlp/types.h"

// Golden vectors: results of other implementations, in the safetensors layouts of
// tests/data/README.md.
namespace qmlp {

// y[M, N] = x[M, K] * w^T as mlx-cuda/qmm_*.safetensors hold it. Floats are widened from `type`.
struct MatmulCase {
  std::string name;  // "bf16_b4_g64_m8"
  DType type = DType::bf16;
  std::int64_t M = 0;
  QuantizedTensor weight;
  std::vector<float> x;
  std::vector<float> y;
  std::vector<float> dequantized;  // [N, K]; empty when the file has none
};

// A whole SwiGLU problem as mlx-cpu/*.safetensors hold it.
struct SwigluCase {
  std::string name;
  std::string kind;  // "nonfinite", "overflow", "onehot", ... or empty
  DType type = DType::bf16;
  std::int64_t M = 0;
  QuantizedTensor gate_weight;
  QuantizedTensor up_weight;
  std::vector<float> x;
  std::vector<float> gate, up, hidden;                          // MLX's own, its sums included
  std::vector<float> gate_rounded, up_rounded, hidden_rounded;  // f32 sums, rounded ops; f32: empty
  std::vector<double> ref_gate, ref_up, ref_hidden;             // float64 on exact weights
};

// result[i] for the input with bit pattern i.
struct ActivationTable {
  std::string name;  // "sigmoid_bf16"
  DType type = DType::bf16;
  std::vector<std::uint16_t> entries;  // 65536
};

enum class GoldenLayout : std::uint8_t { matmul, swiglu, activation_tables };

struct GoldenFile {
  GoldenLayout layout = GoldenLayout::matmul;
  std::string made_with;  // what the file says made it
  std::vector<MatmulCase> matmuls;
  std::vector<SwigluCase> swiglus;  // one
  std::vector<ActivationTable> tables;
};

// Reads a golden file; the layout is told by the tensors' names. Everything is copied.
Result<GoldenFile> read_golden_file(const std::string& path);

}  // namespace qmlp
