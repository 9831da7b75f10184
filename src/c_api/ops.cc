#include "base/try.h"
#include "c_api/convert.h"
#include "c_api/guard.h"
#include "c_api/handles.h"

namespace qmlp::c_api {
namespace {

// The arguments that every op has, as C++ values.
struct Call {
  MatrixView x;
  MutableMatrixView out;
  Workspace workspace;
  CudaStream cuda;
  Stream stream;
};

Status read_call(const char* function, const qmlp_matrix* x, const qmlp_mutable_matrix* out,
                 const qmlp_workspace* workspace, const qmlp_stream* stream, Call& call) {
  QMLP_NOT_NULL(function, x);
  QMLP_NOT_NULL(function, out);
  QMLP_NOT_NULL(function, workspace);
  QMLP_ASSIGN(call.stream, to_stream(stream, call.cuda));
  QMLP_ASSIGN(call.x, to_view("x", *x, call.stream.device));
  QMLP_ASSIGN(call.out, to_view("out", *out, call.stream.device));
  const std::size_t bytes = workspace->data == nullptr ? 0 : workspace->bytes;
  call.workspace = {{static_cast<std::byte*>(workspace->data), bytes}};
  return {};
}

Result<SwigluEpilogue> read_epilogue(const qmlp_swiglu_epilogue* epilogue, Device device) {
  const qmlp_swiglu_epilogue defaults = QMLP_SWIGLU_EPILOGUE_INIT;
  QMLP_ASSIGN(const qmlp_swiglu_epilogue from,
              read_versioned("qmlp_swiglu_epilogue", epilogue, defaults, sizeof(defaults)));
  SwigluEpilogue to;
  to.gate_bias = static_cast<const std::byte*>(from.gate_bias);
  to.up_bias = static_cast<const std::byte*>(from.up_bias);
  if (from.gate_tap.data != nullptr) {
    QMLP_ASSIGN(to.gate_tap, to_view("gate_tap", from.gate_tap, device));
  }
  return to;
}

Result<LinearEpilogue> read_epilogue(const qmlp_linear_epilogue* epilogue, Device device) {
  const qmlp_linear_epilogue defaults = QMLP_LINEAR_EPILOGUE_INIT;
  QMLP_ASSIGN(const qmlp_linear_epilogue from,
              read_versioned("qmlp_linear_epilogue", epilogue, defaults, sizeof(defaults)));
  LinearEpilogue to;
  to.linear_bias = static_cast<const std::byte*>(from.linear_bias);
  if (from.residual.data != nullptr) {
    QMLP_ASSIGN(to.residual, to_view("residual", from.residual, device));
  }
  return to;
}

// An op of one weight.
template <class Op, class Epilogue>
qmlp_status run(const char* function, Op op, const qmlp_plan* plan, const qmlp_weight* weight,
                const qmlp_matrix* x, const qmlp_mutable_matrix* out,
                const qmlp_workspace* workspace, const qmlp_stream* stream,
                const Epilogue* epilogue) {
  return guarded([&]() -> Status {
    QMLP_NOT_NULL(function, plan);
    QMLP_NOT_NULL(function, weight);
    Call call;
    QMLP_TRY(read_call(function, x, out, workspace, stream, call));
    QMLP_ASSIGN(const auto after, read_epilogue(epilogue, call.stream.device));
    return op(plan->plan, *weight->weight, call.x, call.out, call.workspace, call.stream, after);
  });
}

}  // namespace
}  // namespace qmlp::c_api

using qmlp::c_api::guarded;

extern "C" {

qmlp_status qmlp_quant_sizes(int64_t N, int64_t K, const qmlp_quant_spec* spec, size_t* codes_bytes,
                             size_t* scales_bytes) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_quant_sizes", spec);
    QMLP_NOT_NULL("qmlp_quant_sizes", codes_bytes);
    QMLP_NOT_NULL("qmlp_quant_sizes", scales_bytes);
    QMLP_ASSIGN(const qmlp::QuantSpec to, qmlp::c_api::to_spec("spec", *spec));
    QMLP_ASSIGN(const qmlp::QuantSizes sizes, qmlp::quant_sizes(N, K, to));
    *codes_bytes = sizes.codes_bytes;
    *scales_bytes = sizes.scales_bytes;
    return {};
  });
}

qmlp_status qmlp_quantize(const float* weights, int64_t N, int64_t K, const qmlp_quant_spec* spec,
                          void* codes, void* scales, void* biases) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_quantize";
    QMLP_NOT_NULL(kName, spec);
    QMLP_ASSIGN(const qmlp::QuantSpec to, qmlp::c_api::to_spec("spec", *spec));
    QMLP_TRY(qmlp::quant_sizes(N, K, to));  // N * K cannot overflow from here on
    if (N != 0 && K != 0) {
      QMLP_NOT_NULL(kName, weights);
      QMLP_NOT_NULL(kName, codes);
      QMLP_NOT_NULL(kName, scales);
      QMLP_NOT_NULL(kName, biases);
    }
    const auto count = static_cast<std::size_t>(N) * static_cast<std::size_t>(K);
    QMLP_ASSIGN(const qmlp::QuantizedTensor made, qmlp::quantize({weights, count}, N, K, to));
    const auto store = [](const std::vector<std::byte>& from, void* into) {
      if (!from.empty()) std::memcpy(into, from.data(), from.size());
    };
    store(made.codes, codes);
    store(made.scales, scales);
    store(made.biases, biases);
    return {};
  });
}

qmlp_status qmlp_dequantize(const qmlp_tensor* weight, int64_t row_begin, int64_t row_end,
                            qmlp_dtype round_to, float* out) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_dequantize";
    QMLP_NOT_NULL(kName, weight);
    QMLP_ASSIGN(const qmlp::QuantizedTensorView view, qmlp::c_api::to_view("weight", *weight));
    QMLP_ASSIGN(const qmlp::DType dtype, qmlp::c_api::to_dtype("round_to", round_to));
    QMLP_TRY(validate(view));
    if (row_begin < 0 || row_end < row_begin || row_end > view.N) {
      return qmlp::Error{qmlp::Errc::invalid_argument,
                         std::string(kName) + ": rows are [" + std::to_string(row_begin) + ", " +
                             std::to_string(row_end) + "), the weight has " +
                             std::to_string(view.N)};
    }
    const auto count =
        static_cast<std::size_t>(row_end - row_begin) * static_cast<std::size_t>(view.K);
    if (count != 0) QMLP_NOT_NULL(kName, out);
    return qmlp::dequantize(view, row_begin, row_end, dtype, {out, count});
  });
}

qmlp_status qmlp_pack_linear(const qmlp_plan* plan, const qmlp_tensor* weight,
                             const qmlp_stream* stream, qmlp_weight** out) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_pack_linear";
    QMLP_NOT_NULL(kName, plan);
    QMLP_NOT_NULL(kName, weight);
    QMLP_NOT_NULL(kName, out);
    qmlp::CudaStream cuda;
    QMLP_ASSIGN(const qmlp::Stream to, qmlp::c_api::to_stream(stream, cuda));
    QMLP_ASSIGN(const qmlp::QuantizedTensorView view, qmlp::c_api::to_view("weight", *weight));
    QMLP_ASSIGN(qmlp::PackedWeightPtr packed, pack(plan->plan, view, to));
    *out = new qmlp_weight{std::move(packed)};
    return {};
  });
}

qmlp_status qmlp_pack_swiglu(const qmlp_plan* plan, const qmlp_tensor* gate, const qmlp_tensor* up,
                             const qmlp_stream* stream, qmlp_weight** out) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_pack_swiglu";
    QMLP_NOT_NULL(kName, plan);
    QMLP_NOT_NULL(kName, gate);
    QMLP_NOT_NULL(kName, up);
    QMLP_NOT_NULL(kName, out);
    qmlp::CudaStream cuda;
    QMLP_ASSIGN(const qmlp::Stream to, qmlp::c_api::to_stream(stream, cuda));
    QMLP_ASSIGN(const qmlp::QuantizedTensorView gate_view, qmlp::c_api::to_view("gate", *gate));
    QMLP_ASSIGN(const qmlp::QuantizedTensorView up_view, qmlp::c_api::to_view("up", *up));
    QMLP_ASSIGN(qmlp::PackedWeightPtr packed, pack(plan->plan, gate_view, up_view, to));
    *out = new qmlp_weight{std::move(packed)};
    return {};
  });
}

qmlp_status qmlp_weight_part(const qmlp_weight* weight, int32_t index, qmlp_weight** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_weight_part", weight);
    QMLP_NOT_NULL("qmlp_weight_part", out);
    QMLP_ASSIGN(qmlp::PackedWeightPtr half, qmlp::part(weight->weight, index));
    *out = new qmlp_weight{std::move(half)};
    return {};
  });
}
void qmlp_weight_free(qmlp_weight* weight) { delete weight; }
size_t qmlp_weight_bytes(const qmlp_weight* weight) {
  return weight == nullptr ? 0 : qmlp::packed_info(*weight->weight).bytes;
}
int32_t qmlp_weight_non_finite(const qmlp_weight* weight) {
  return weight != nullptr && qmlp::packed_info(*weight->weight).non_finite ? 1 : 0;
}
int64_t qmlp_weight_exact_blocks(const qmlp_weight* weight) {
  return weight == nullptr ? 0 : qmlp::packed_info(*weight->weight).exact_blocks;
}
qmlp_status qmlp_weight_unpack_rows(const qmlp_weight* weight, int32_t part, int64_t row_begin,
                                    int64_t row_count, void* codes, void* scales, void* biases) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_weight_unpack_rows";
    QMLP_NOT_NULL(kName, weight);
    const qmlp::PackedShape shape = qmlp::packed_shape(*weight->weight);
    if (part < 0 || part >= shape.num_parts) {  // refused there
      return qmlp::unpack_rows(*weight->weight, part, 0, 0, {}, {}, {});
    }
    if (row_count <= 0 || row_count > shape.N) {
      if (row_count == 0) return {};
      return qmlp::Error{qmlp::Errc::invalid_argument,
                         std::string(kName) + ": row_count is " + std::to_string(row_count) +
                             ", the weight has " + std::to_string(shape.N)};
    }
    QMLP_ASSIGN(const qmlp::QuantSizes sizes,
                qmlp::quant_sizes(row_count, shape.K, shape.spec[part]));
    QMLP_NOT_NULL(kName, codes);
    if (sizes.scales_bytes != 0) {
      QMLP_NOT_NULL(kName, scales);
      QMLP_NOT_NULL(kName, biases);
    }
    return qmlp::unpack_rows(*weight->weight, part, row_begin, row_count,
                             {static_cast<std::byte*>(codes), sizes.codes_bytes},
                             {static_cast<std::byte*>(scales), sizes.scales_bytes},
                             {static_cast<std::byte*>(biases), sizes.scales_bytes});
  });
}
qmlp_status qmlp_weight_decode_row(const qmlp_weight* weight, int64_t row,
                                   const qmlp_mutable_matrix* out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_weight_decode_row", weight);
    QMLP_NOT_NULL("qmlp_weight_decode_row", out);
    QMLP_ASSIGN(const qmlp::MutableMatrixView view, qmlp::c_api::to_view("out", *out, {}));
    return qmlp::decode_row(*weight->weight, row, view);
  });
}

qmlp_status qmlp_quantized_linear(const qmlp_plan* plan, const qmlp_weight* weight,
                                  const qmlp_matrix* x, const qmlp_mutable_matrix* out,
                                  const qmlp_workspace* workspace, const qmlp_stream* stream,
                                  const qmlp_linear_epilogue* epilogue) {
  return qmlp::c_api::run("qmlp_quantized_linear", qmlp::quantized_linear, plan, weight, x, out,
                          workspace, stream, epilogue);
}

qmlp_status qmlp_fused_swiglu(const qmlp_plan* plan, const qmlp_weight* weight,
                              const qmlp_matrix* x, const qmlp_mutable_matrix* out,
                              const qmlp_workspace* workspace, const qmlp_stream* stream,
                              const qmlp_swiglu_epilogue* epilogue) {
  return qmlp::c_api::run("qmlp_fused_swiglu", qmlp::fused_swiglu, plan, weight, x, out, workspace,
                          stream, epilogue);
}

qmlp_status qmlp_fused_mlp(const qmlp_plan* swiglu, const qmlp_weight* gate_up,
                           const qmlp_plan* down, const qmlp_weight* down_weight,
                           const qmlp_matrix* x, const qmlp_mutable_matrix* out,
                           const qmlp_workspace* workspace, const qmlp_stream* stream,
                           const qmlp_swiglu_epilogue* swiglu_epilogue,
                           const qmlp_linear_epilogue* down_epilogue) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_fused_mlp";
    QMLP_NOT_NULL(kName, swiglu);
    QMLP_NOT_NULL(kName, gate_up);
    QMLP_NOT_NULL(kName, down);
    QMLP_NOT_NULL(kName, down_weight);
    qmlp::c_api::Call call;
    QMLP_TRY(qmlp::c_api::read_call(kName, x, out, workspace, stream, call));
    QMLP_ASSIGN(const qmlp::SwigluEpilogue first,
                qmlp::c_api::read_epilogue(swiglu_epilogue, call.stream.device));
    QMLP_ASSIGN(const qmlp::LinearEpilogue second,
                qmlp::c_api::read_epilogue(down_epilogue, call.stream.device));
    return qmlp::fused_mlp(swiglu->plan, *gate_up->weight, down->plan, *down_weight->weight, call.x,
                           call.out, call.workspace, call.stream, first, second);
  });
}

size_t qmlp_mlp_workspace_bytes(const qmlp_plan* swiglu, const qmlp_plan* down, int64_t M) {
  if (swiglu == nullptr || down == nullptr || M < 0) return 0;
  return qmlp::mlp_workspace_bytes(swiglu->plan, down->plan, M);
}

}  // extern "C"
