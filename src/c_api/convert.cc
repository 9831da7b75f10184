#include "c_api/convert.h"

#include <algorithm>
#include <charconv>

#include "base/try.h"

namespace qmlp::c_api {
namespace {

Error enum_error(const char* name, std::int64_t value, const char* need) {
  return Error{Errc::invalid_argument,
               std::string(name) + " is " + std::to_string(value) + ", needs " + need};
}

std::span<const std::byte> bytes_of(const void* data, std::size_t size) noexcept {
  return {static_cast<const std::byte*>(data), size};
}

Result<DeviceFacts> limited(DeviceFacts facts, const char* force_isa) {
  if (force_isa == nullptr || *force_isa == '\0') return facts;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (std::string_view(force_isa) != to_string(isa)) continue;
    const bool usable =
        isa == Isa::portable || isa == facts.isa || (isa == Isa::avx2 && facts.isa == Isa::avx512);
    if (facts.kind != DeviceKind::cpu || !usable) {
      return Error{Errc::unsupported, std::string("force_isa: ") + force_isa +
                                          " is not on this device, which has " +
                                          to_string(facts.isa)};
    }
    facts.isa = isa;
    return facts;
  }
  return Error{Errc::invalid_argument, std::string("force_isa is '") + force_isa +
                                           "', needs portable, avx2, avx512 or neon"};
}

Result<int> cuda_ordinal(std::string_view text) {
  int ordinal = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), ordinal);
  if (error != std::errc{} || end != text.data() + text.size() || ordinal < 0) {
    return Error{Errc::invalid_argument,
                 "device is 'cuda:" + std::string(text) + "', needs cuda:N with N from 0 up"};
  }
  return ordinal;
}

}  // namespace

Result<DType> to_dtype(const char* name, qmlp_dtype dtype) {
  switch (dtype) {
    case QMLP_F32:
      return DType::f32;
    case QMLP_F16:
      return DType::f16;
    case QMLP_BF16:
      return DType::bf16;
    default:
      return enum_error(name, dtype, "QMLP_F32, QMLP_F16 or QMLP_BF16");
  }
}

Result<Precision> to_precision(qmlp_precision precision) {
  if (precision == QMLP_PRECISION_MATCH) return Precision::match;
  if (precision == QMLP_PRECISION_WIDE) return Precision::wide;
  return enum_error("precision", precision, "QMLP_PRECISION_MATCH or QMLP_PRECISION_WIDE");
}

Result<std::optional<Accumulation>> to_accumulation(qmlp_accumulation accumulation) {
  switch (accumulation) {
    case QMLP_ACCUMULATION_DEFAULT:
      return std::optional<Accumulation>();
    case QMLP_ACCUMULATION_F32:
      return std::optional(Accumulation::f32);
    case QMLP_ACCUMULATION_TENSOR:
      return std::optional(Accumulation::tensor);
    default:
      return enum_error("accumulation", accumulation, "one of QMLP_ACCUMULATION_...");
  }
}

Result<QuantSpec> to_spec(const char* name, const qmlp_quant_spec& spec) {
  QMLP_ASSIGN(const DType dtype,
              to_dtype((std::string(name) + ".scale_dtype").c_str(), spec.scale_dtype));
  return QuantSpec{spec.bits, spec.group_size, dtype};
}

Result<QuantizedTensorView> to_view(const char* name, const qmlp_tensor& tensor) {
  QMLP_ASSIGN(const QuantSpec spec, to_spec(name, tensor.spec));
  const std::pair<const void*, std::size_t> parts[] = {{tensor.codes, tensor.codes_bytes},
                                                       {tensor.scales, tensor.scales_bytes},
                                                       {tensor.biases, tensor.biases_bytes}};
  for (const auto& [data, bytes] : parts) {
    if (data == nullptr && bytes != 0) {
      return Error{Errc::invalid_argument,
                   std::string(name) + ": a part of " + std::to_string(bytes) + " bytes is null"};
    }
  }
  return QuantizedTensorView{bytes_of(tensor.codes, tensor.codes_bytes),
                             bytes_of(tensor.scales, tensor.scales_bytes),
                             bytes_of(tensor.biases, tensor.biases_bytes),
                             tensor.N,
                             tensor.K,
                             spec};
}

Result<MatrixView> to_view(const char* name, const qmlp_matrix& matrix, Device device) {
  QMLP_ASSIGN(const DType dtype, to_dtype((std::string(name) + ".dtype").c_str(), matrix.dtype));
  return MatrixView{static_cast<const std::byte*>(matrix.data),
                    matrix.rows,
                    matrix.cols,
                    matrix.row_stride,
                    dtype,
                    device};
}

Result<MutableMatrixView> to_view(const char* name, const qmlp_mutable_matrix& matrix,
                                  Device device) {
  QMLP_ASSIGN(const DType dtype, to_dtype((std::string(name) + ".dtype").c_str(), matrix.dtype));
  return MutableMatrixView{static_cast<std::byte*>(matrix.data),
                           matrix.rows,
                           matrix.cols,
                           matrix.row_stride,
                           dtype,
                           device};
}

Result<DeviceFacts> to_facts(const char* device, const char* force_isa) {
  const std::string_view name = device == nullptr ? "cpu" : device;
  if (name == "cpu" || name.empty()) return limited(host_facts(), force_isa);
  if (name == "cuda" || name.substr(0, 5) == "cuda:") {
    int ordinal = 0;
    if (name != "cuda") {
      QMLP_ASSIGN(ordinal, cuda_ordinal(name.substr(5)));
    }
    QMLP_ASSIGN(DeviceFacts facts, cuda_facts(ordinal));
    return limited(facts, force_isa);
  }
  auto facts = machine_facts(name);
  if (!facts) {
    return Error{facts.error().code, "device is '" + std::string(name) +
                                         "', needs cpu, cuda, cuda:N or a machine: portable, "
                                         "avx2, avx512, a100, h200"};
  }
  return limited(*facts, force_isa);
}

Result<LinearProblem> to_problem(const qmlp_linear_problem* problem) {
  const qmlp_linear_problem defaults = QMLP_LINEAR_PROBLEM_INIT;
  QMLP_ASSIGN(const qmlp_linear_problem from,
              read_versioned("qmlp_linear_problem", problem, defaults, sizeof(defaults)));
  LinearProblem to;
  to.M_max = from.M_max;
  to.N = from.N;
  to.K = from.K;
  QMLP_ASSIGN(to.weight, to_spec("weight", from.weight));
  QMLP_ASSIGN(to.activation, to_dtype("activation", from.activation));
  QMLP_ASSIGN(to.accumulation, to_accumulation(from.accumulation));
  to.segments = from.segments;
  return to;
}

Result<SwigluProblem> to_problem(const qmlp_swiglu_problem* problem) {
  const qmlp_swiglu_problem defaults = QMLP_SWIGLU_PROBLEM_INIT;
  QMLP_ASSIGN(const qmlp_swiglu_problem from,
              read_versioned("qmlp_swiglu_problem", problem, defaults, sizeof(defaults)));
  SwigluProblem to;
  to.M_max = from.M_max;
  to.hidden = from.hidden;
  to.intermediate = from.intermediate;
  QMLP_ASSIGN(to.gate, to_spec("gate", from.gate));
  QMLP_ASSIGN(to.up, to_spec("up", from.up));
  QMLP_ASSIGN(to.activation, to_dtype("activation", from.activation));
  QMLP_ASSIGN(to.precision, to_precision(from.precision));
  QMLP_ASSIGN(to.accumulation, to_accumulation(from.accumulation));
  to.segments = from.segments;
  return to;
}

Result<Stream> to_stream(const qmlp_stream* stream, CudaStream& storage) {
  if (stream == nullptr) {
    return Error{Errc::invalid_argument, "stream is null, needs a value"};
  }
  if (stream->device_kind == QMLP_CPU) {
    if (stream->handle == nullptr) {
      return Error{Errc::invalid_argument, "stream: handle is null, needs a qmlp_pool"};
    }
    return cpu_stream(*static_cast<const qmlp_pool*>(stream->handle)->pool);
  }
  if (stream->device_kind == QMLP_CUDA) {
    storage.cuda_stream = stream->handle;
    return stream_of(storage, stream->device_ordinal);
  }
  if (stream->device_kind == QMLP_CUDA_RECORDER) {
    auto* recorder = static_cast<qmlp_cuda_recorder*>(stream->handle);
    if (recorder == nullptr) {
      return Error{Errc::invalid_argument, "stream: handle is null, needs a qmlp_cuda_recorder"};
    }
    if (recorder->launch == nullptr) {
      return Error{Errc::invalid_argument,
                   "stream: the recorder's launch is null, needs a function"};
    }
    storage.record_context = recorder;
    storage.record = [](void* context, const CudaLaunch& launch) {
      const auto* to = static_cast<const qmlp_cuda_recorder*>(context);
      qmlp_cuda_launch given = {};
      given.function = launch.function;
      std::copy_n(launch.grid, 3, given.grid);
      std::copy_n(launch.block, 3, given.block);
      given.shared_bytes = launch.shared_bytes;
      given.params = launch.params;
      return to->launch(to->context, &given) == QMLP_OK;
    };
    return stream_of(storage, stream->device_ordinal);
  }
  return enum_error("stream.device_kind", stream->device_kind,
                    "QMLP_CPU, QMLP_CUDA or QMLP_CUDA_RECORDER");
}

}  // namespace qmlp::c_api
