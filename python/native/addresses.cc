// What works on addresses: packing, unpacking, and the ops on CUDA devices. The array libraries
// know their tensors' memory, strides and streams; the Python files ask them and keep the arrays
// alive for the call. Integers cross the border faster than DLPack capsules, and no library adds an
// event.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>

#include "handles.h"
#include "qmlp/c_api.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qmlp_python {
namespace {

using Address = std::uintptr_t;

void* at(Address address) { return reinterpret_cast<void*>(address); }

// address and bytes of codes, scales and biases; N, K; the format
using TensorTuple = std::tuple<Address, std::size_t, Address, std::size_t, Address, std::size_t>;
qmlp_tensor tensor_of(const TensorTuple& from, std::int64_t N, std::int64_t K,
                      const SpecTuple& spec) {
  qmlp_tensor tensor = {};
  tensor.codes = at(std::get<0>(from));
  tensor.codes_bytes = std::get<1>(from);
  tensor.scales = at(std::get<2>(from));
  tensor.scales_bytes = std::get<3>(from);
  tensor.biases = at(std::get<4>(from));
  tensor.biases_bytes = std::get<5>(from);
  tensor.N = N;
  tensor.K = K;
  tensor.spec = spec_of(spec);
  return tensor;
}

// kind, ordinal, stream. A CPU's stream is the pool of the process.
using DeviceTuple = std::tuple<int, int, Address>;
class PackStream {
 public:
  explicit PackStream(const DeviceTuple& device) {
    if (std::get<0>(device) == QMLP_CPU) {
      pool_.emplace(runtime());
      if (pool_->pool() == nullptr) throw_last_error(QMLP_DEVICE);
      stream_ = {QMLP_CPU, 0, pool_->pool()};
    } else {
      stream_ = {QMLP_CUDA, std::get<1>(device), at(std::get<2>(device))};
    }
  }
  const qmlp_stream* get() const noexcept { return &stream_; }

 private:
  std::optional<PoolHold> pool_;
  qmlp_stream stream_ = {};
};

WeightHandle owned(qmlp_weight* packed) {
  return WeightHandle{std::unique_ptr<qmlp_weight, WeightDeleter>(packed)};
}

}  // namespace

void bind_addresses(nb::module_& m) {
  m.def(
      "pack_linear",
      [](const PlanHandle& plan, const DeviceTuple& device, const TensorTuple& weight,
         std::int64_t N, std::int64_t K, const SpecTuple& spec) {
        const PackStream stream(device);
        const qmlp_tensor from = tensor_of(weight, N, K, spec);
        qmlp_weight* packed = nullptr;
        check(without_gil(
            [&] { return qmlp_pack_linear(plan.plan.get(), &from, stream.get(), &packed); }));
        return owned(packed);
      },
      "plan"_a, "device"_a, "weight"_a, "N"_a, "K"_a, "spec"_a);
  m.def(
      "pack_swiglu",
      [](const PlanHandle& plan, const DeviceTuple& device, const TensorTuple& gate,
         const SpecTuple& gate_spec, const TensorTuple& up, const SpecTuple& up_spec,
         std::int64_t N, std::int64_t K) {
        const PackStream stream(device);
        const qmlp_tensor from_gate = tensor_of(gate, N, K, gate_spec);
        const qmlp_tensor from_up = tensor_of(up, N, K, up_spec);
        qmlp_weight* packed = nullptr;
        check(without_gil([&] {
          return qmlp_pack_swiglu(plan.plan.get(), &from_gate, &from_up, stream.get(), &packed);
        }));
        return owned(packed);
      },
      "plan"_a, "device"_a, "gate"_a, "gate_spec"_a, "up"_a, "up_spec"_a, "N"_a, "K"_a);
  m.def(
      "unpack_rows",
      [](const WeightHandle& weight, int part, std::int64_t row_begin, std::int64_t row_count,
         Address codes, Address scales, Address biases) {
        check(without_gil([&] {
          return qmlp_weight_unpack_rows(weight.weight.get(), part, row_begin, row_count, at(codes),
                                         at(scales), at(biases));
        }));
      },
      "weight"_a, "part"_a, "row_begin"_a, "row_count"_a, "codes"_a, "scales"_a, "biases"_a);

  // The ops on a CUDA device, asynchronous on `stream`. An address of 0 is no array. The library
  // checks alignment, overlap and the workspace's size.
  m.def(
      "cuda_linear",
      [](const PlanHandle& plan, const WeightHandle& weight, int ordinal, Address stream, int dtype,
         std::int64_t M, std::int64_t N, std::int64_t K, Address x, std::int64_t x_stride,
         Address out, std::int64_t out_stride, Address linear_bias, Address residual,
         std::int64_t residual_stride, Address workspace, std::size_t workspace_bytes) {
        const qmlp_matrix from = {at(x), M, K, x_stride, dtype};
        const qmlp_mutable_matrix to = {at(out), M, N, out_stride, dtype};
        qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
        epilogue.linear_bias = at(linear_bias);
        epilogue.residual = {at(residual), M, N, residual_stride, dtype};
        const qmlp_workspace scratch = {at(workspace), workspace_bytes};
        const qmlp_stream on = {QMLP_CUDA, ordinal, at(stream)};
        check(without_gil([&] {
          return qmlp_quantized_linear(plan.plan.get(), weight.weight.get(), &from, &to, &scratch,
                                       &on, &epilogue);
        }));
      },
      "plan"_a, "weight"_a, "ordinal"_a, "stream"_a, "dtype"_a, "M"_a, "N"_a, "K"_a, "x"_a,
      "x_stride"_a, "out"_a, "out_stride"_a, "linear_bias"_a, "residual"_a, "residual_stride"_a,
      "workspace"_a, "workspace_bytes"_a);
  m.def(
      "cuda_swiglu",
      [](const PlanHandle& plan, const WeightHandle& weight, int ordinal, Address stream, int dtype,
         std::int64_t M, std::int64_t N, std::int64_t K, Address x, std::int64_t x_stride,
         Address out, std::int64_t out_stride, Address gate_bias, Address up_bias, Address gate_tap,
         std::int64_t tap_stride, Address workspace, std::size_t workspace_bytes) {
        const qmlp_matrix from = {at(x), M, K, x_stride, dtype};
        const qmlp_mutable_matrix to = {at(out), M, N, out_stride, dtype};
        qmlp_swiglu_epilogue epilogue = QMLP_SWIGLU_EPILOGUE_INIT;
        epilogue.gate_bias = at(gate_bias);
        epilogue.up_bias = at(up_bias);
        epilogue.gate_tap = {at(gate_tap), M, N, tap_stride, dtype};
        const qmlp_workspace scratch = {at(workspace), workspace_bytes};
        const qmlp_stream on = {QMLP_CUDA, ordinal, at(stream)};
        check(without_gil([&] {
          return qmlp_fused_swiglu(plan.plan.get(), weight.weight.get(), &from, &to, &scratch, &on,
                                   &epilogue);
        }));
      },
      "plan"_a, "weight"_a, "ordinal"_a, "stream"_a, "dtype"_a, "M"_a, "N"_a, "K"_a, "x"_a,
      "x_stride"_a, "out"_a, "out_stride"_a, "gate_bias"_a, "up_bias"_a, "gate_tap"_a,
      "tap_stride"_a, "workspace"_a, "workspace_bytes"_a);
  m.def(
      "cuda_mlp",
      [](const PlanHandle& swiglu, const WeightHandle& gate_up, const PlanHandle& down,
         const WeightHandle& down_weight, int ordinal, Address stream, int dtype, std::int64_t M,
         std::int64_t N, std::int64_t K, Address x, std::int64_t x_stride, Address out,
         std::int64_t out_stride, Address gate_bias, Address up_bias, Address down_bias,
         Address residual, std::int64_t residual_stride, Address workspace,
         std::size_t workspace_bytes) {
        const qmlp_matrix from = {at(x), M, K, x_stride, dtype};
        const qmlp_mutable_matrix to = {at(out), M, N, out_stride, dtype};
        qmlp_swiglu_epilogue first = QMLP_SWIGLU_EPILOGUE_INIT;
        first.gate_bias = at(gate_bias);
        first.up_bias = at(up_bias);
        qmlp_linear_epilogue second = QMLP_LINEAR_EPILOGUE_INIT;
        second.linear_bias = at(down_bias);
        second.residual = {at(residual), M, N, residual_stride, dtype};
        const qmlp_workspace scratch = {at(workspace), workspace_bytes};
        const qmlp_stream on = {QMLP_CUDA, ordinal, at(stream)};
        check(without_gil([&] {
          return qmlp_fused_mlp(swiglu.plan.get(), gate_up.weight.get(), down.plan.get(),
                                down_weight.weight.get(), &from, &to, &scratch, &on, &first,
                                &second);
        }));
      },
      "swiglu"_a, "gate_up"_a, "down"_a, "down_weight"_a, "ordinal"_a, "stream"_a, "dtype"_a, "M"_a,
      "N"_a, "K"_a, "x"_a, "x_stride"_a, "out"_a, "out_stride"_a, "gate_bias"_a, "up_bias"_a,
      "down_bias"_a, "residual"_a, "residual_stride"_a, "workspace"_a, "workspace_bytes"_a);
}

}  // namespace qmlp_python
