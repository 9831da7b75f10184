#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "qmlp/plan.h"
#include "qmlp/status.h"
#include "qmlp/tensor.h"

namespace qmlp {

// Where an op runs. Made by cpu.h (of a thread pool) and cuda.h (of a CUDA stream); borrowed.
struct Stream {
  Device device;
  void* handle = nullptr;
};

// Weights re-laid for the kernels of one plan. Immutable; shared by every call that uses them.
class PackedWeight;
using PackedWeightPtr = std::shared_ptr<const PackedWeight>;

// Packs with the stream's threads or device. For a CUDA stream the spans may lie in host memory or
// in a device's, already written. The source may be freed afterwards. Errors: shapes or specs that
// differ from the plan's problem, spans of the wrong size, memory.
Result<PackedWeightPtr> pack(const Plan& plan, const QuantizedTensorView& gate,
                             const QuantizedTensorView& up, const Stream& stream);
Result<PackedWeightPtr> pack(const Plan& plan, const QuantizedTensorView& weight,
                             const Stream& stream);

// The gate (0) or up (1) half of a packed SwiGLU weight as a weight of its own. On a CPU it shares
// the memory; on CUDA, where gate and up are interleaved, it is a copy in the device's memory.
Result<PackedWeightPtr> part(const PackedWeightPtr& packed, int index);

struct PackedInfo {
  std::size_t bytes = 0;    // owned by this weight
  std::int64_t blocks = 0;  // blocks of 16 output features, all parts
  std::int64_t exact_blocks =
      0;  // blocks kept as decoded floats, since fast decoding would round wrongly
  bool non_finite = false;  // some decoded weight is infinite or NaN
};
PackedInfo packed_info(const PackedWeight& packed) noexcept;

struct PackedShape {
  std::int64_t N = 0;
  std::int64_t K = 0;
  int num_parts = 1;  // 2: gate and up
  QuantSpec spec[2];  // of each part
  DType activation = DType::bf16;
};
PackedShape packed_shape(const PackedWeight& packed) noexcept;

// Row `row` of the weight, decoded and rounded to the plan's activation type: out holds K elements.
// A CUDA weight's row is written on `stream`, to the device's memory; without a stream it is there
// when the call returns, and out may be in host memory. On a CPU `stream` has no effect.
Status decode_row(const PackedWeight& packed, std::int64_t row, MutableMatrixView out,
                  const Stream& stream = {}) noexcept;

// Rows [row_begin, row_begin + row_count) of one part (0, or 1 for up) as the source held them, bit
// for bit: the inverse of pack. The spans hold what quant_sizes gives for row_count rows; of a CUDA
// weight they may be in host or device memory, and are written when the call returns. Errors: bits
// that were not kept: exact blocks (packed_info), or a dense weight of another type than the plan.
Status unpack_rows(const PackedWeight& packed, int part, std::int64_t row_begin,
                   std::int64_t row_count, std::span<std::byte> codes, std::span<std::byte> scales,
                   std::span<std::byte> biases) noexcept;

struct SwigluEpilogue {
  const std::byte* gate_bias = nullptr;  // activation type [intermediate], the layer's linear bias
  const std::byte* up_bias = nullptr;
  MutableMatrixView gate_tap;  // receives the gate projection when data is not null
};
struct LinearEpilogue {
  const std::byte* linear_bias = nullptr;  // activation type [N]
  MatrixView residual;                     // added last when data is not null; may be out itself
};

// out[M, intermediate] = silu(x * gate^T) * (x * up^T). x [M, hidden], both of the plan's
// activation type. out may not overlap x. Asynchronous on device streams; allocates nothing.
Status fused_swiglu(const Plan& plan, const PackedWeight& weight, const MatrixView& x,
                    const MutableMatrixView& out, const Workspace& workspace, const Stream& stream,
                    const SwigluEpilogue& epilogue = {}) noexcept;

// out[M, N] = x * w^T (+ linear bias) (+ residual), each rounded as docs/numerics.md section 4
// says.
Status quantized_linear(const Plan& plan, const PackedWeight& weight, const MatrixView& x,
                        const MutableMatrixView& out, const Workspace& workspace,
                        const Stream& stream, const LinearEpilogue& epilogue = {}) noexcept;

// out[M, N] = silu(gate) * up element by element, with `match` roundings: the unfused second half.
// out may be gate or up itself. Asynchronous on device streams, which take bf16 and f16.
Status swiglu_activation(const MatrixView& gate, const MatrixView& up, const MutableMatrixView& out,
                         const Stream& stream) noexcept;

// The whole MLP: quantized_linear(down, fused_swiglu(gate, up, x)) (+ residual), with exactly the
// bits of the separate calls. The hidden rows live in the workspace.
std::size_t mlp_workspace_bytes(const Plan& swiglu, const Plan& down, std::int64_t M) noexcept;
Status fused_mlp(const Plan& swiglu, const PackedWeight& gate_up, const Plan& down,
                 const PackedWeight& down_weight, const MatrixView& x, const MutableMatrixView& out,
                 const Workspace& workspace, const Stream& stream,
                 const SwigluEpilogue& swiglu_epilogue = {},
                 const LinearEpilogue& down_epilogue = {}) noexcept;

}  // namespace qmlp
