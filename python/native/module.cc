// qmlp._native: the C interface for Python. The Python files of the package decide about array
// types, defaults and documentation; here are handles, borrowed memory, and calls without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "errors.h"
#include "handles.h"
#include "qmlp/c_api.h"
#include "runtime.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qmlp_python {
namespace {

using Array = nb::ndarray<nb::ro>;
using MutableArray = nb::ndarray<>;

// Raised when an array's strides do not make a matrix; the caller copies and tries again. Says
// which array it is.
class NeedsCopy : public std::exception {
 public:
  explicit NeedsCopy(const char* name) noexcept : name_(name) {}
  const char* what() const noexcept override { return name_; }

 private:
  const char* name_;
};

// The matrix that an array of any rank is when its leading axes are one: [..., cols].
struct Matrix {
  char* data = nullptr;
  std::int64_t rows = 1;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
};

template <class AnyArray>
Matrix matrix_of(const char* name, const AnyArray& array) {
  if (array.ndim() == 0) refuse(std::string(name) + " has no axes, needs one or more");
  Matrix matrix;
  matrix.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(array.data())));
  const std::size_t last = array.ndim() - 1;
  matrix.cols = static_cast<std::int64_t>(array.shape(last));
  for (std::size_t i = 0; i < last; ++i) {
    matrix.rows *= static_cast<std::int64_t>(array.shape(i));
  }
  matrix.row_stride = matrix.cols;
  if (matrix.rows == 0 || matrix.cols == 0) return matrix;
  if (matrix.cols > 1 && array.stride(last) != 1) throw NeedsCopy(name);
  // Axes of length 1 may have any stride.
  std::int64_t expected = 0;
  for (std::size_t i = last; i-- > 0;) {
    if (array.shape(i) == 1) continue;
    const std::int64_t stride = array.stride(i);
    if (expected == 0) {
      if (stride < matrix.cols) throw NeedsCopy(name);
      matrix.row_stride = stride;
    } else if (stride != expected) {
      throw NeedsCopy(name);
    }
    expected = stride * static_cast<std::int64_t>(array.shape(i));
  }
  return matrix;
}

template <class AnyArray>
std::pair<const void*, std::size_t> contiguous_bytes(const char* name, const AnyArray& array) {
  std::int64_t expected = 1;
  for (std::size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected && array.size() != 0) {
      throw NeedsCopy(name);
    }
    expected *= static_cast<std::int64_t>(array.shape(i));
  }
  return {array.data(), array.nbytes()};
}

qmlp_tensor tensor_of(const Array& codes, const std::optional<Array>& scales,
                      const std::optional<Array>& biases, std::int64_t N, std::int64_t K,
                      const SpecTuple& spec) {
  qmlp_tensor tensor = {};
  std::tie(tensor.codes, tensor.codes_bytes) = contiguous_bytes("codes", codes);
  if (scales) std::tie(tensor.scales, tensor.scales_bytes) = contiguous_bytes("scales", *scales);
  if (biases) std::tie(tensor.biases, tensor.biases_bytes) = contiguous_bytes("biases", *biases);
  tensor.N = N;
  tensor.K = K;
  tensor.spec = spec_of(spec);
  return tensor;
}

// The pool of the process for one call.
class CallStream {
 public:
  CallStream() : pool_(runtime()) {
    if (pool_.pool() == nullptr) throw_last_error(QMLP_DEVICE);
    stream_ = {QMLP_CPU, 0, pool_.pool()};
  }
  const qmlp_stream* get() const noexcept { return &stream_; }

 private:
  PoolHold pool_;
  qmlp_stream stream_ = {};
};

qmlp_workspace workspace_of(std::size_t bytes) {
  if (bytes == 0) return {nullptr, 0};
  void* data = runtime().scratch(bytes);
  if (data == nullptr) {
    throw CallError{QMLP_OUT_OF_MEMORY,
                    "out of memory: a workspace of " + std::to_string(bytes) + " bytes"};
  }
  return {data, bytes};
}

qmlp_matrix view_of(const char* name, const Array& array, int dtype) {
  const Matrix m = matrix_of(name, array);
  return {m.data, m.rows, m.cols, m.row_stride, dtype};
}
qmlp_mutable_matrix view_of(const char* name, const MutableArray& array, int dtype) {
  const Matrix m = matrix_of(name, array);
  return {m.data, m.rows, m.cols, m.row_stride, dtype};
}
const void* bias_of(const char* name, const std::optional<Array>& bias, std::int64_t N) {
  if (!bias) return nullptr;
  const auto [data, bytes] = contiguous_bytes(name, *bias);
  if (bias->ndim() != 1 || static_cast<std::int64_t>(bias->shape(0)) != N) {
    refuse(std::string(name) + " has " + std::to_string(bias->size()) + " values in " +
           std::to_string(bias->ndim()) + " axes, needs [" + std::to_string(N) + "]");
  }
  return data;
}

qmlp_linear_problem linear_problem(std::int64_t M_max, std::int64_t N, std::int64_t K,
                                   const SpecTuple& weight, int activation, int accumulation,
                                   int segments) {
  qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
  problem.M_max = M_max;
  problem.N = N;
  problem.K = K;
  problem.weight = spec_of(weight);
  problem.activation = activation;
  problem.accumulation = accumulation;
  problem.segments = segments;
  return problem;
}
qmlp_swiglu_problem swiglu_problem(std::int64_t M_max, std::int64_t hidden,
                                   std::int64_t intermediate, const SpecTuple& gate,
                                   const SpecTuple& up, int activation, int precision,
                                   int accumulation, int segments) {
  qmlp_swiglu_problem problem = QMLP_SWIGLU_PROBLEM_INIT;
  problem.M_max = M_max;
  problem.hidden = hidden;
  problem.intermediate = intermediate;
  problem.gate = spec_of(gate);
  problem.up = spec_of(up);
  problem.activation = activation;
  problem.precision = precision;
  problem.accumulation = accumulation;
  problem.segments = segments;
  return problem;
}

// supported, reason, field, have, need, sentence
using SupportTuple =
    std::tuple<bool, std::string, std::string, std::int64_t, std::string, std::string>;
SupportTuple to_tuple(const qmlp_support& s) {
  return {s.supported != 0, s.reason, s.field, s.have, s.need, s.sentence};
}
std::vector<std::tuple<std::string, SupportTuple>> to_list(qmlp_verdicts* verdicts) {
  std::vector<std::tuple<std::string, SupportTuple>> list;
  for (std::size_t i = 0; i < qmlp_verdicts_count(verdicts); ++i) {
    qmlp_support support = {};
    const char* name = qmlp_verdicts_get(verdicts, i, &support);
    if (name != nullptr) list.emplace_back(name, to_tuple(support));
  }
  qmlp_verdicts_free(verdicts);
  return list;
}

qmlp_plan_options plan_options(const std::optional<std::string>& kernel,
                               const std::optional<std::string>& isa) {
  qmlp_plan_options options = QMLP_PLAN_OPTIONS_INIT;
  if (kernel) options.force_kernel = kernel->c_str();
  if (isa) options.force_isa = isa->c_str();
  return options;
}

void bind_plans(nb::module_& m) {
  nb::class_<PlanHandle>(m, "Plan")
      .def("kernel_name", [](const PlanHandle& self,
                             std::int64_t M) { return qmlp_plan_kernel_name(self.plan.get(), M); })
      .def("workspace_bytes",
           [](const PlanHandle& self, std::int64_t M) {
             return qmlp_plan_workspace_bytes(self.plan.get(), M);
           })
      .def("accumulation",
           [](const PlanHandle& self) { return qmlp_plan_accumulation(self.plan.get()); })
      .def("segments", [](const PlanHandle& self) { return qmlp_plan_segments(self.plan.get()); })
      .def("can_run",
           [](const PlanHandle& self) { return qmlp_plan_can_run(self.plan.get()) != 0; })
      .def("device_kind",
           [](const PlanHandle& self) { return qmlp_plan_device_kind(self.plan.get()); });

  m.def("supports_linear", [](const std::string& device, std::int64_t M_max, std::int64_t N,
                              std::int64_t K, const SpecTuple& weight, int activation,
                              int accumulation, int segments) {
    const auto problem = linear_problem(M_max, N, K, weight, activation, accumulation, segments);
    qmlp_support support = {};
    check(qmlp_supports_linear(&problem, device.c_str(), &support));
    return to_tuple(support);
  });
  m.def("supports_swiglu", [](const std::string& device, std::int64_t M_max, std::int64_t hidden,
                              std::int64_t intermediate, const SpecTuple& gate, const SpecTuple& up,
                              int activation, int precision, int accumulation, int segments) {
    const auto problem = swiglu_problem(M_max, hidden, intermediate, gate, up, activation,
                                        precision, accumulation, segments);
    qmlp_support support = {};
    check(qmlp_supports_swiglu(&problem, device.c_str(), &support));
    return to_tuple(support);
  });
  m.def("explain_linear", [](const std::string& device, std::int64_t M_max, std::int64_t N,
                             std::int64_t K, const SpecTuple& weight, int activation,
                             int accumulation, int segments) {
    const auto problem = linear_problem(M_max, N, K, weight, activation, accumulation, segments);
    qmlp_verdicts* verdicts = nullptr;
    check(qmlp_explain_linear(&problem, device.c_str(), &verdicts));
    return to_list(verdicts);
  });
  m.def("explain_swiglu", [](const std::string& device, std::int64_t M_max, std::int64_t hidden,
                             std::int64_t intermediate, const SpecTuple& gate, const SpecTuple& up,
                             int activation, int precision, int accumulation, int segments) {
    const auto problem = swiglu_problem(M_max, hidden, intermediate, gate, up, activation,
                                        precision, accumulation, segments);
    qmlp_verdicts* verdicts = nullptr;
    check(qmlp_explain_swiglu(&problem, device.c_str(), &verdicts));
    return to_list(verdicts);
  });
  m.def(
      "plan_linear",
      [](const std::string& device, std::optional<std::string> force_kernel,
         std::optional<std::string> force_isa, std::int64_t M_max, std::int64_t N, std::int64_t K,
         const SpecTuple& weight, int activation, int accumulation, int segments) {
        const auto problem =
            linear_problem(M_max, N, K, weight, activation, accumulation, segments);
        const auto options = plan_options(force_kernel, force_isa);
        qmlp_plan* plan = nullptr;
        check(qmlp_plan_linear(&problem, device.c_str(), &options, &plan));
        return PlanHandle{std::unique_ptr<qmlp_plan, PlanDeleter>(plan)};
      },
      "device"_a, "force_kernel"_a.none(), "force_isa"_a.none(), "M_max"_a, "N"_a, "K"_a,
      "weight"_a, "activation"_a, "accumulation"_a, "segments"_a);
  m.def(
      "plan_swiglu",
      [](const std::string& device, std::optional<std::string> force_kernel,
         std::optional<std::string> force_isa, std::int64_t M_max, std::int64_t hidden,
         std::int64_t intermediate, const SpecTuple& gate, const SpecTuple& up, int activation,
         int precision, int accumulation, int segments) {
        const auto problem = swiglu_problem(M_max, hidden, intermediate, gate, up, activation,
                                            precision, accumulation, segments);
        const auto options = plan_options(force_kernel, force_isa);
        qmlp_plan* plan = nullptr;
        check(qmlp_plan_swiglu(&problem, device.c_str(), &options, &plan));
        return PlanHandle{std::unique_ptr<qmlp_plan, PlanDeleter>(plan)};
      },
      "device"_a, "force_kernel"_a.none(), "force_isa"_a.none(), "M_max"_a, "hidden"_a,
      "intermediate"_a, "gate"_a, "up"_a, "activation"_a, "precision"_a, "accumulation"_a,
      "segments"_a);
  m.def("dispatch_counts", [] {
    std::vector<std::tuple<std::string, std::uint64_t>> counts;
    check(qmlp_dispatch_counts(
        [](void* context, const char* kernel, std::uint64_t calls) {
          static_cast<decltype(counts)*>(context)->emplace_back(kernel, calls);
        },
        &counts));
    return counts;
  });
  m.def("reset_dispatch_counts", [] { qmlp_reset_dispatch_counts(); });
}

void bind_weights(nb::module_& m) {
  m.def("quant_sizes", [](std::int64_t N, std::int64_t K, const SpecTuple& spec) {
    const qmlp_quant_spec to = spec_of(spec);
    std::size_t codes = 0, scales = 0;
    check(qmlp_quant_sizes(N, K, &to, &codes, &scales));
    return std::make_tuple(codes, scales);
  });
  m.def("quantize",
        [](const Array& w, std::int64_t N, std::int64_t K, const SpecTuple& spec,
           const MutableArray& codes, const MutableArray& scales, const MutableArray& biases) {
          const qmlp_quant_spec to = spec_of(spec);
          std::size_t codes_bytes = 0, scales_bytes = 0;
          check(qmlp_quant_sizes(N, K, &to, &codes_bytes, &scales_bytes));
          const auto [from, from_bytes] = contiguous_bytes("w", w);
          if (w.dtype() != nb::dtype<float>() ||
              from_bytes / sizeof(float) / static_cast<size_t>(K) != static_cast<size_t>(N) ||
              contiguous_bytes("codes", codes).second != codes_bytes ||
              contiguous_bytes("scales", scales).second != scales_bytes ||
              contiguous_bytes("biases", biases).second != scales_bytes) {
            throw CallError{QMLP_INTERNAL, "quantize: buffers of the wrong size"};
          }
          check(without_gil([&] {
            return qmlp_quantize(static_cast<const float*>(from), N, K, &to, codes.data(),
                                 scales.data(), biases.data());
          }));
        });
  m.def(
      "dequantize",
      [](const Array& codes, std::optional<Array> scales, std::optional<Array> biases,
         std::int64_t N, std::int64_t K, const SpecTuple& spec, int round_to,
         const MutableArray& out) {
        const qmlp_tensor tensor = tensor_of(codes, scales, biases, N, K, spec);
        if (out.dtype() != nb::dtype<float>() ||
            out.size() != static_cast<std::size_t>(N) * static_cast<std::size_t>(K)) {
          throw CallError{QMLP_INTERNAL, "dequantize: an output of the wrong size"};
        }
        check(without_gil([&] {
          return qmlp_dequantize(&tensor, 0, N, round_to, static_cast<float*>(out.data()));
        }));
      },
      "codes"_a, "scales"_a.none(), "biases"_a.none(), "N"_a, "K"_a, "spec"_a, "round_to"_a,
      "out"_a);

  nb::class_<WeightHandle>(m, "Weight")
      .def("nbytes", [](const WeightHandle& self) { return qmlp_weight_bytes(self.weight.get()); })
      .def("non_finite",
           [](const WeightHandle& self) { return qmlp_weight_non_finite(self.weight.get()) != 0; })
      .def("part",
           [](const WeightHandle& self, int index) {
             qmlp_weight* half = nullptr;
             check(qmlp_weight_part(self.weight.get(), index, &half));
             return WeightHandle{std::unique_ptr<qmlp_weight, WeightDeleter>(half)};
           })
      .def("decode_row",
           [](const WeightHandle& self, std::int64_t row, const MutableArray& out, int dtype) {
             const qmlp_mutable_matrix view = view_of("out", out, dtype);
             check(qmlp_weight_decode_row(self.weight.get(), row, &view));
           });
}

qmlp_linear_epilogue linear_epilogue(const std::optional<Array>& linear_bias,
                                     const std::optional<Array>& residual, int dtype,
                                     std::int64_t N) {
  qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
  epilogue.linear_bias = bias_of("linear_bias", linear_bias, N);
  if (residual) epilogue.residual = view_of("residual", *residual, dtype);
  return epilogue;
}
qmlp_swiglu_epilogue swiglu_epilogue(const std::optional<Array>& gate_bias,
                                     const std::optional<Array>& up_bias,
                                     const std::optional<MutableArray>& gate_tap, int dtype,
                                     std::int64_t N) {
  qmlp_swiglu_epilogue epilogue = QMLP_SWIGLU_EPILOGUE_INIT;
  epilogue.gate_bias = bias_of("gate_bias", gate_bias, N);
  epilogue.up_bias = bias_of("up_bias", up_bias, N);
  if (gate_tap) epilogue.gate_tap = view_of("gate_tap", *gate_tap, dtype);
  return epilogue;
}

void bind_ops(nb::module_& m) {
  m.def(
      "quantized_linear",
      [](const PlanHandle& plan, const WeightHandle& weight, int dtype, const Array& x,
         const MutableArray& out, std::optional<Array> linear_bias, std::optional<Array> residual) {
        const qmlp_matrix from = view_of("x", x, dtype);
        const qmlp_mutable_matrix to = view_of("out", out, dtype);
        const auto epilogue = linear_epilogue(linear_bias, residual, dtype, to.cols);
        const CallStream stream;
        const qmlp_workspace scratch =
            workspace_of(qmlp_plan_workspace_bytes(plan.plan.get(), from.rows));
        check(without_gil([&] {
          return qmlp_quantized_linear(plan.plan.get(), weight.weight.get(), &from, &to, &scratch,
                                       stream.get(), &epilogue);
        }));
      },
      "plan"_a, "weight"_a, "dtype"_a, "x"_a, "out"_a, "linear_bias"_a.none(), "residual"_a.none());
  m.def(
      "fused_swiglu",
      [](const PlanHandle& plan, const WeightHandle& weight, int dtype, const Array& x,
         const MutableArray& out, std::optional<Array> gate_bias, std::optional<Array> up_bias,
         std::optional<MutableArray> gate_tap) {
        const qmlp_matrix from = view_of("x", x, dtype);
        const qmlp_mutable_matrix to = view_of("out", out, dtype);
        const auto epilogue = swiglu_epilogue(gate_bias, up_bias, gate_tap, dtype, to.cols);
        const CallStream stream;
        const qmlp_workspace scratch =
            workspace_of(qmlp_plan_workspace_bytes(plan.plan.get(), from.rows));
        check(without_gil([&] {
          return qmlp_fused_swiglu(plan.plan.get(), weight.weight.get(), &from, &to, &scratch,
                                   stream.get(), &epilogue);
        }));
      },
      "plan"_a, "weight"_a, "dtype"_a, "x"_a, "out"_a, "gate_bias"_a.none(), "up_bias"_a.none(),
      "gate_tap"_a.none());
  m.def(
      "fused_mlp",
      [](const PlanHandle& swiglu, const WeightHandle& gate_up, const PlanHandle& down,
         const WeightHandle& down_weight, int dtype, std::int64_t intermediate, const Array& x,
         const MutableArray& out, std::optional<Array> gate_bias, std::optional<Array> up_bias,
         std::optional<Array> down_bias, std::optional<Array> residual) {
        const qmlp_matrix from = view_of("x", x, dtype);
        const qmlp_mutable_matrix to = view_of("out", out, dtype);
        const auto first = swiglu_epilogue(gate_bias, up_bias, std::nullopt, dtype, intermediate);
        const auto second = linear_epilogue(down_bias, residual, dtype, to.cols);
        const CallStream stream;
        const qmlp_workspace scratch =
            workspace_of(qmlp_mlp_workspace_bytes(swiglu.plan.get(), down.plan.get(), from.rows));
        check(without_gil([&] {
          return qmlp_fused_mlp(swiglu.plan.get(), gate_up.weight.get(), down.plan.get(),
                                down_weight.weight.get(), &from, &to, &scratch, stream.get(),
                                &first, &second);
        }));
      },
      "swiglu"_a, "gate_up"_a, "down"_a, "down_weight"_a, "dtype"_a, "intermediate"_a, "x"_a,
      "out"_a, "gate_bias"_a.none(), "up_bias"_a.none(), "down_bias"_a.none(), "residual"_a.none());
  // A bfloat16 array's 16-bit patterns as a NumPy view of the same memory, which NumPy's own
  // from_dlpack refuses.
  m.def("bf16_patterns", [](const nb::object& owner) {
    Array array;
    if (!nb::try_cast<Array>(owner, array)) {
      throw nb::type_error("it gives no DLPack data with 0 to 64 axes");
    }
    if (array.dtype() !=
        nb::dlpack::dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1}) {
      throw nb::type_error("its data is not bfloat16");
    }
    // The object said where it is; its data is read wherever that says it is.
    if (array.device_type() != nb::device::cpu::value &&
        array.device_type() != nb::device::cuda_host::value &&
        array.device_type() != nb::device::cuda_managed::value) {
      throw nb::type_error("its data is not in the CPU's memory");
    }
    for (std::size_t i = 0; i < array.ndim(); ++i) {
      if (array.shape(i) > INT64_MAX) throw nb::value_error("it has an axis of negative length");
    }
    std::vector<std::size_t> shape(array.ndim());
    std::vector<std::int64_t> strides(array.ndim());
    for (std::size_t i = 0; i < array.ndim(); ++i) {
      shape[i] = array.shape(i);
      strides[i] = array.stride(i);
    }
    // The capsule keeps the DLPack view, not only the object, which may give another one next time.
    auto* held = new Array(array);
    const nb::capsule keep(held, [](void* p) noexcept { delete static_cast<Array*>(p); });
    return nb::ndarray<nb::numpy, const std::uint16_t>(
        static_cast<const std::uint16_t*>(array.data()), array.ndim(), shape.data(), keep,
        strides.data());
  });
  m.def("mlp_workspace_bytes",
        [](const PlanHandle& swiglu, const PlanHandle& down, std::int64_t M) {
          return qmlp_mlp_workspace_bytes(swiglu.plan.get(), down.plan.get(), M);
        });
}

// Turns the errors of this file into qmlp's Python exceptions, which qmlp/_errors.py defines.
void bind_errors(nb::module_& m) {
  nb::exception<NeedsCopy>(m, "NeedsCopy");
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const CallError& error) {
      // Runs no Python code: a thread that lost the GIL there while the interpreter finalizes would
      // be unwound through nanobind (gil.h).
      const nb::object kinds = nb::module_::import_("qmlp._errors").attr("_BY_STATUS");
      const bool known =
          error.status > 0 && static_cast<std::size_t>(error.status) < nb::len(kinds);
      const nb::object kind = kinds[known ? static_cast<int>(error.status) : 0];
      PyErr_SetString(kind.ptr(), error.message.c_str());
    }
  });
}

}  // namespace
}  // namespace qmlp_python

NB_MODULE(_native, m) {
  using namespace qmlp_python;
  // nanobind's types and functions belong to the interpreter that imported them first; a call in
  // another one would wait for ever.
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
    throw nb::import_error(
        "qmlp works in a process's main interpreter only, this is a subinterpreter (under "
        "mod_wsgi: "
        "WSGIApplicationGroup %{GLOBAL})");
  }
  // Weights in module globals live until the interpreter is gone; the library prints nothing.
  nb::set_leak_warnings(false);
  bind_errors(m);
  bind_plans(m);
  bind_weights(m);
  bind_ops(m);
  bind_addresses(m);
  m.def("version", [] { return qmlp_version(); });
  m.def("status_name", [](int status) { return qmlp_status_name(status); });
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, "count"_a);
  m.def("default_num_threads", [] { return qmlp_default_num_threads(); });
  m.def("forget_after_fork", &forget_after_fork);
  m.attr("runtime") = nb::capsule(&runtime(), kRuntimeCapsule);
}
