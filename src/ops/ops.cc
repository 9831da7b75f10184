#include "qmlp/ops.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "base/byte_range.h"
#include "base/checked.h"
#include "base/try.h"
#include "ops/fault_hook.h"
#include "plan/backend.h"
#include "plan/kernel.h"
#include "plan/packed_weight.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

Error argument_error(std::string_view op, std::string_view name, std::string detail) {
  return Error{Errc::invalid_argument,
               std::string(op) + ": " + std::string(name) + " " + std::move(detail)};
}

// Shape, type, stride, pointer and alignment of one matrix argument.
template <class Byte>
Status check_matrix(std::string_view op, std::string_view name, const BasicMatrixView<Byte>& view,
                    std::int64_t rows, std::int64_t cols, DType dtype) {
  if (view.rows != rows || view.cols != cols) {
    return argument_error(op, name,
                          "is [" + std::to_string(view.rows) + ", " + std::to_string(view.cols) +
                              "], needs [" + std::to_string(rows) + ", " + std::to_string(cols) +
                              "]");
  }
  if (view.dtype != dtype) {
    return argument_error(
        op, name, std::string("is ") + to_string(view.dtype) + ", needs " + to_string(dtype));
  }
  if (rows > 1 && view.row_stride < cols) {
    return argument_error(op, name,
                          "has row stride " + std::to_string(view.row_stride) +
                              ", needs at least " + std::to_string(cols) + " elements");
  }
  if (rows == 0) return {};
  if (view.data == nullptr)
    return argument_error(op, name, "is null, needs " + std::to_string(rows) + " rows");
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  if (address % size_of(dtype) != 0) {
    return argument_error(op, name,
                          "is at an address that is no multiple of its " +
                              std::to_string(size_of(dtype)) + "-byte element");
  }
  const auto span = checked_mul<std::int64_t>(std::max<std::int64_t>(rows - 1, 1),
                                              std::max(view.row_stride, cols));
  if (!span || *span > (std::int64_t{1} << 60)) {
    return argument_error(op, name, "spans more bytes than an address can hold");
  }
  return {};
}

Status check_bias(std::string_view op, std::string_view name, const std::byte* bias, DType dtype) {
  if (bias != nullptr && reinterpret_cast<std::uintptr_t>(bias) % size_of(dtype) != 0) {
    return argument_error(op, name, "is at an address that is no multiple of its element");
  }
  return {};
}

Device device_of(const Plan::State& plan) noexcept {
  return {plan.device.kind, plan.device.ordinal};
}

Status check_stream(std::string_view op, const Plan::State& plan, const Stream& stream) {
  if (!plan.device.present) {
    return Error{Errc::unsupported,
                 std::string(op) + ": the plan is for a machine that is not here"};
  }
  if (stream.device != device_of(plan)) {
    return argument_error(op, "stream", "is of another device than the plan's");
  }
  if (stream.handle == nullptr) return argument_error(op, "stream", "has no handle");
  return {};
}

// The checks that both ops share, then the kernel.
Status run_op(std::string_view op, plan::Op kind, const Plan& plan, const PackedWeight& weight,
              const MatrixView& x, const MutableMatrixView& out, const Workspace& workspace,
              const Stream& stream, const std::byte* bias0, const std::byte* bias1,
              const MatrixView& residual, const MutableMatrixView& gate_tap) {
  const Plan::State& state = plan.state();
  const plan::Problem& problem = state.problem;
  if (problem.op != kind) {
    return argument_error(op, "plan",
                          kind == plan::Op::swiglu ? "is for a linear, needs a SwiGLU"
                                                   : "is for a SwiGLU, needs a linear");
  }
  QMLP_TRY(check_stream(op, state, stream));
  const std::int64_t M = x.rows;
  if (M < 0 || M > problem.M) {
    return argument_error(
        op, "x",
        "has " + std::to_string(M) + " rows, the plan takes 0 to " + std::to_string(problem.M));
  }
  if (weight.num_parts != problem.num_weights() || weight.activation != problem.activation) {
    return argument_error(op, "weight", "was packed for another kind of plan");
  }
  if (weight.device != device_of(state)) {
    return argument_error(op, "weight", "is on another device than the plan's");
  }
  for (int i = 0; i < weight.num_parts; ++i) {
    if (weight.N != problem.N || weight.K != problem.K || weight.spec[i] != problem.spec[i]) {
      return argument_error(op, "weight",
                            "is [" + std::to_string(weight.N) + ", " + std::to_string(weight.K) +
                                "] at " + std::to_string(weight.spec[i].bits) +
                                " bits, the plan has [" + std::to_string(problem.N) + ", " +
                                std::to_string(problem.K) + "] at " +
                                std::to_string(problem.spec[i].bits));
    }
  }
  QMLP_TRY(check_matrix(op, "x", x, M, problem.K, problem.activation));
  QMLP_TRY(check_matrix(op, "out", out, M, problem.N, problem.activation));
  QMLP_TRY(check_bias(op, kind == plan::Op::swiglu ? "gate_bias" : "linear_bias", bias0,
                      problem.activation));
  QMLP_TRY(check_bias(op, "up_bias", bias1, problem.activation));
  if (residual.data != nullptr) {
    QMLP_TRY(check_matrix(op, "residual", residual, M, problem.N, problem.activation));
  }
  if (gate_tap.data != nullptr) {
    QMLP_TRY(check_matrix(op, "gate_tap", gate_tap, M, problem.N, problem.activation));
  }
  if (M == 0) return {};

  const ByteRange written = range_of(out);
  if (written.meets(range_of(x))) return argument_error(op, "out", "overlaps x");
  const bool in_place = residual.data == out.data && residual.row_stride == out.row_stride;
  if (!in_place && written.meets(range_of(residual))) {
    return argument_error(op, "out", "overlaps residual without being the same matrix");
  }
  const std::size_t bias_bytes = static_cast<std::size_t>(problem.N) * size_of(problem.activation);
  const auto bias_range = [bias_bytes](const std::byte* bias) {
    const auto begin = reinterpret_cast<std::uintptr_t>(bias);
    return bias == nullptr ? ByteRange{} : ByteRange{begin, begin + bias_bytes};
  };
  for (const std::byte* bias : {bias0, bias1}) {
    if (written.meets(bias_range(bias))) {
      return argument_error(op, "out", "overlaps a linear bias");
    }
  }
  const ByteRange tapped = range_of(gate_tap);
  if (tapped.meets(written) || tapped.meets(range_of(x))) {
    return argument_error(op, "gate_tap", "overlaps out or x");
  }
  for (const std::byte* bias : {bias0, bias1}) {
    if (tapped.meets(bias_range(bias))) {
      return argument_error(op, "gate_tap", "overlaps a linear bias");
    }
  }
  const std::size_t need = plan.workspace_bytes(M);
  if (workspace.bytes.size() < need) {
    return argument_error(
        op, "workspace",
        "has " + std::to_string(workspace.bytes.size()) + " bytes, needs " + std::to_string(need));
  }
  if (need != 0 &&
      reinterpret_cast<std::uintptr_t>(workspace.bytes.data()) % Workspace::kAlignment != 0) {
    return argument_error(op, "workspace", "is not aligned to 256 bytes");
  }
  const auto scratch = reinterpret_cast<std::uintptr_t>(workspace.bytes.data());
  const ByteRange borrowed{scratch, scratch + need};
  if (borrowed.meets(written) || borrowed.meets(range_of(x)) || borrowed.meets(tapped) ||
      borrowed.meets(range_of(residual)) || borrowed.meets(bias_range(bias0)) ||
      borrowed.meets(bias_range(bias1))) {
    return argument_error(op, "workspace", "overlaps an argument");
  }

  const plan::Kernel& kernel = state.kernel(M);
  if (kernel.run == nullptr) {
    return Error{Errc::unsupported,
                 std::string(op) + ": this build has no code for " + kernel.name};
  }
  const plan::OpCall call{state,  weight,         x,        out,     workspace,
                          stream, {bias0, bias1}, residual, gate_tap};
  if (const int code = kernel.run(kernel, call); code != 0) {
    const plan::Backend* backend = plan::backend(state.device.kind);
    const std::string words = backend->last_error == nullptr ? "" : backend->last_error();
    return Error{static_cast<Errc>(code),
                 std::string(kernel.name) + " failed" + (words.empty() ? "" : ": " + words)};
  }
  plan::count_dispatch(kernel);
  if (state.device.kind == DeviceKind::cpu) {
    testing::maybe_corrupt_output(
        kind == plan::Op::swiglu ? testing::FaultSite::swiglu : testing::FaultSite::linear, out);
  }
  return {};
}

Result<PackedWeightPtr> pack_parts(const Plan& plan, std::span<const QuantizedTensorView> sources,
                                   const Stream& stream) {
  const Plan::State& state = plan.state();
  const plan::Problem& problem = state.problem;
  QMLP_TRY(check_stream("pack", state, stream));
  if (static_cast<int>(sources.size()) != problem.num_weights()) {
    return argument_error("pack", "weights",
                          "are " + std::to_string(sources.size()) + ", the plan has " +
                              std::to_string(problem.num_weights()));
  }
  auto weight = std::make_shared<PackedWeight>();
  weight->device = device_of(state);
  weight->activation = problem.activation;
  weight->num_parts = problem.num_weights();
  weight->N = problem.N;
  weight->K = problem.K;
  for (int i = 0; i < weight->num_parts; ++i) {
    const QuantizedTensorView& source = sources[static_cast<std::size_t>(i)];
    QMLP_TRY(validate(source));
    if (source.N != problem.N || source.K != problem.K) {
      return argument_error("pack", i == 0 ? "weight" : "up",
                            "is [" + std::to_string(source.N) + ", " + std::to_string(source.K) +
                                "], the plan has [" + std::to_string(problem.N) + ", " +
                                std::to_string(problem.K) + "]");
    }
    if (source.spec != problem.spec[i]) {
      return argument_error("pack", i == 0 ? "weight" : "up",
                            "has " + std::to_string(source.spec.bits) + " bits, group " +
                                std::to_string(source.spec.group_size) + ", " +
                                to_string(source.spec.scale_dtype) + " scales; the plan has " +
                                std::to_string(problem.spec[i].bits) + ", " +
                                std::to_string(problem.spec[i].group_size) + ", " +
                                to_string(problem.spec[i].scale_dtype));
    }
    weight->spec[i] = source.spec;
  }
  QMLP_TRY(plan::backend(state.device.kind)->pack(sources, stream, *weight));
  return PackedWeightPtr(std::move(weight));
}

}  // namespace

Result<PackedWeightPtr> pack(const Plan& plan, const QuantizedTensorView& gate,
                             const QuantizedTensorView& up, const Stream& stream) {
  const QuantizedTensorView sources[] = {gate, up};
  return pack_parts(plan, sources, stream);
}

Result<PackedWeightPtr> pack(const Plan& plan, const QuantizedTensorView& weight,
                             const Stream& stream) {
  return pack_parts(plan, {&weight, 1}, stream);
}

Result<PackedWeightPtr> part(const PackedWeightPtr& packed, int index) {
  if (packed == nullptr || index < 0 || index >= packed->num_parts) {
    return Error{Errc::invalid_argument,
                 "part: index is " + std::to_string(index) + ", needs 0 to " +
                     std::to_string(packed == nullptr ? 0 : packed->num_parts - 1)};
  }
  if (packed->num_parts == 1) return packed;
  QMLP_ASSIGN(std::shared_ptr<const void> own,
              plan::backend(packed->device.kind)->part(*packed, index));
  auto half = std::make_shared<PackedWeight>(*packed);
  half->num_parts = 1;
  half->spec[0] = packed->spec[index];
  half->spec[1] = {};
  half->parts[0] = std::move(own);
  half->parts[1] = nullptr;
  return PackedWeightPtr(std::move(half));
}

PackedInfo packed_info(const PackedWeight& packed) noexcept {
  return plan::backend(packed.device.kind)->info(packed);
}

PackedShape packed_shape(const PackedWeight& packed) noexcept {
  return {
      packed.N, packed.K, packed.num_parts, {packed.spec[0], packed.spec[1]}, packed.activation};
}

Status decode_row(const PackedWeight& packed, std::int64_t row, MutableMatrixView out,
                  const Stream& stream) noexcept {
  if (packed.num_parts != 1) {
    return argument_error("decode_row", "weight", "has two parts, needs one: use part()");
  }
  if (row < 0 || row >= packed.N) {
    return argument_error(
        "decode_row", "row",
        "is " + std::to_string(row) + ", the weight has " + std::to_string(packed.N));
  }
  if (stream.handle != nullptr && stream.device != packed.device) {
    return argument_error("decode_row", "stream", "is of another device than the weight's");
  }
  QMLP_TRY(check_matrix("decode_row", "out", out, 1, packed.K, packed.activation));
  return plan::backend(packed.device.kind)->decode_row(packed, row, out.data, stream);
}

Status unpack_rows(const PackedWeight& packed, int part, std::int64_t row_begin,
                   std::int64_t row_count, std::span<std::byte> codes, std::span<std::byte> scales,
                   std::span<std::byte> biases) noexcept {
  constexpr std::string_view kOp = "unpack_rows";
  if (part < 0 || part >= packed.num_parts) {
    return argument_error(
        kOp, "part",
        "is " + std::to_string(part) + ", needs 0 to " + std::to_string(packed.num_parts - 1));
  }
  if (row_begin < 0 || row_count < 0 || row_count > packed.N - row_begin) {
    return argument_error(kOp, "rows",
                          "are " + std::to_string(row_count) + " from " +
                              std::to_string(row_begin) + ", the weight has " +
                              std::to_string(packed.N));
  }
  if (row_count == 0) return {};
  QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(row_count, packed.K, packed.spec[part]));
  const std::pair<const char*, std::pair<std::uint64_t, std::uint64_t>> spans[] = {
      {"codes", {codes.size(), sizes.codes_bytes}},
      {"scales", {scales.size(), sizes.scales_bytes}},
      {"biases", {biases.size(), sizes.scales_bytes}}};
  for (const auto& [name, bytes] : spans) {
    if (bytes.first != bytes.second) {
      return argument_error(
          kOp, name,
          "holds " + std::to_string(bytes.first) + " bytes, needs " + std::to_string(bytes.second));
    }
  }
  return plan::backend(packed.device.kind)
      ->unpack_rows(packed, part, row_begin, row_count, codes.data(), scales.data(), biases.data());
}

Status fused_swiglu(const Plan& plan, const PackedWeight& weight, const MatrixView& x,
                    const MutableMatrixView& out, const Workspace& workspace, const Stream& stream,
                    const SwigluEpilogue& epilogue) noexcept {
  return run_op("fused_swiglu", plan::Op::swiglu, plan, weight, x, out, workspace, stream,
                epilogue.gate_bias, epilogue.up_bias, {}, epilogue.gate_tap);
}

Status quantized_linear(const Plan& plan, const PackedWeight& weight, const MatrixView& x,
                        const MutableMatrixView& out, const Workspace& workspace,
                        const Stream& stream, const LinearEpilogue& epilogue) noexcept {
  return run_op("quantized_linear", plan::Op::linear, plan, weight, x, out, workspace, stream,
                epilogue.linear_bias, nullptr, epilogue.residual, {});
}

Status swiglu_activation(const MatrixView& gate, const MatrixView& up, const MutableMatrixView& out,
                         const Stream& stream) noexcept {
  constexpr std::string_view kOp = "swiglu_activation";
  const plan::Backend* backend = plan::backend(stream.device.kind);
  if (backend == nullptr) return argument_error(kOp, "stream", "is of a device without kernels");
  if (stream.handle == nullptr) return argument_error(kOp, "stream", "has no handle");
  QMLP_TRY(check_matrix(kOp, "gate", gate, out.rows, out.cols, out.dtype));
  QMLP_TRY(check_matrix(kOp, "up", up, out.rows, out.cols, out.dtype));
  QMLP_TRY(check_matrix(kOp, "out", out, out.rows, out.cols, out.dtype));
  const ByteRange written = range_of(out);
  for (const MatrixView* view : {&gate, &up}) {
    const bool in_place = view->data == out.data && view->row_stride == out.row_stride;
    if (!in_place && written.meets(range_of(*view))) {
      return argument_error(kOp, "out", "overlaps an input without being the same matrix");
    }
  }
  return backend->swiglu_activation(gate, up, out, stream);
}

namespace {

std::size_t hidden_bytes(const Plan& swiglu, std::int64_t M) noexcept {
  const plan::Problem& problem = swiglu.state().problem;
  return static_cast<std::size_t>(
      round_up(M * problem.N * static_cast<std::int64_t>(size_of(problem.activation)), 256));
}

}  // namespace

std::size_t mlp_workspace_bytes(const Plan& swiglu, const Plan& down, std::int64_t M) noexcept {
  return hidden_bytes(swiglu, M) + std::max(swiglu.workspace_bytes(M), down.workspace_bytes(M));
}

Status fused_mlp(const Plan& swiglu, const PackedWeight& gate_up, const Plan& down,
                 const PackedWeight& down_weight, const MatrixView& x, const MutableMatrixView& out,
                 const Workspace& workspace, const Stream& stream,
                 const SwigluEpilogue& swiglu_epilogue,
                 const LinearEpilogue& down_epilogue) noexcept {
  const plan::Problem& problem = swiglu.state().problem;
  if (x.rows < 0 || x.rows > problem.M) {
    return argument_error("fused_mlp", "x",
                          "has " + std::to_string(x.rows) + " rows, the plan takes 0 to " +
                              std::to_string(problem.M));
  }
  const std::size_t need = mlp_workspace_bytes(swiglu, down, x.rows);
  if (workspace.bytes.size() < need) {
    return argument_error(
        "fused_mlp", "workspace",
        "has " + std::to_string(workspace.bytes.size()) + " bytes, needs " + std::to_string(need));
  }
  const std::size_t used = hidden_bytes(swiglu, x.rows);
  const MutableMatrixView hidden{workspace.bytes.data(), x.rows,  problem.N, problem.N,
                                 problem.activation,     x.device};
  const Workspace rest{workspace.bytes.subspan(used)};
  QMLP_TRY(fused_swiglu(swiglu, gate_up, x, hidden, rest, stream, swiglu_epilogue));
  const MatrixView hidden_in{hidden.data,       hidden.rows,  hidden.cols,
                             hidden.row_stride, hidden.dtype, hidden.device};
  return quantized_linear(down, down_weight, hidden_in, out, rest, stream, down_epilogue);
}

}  // namespace qmlp
