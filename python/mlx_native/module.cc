// qmlp._mlx: the ops on mx.array. Shares MLX's own nanobind domain, so that its arrays are ours.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "../native/gil.h"
#include "bind_layer.h"
#include "gpu.h"
#include "ops.h"
#include "small_ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qmlp_mlx {
namespace {

namespace mx = mlx::core;

// Where weights are packed: on the default device, if ops can run there.
Place default_place() {
  const Place place = mx::default_device();
  return gpu::refusal().empty() ? place : Place(mx::Device::cpu);
}

PackedWeightPtr pack(const std::vector<std::vector<array>>& parts,
                     const std::vector<std::pair<int, int>>& formats, int activation,
                     int segments) {
  std::vector<Source> sources;
  int bits[2] = {}, group_sizes[2] = {};
  for (std::size_t i = 0; i < parts.size() && i < 2; ++i) {
    const std::vector<array>& part = parts[i];
    sources.push_back({part[0], {part.begin() + 1, part.end()}});
    bits[i] = formats[i].first;
    group_sizes[i] = formats[i].second;
  }
  return PackedWeight::make(std::move(sources), bits, group_sizes, mlx_dtype(activation),
                            default_place(), segments);
}

// The one argument of PackedWeight.part, which takes any, so that wrong ones are refused in one
// line.
int part_index(const nb::args& given, const nb::kwargs& named, int num_parts) {
  const bool by_name = given.size() == 0 && named.size() == 1 && named.contains("index");
  if (!by_name && !(given.size() == 1 && named.size() == 0)) {
    throw nb::type_error("part: takes one argument, index");
  }
  const nb::object value = by_name ? nb::object(named["index"]) : nb::object(given[0]);
  if (!PyIndex_Check(value.ptr())) {
    const nb::str type(value.type().attr("__name__"));
    throw nb::type_error(
        (std::string("part: index is a ") + type.c_str() + ", needs a whole number").c_str());
  }
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  int overflow = 0;
  const long index = PyLong_AsLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || index < 0 || index >= num_parts) {
    const std::string found = overflow != 0 ? "out of range" : std::to_string(index);
    throw nb::value_error(
        ("part: index is " + found + ", needs 0 to " + std::to_string(num_parts - 1)).c_str());
  }
  return static_cast<int>(index);
}

}  // namespace
}  // namespace qmlp_mlx

NB_MODULE(_mlx, m) {
  using namespace qmlp_mlx;
  nb::set_leak_warnings(false);
  {
    const nb::object capsule = nb::module_::import_("qmlp._native").attr("runtime");
    void* pointer = PyCapsule_GetPointer(capsule.ptr(), qmlp_python::kRuntimeCapsule);
    if (pointer == nullptr) throw nb::python_error();
    set_runtime(static_cast<const qmlp_python::Runtime*>(pointer));
  }

  nb::class_<PackedWeight>(m, "PackedWeight",
                           "Weights re-laid for the kernels, made by `qmlp.mlx.pack`: one array (a "
                           "linear layer) or two\n"
                           "(gate and up). Immutable; holds the source's own bits.")
      .def_prop_ro("N", &PackedWeight::N, "Output features.")
      .def_prop_ro("K", &PackedWeight::K, "Input features.")
      .def_prop_ro("num_parts", &PackedWeight::num_parts, "1, or 2 for gate and up.")
      .def_prop_ro("nbytes", &PackedWeight::nbytes, "Bytes that the packed form owns.")
      .def(
          "part",
          [](PackedWeight& self, const nb::args& given, const nb::kwargs& named) {
            return self.part(part_index(given, named, self.num_parts()));
          },
          nb::sig("def part(self, index: int) -> PackedWeight"),
          "The gate (0) or up (1) half as a linear weight, which shares the memory on a CPU.")
      .def("__deepcopy__", [](nb::object self, const nb::object&) { return self; });

  // The identity of an array, whichever Python object holds it; -1 for one that stands for another
  // while a function is traced.
  m.def("array_id", [](const array& a) -> std::int64_t {
    return a.is_tracer() ? -1 : static_cast<std::int64_t>(a.id());
  });

  // Whether a module's arrays are those that it was given.
  m.def("is_current", [](nb::handle module, const std::vector<std::int64_t>& ids) {
    static const char* const kNames[] = {"weight", "scales", "biases"};
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const nb::object held = module[kNames[i]];
      const array& now = nb::cast<const array&>(held);
      if (!now.is_tracer() && static_cast<std::int64_t>(now.id()) != ids[i]) return false;
    }
    return true;
  });

  // The device of the ops on the default device, as `supports` names it, and why it is not the
  // default device if it is not.
  m.def("device", [] { return name_of(default_place()); });
  m.def("gpu_refusal", [] { return gpu::refusal(); });
  m.def("gpu_mismatch", [] { return gpu::mismatch(); });

  // Of an evaluated array on a GPU stream.
  m.def("buffer_device", [](const array& a) { return gpu::device_of(a); });

  // Takes an array, to see that MLX's arrays are known here.
  m.def("probe", [](const array& a) { return static_cast<std::int64_t>(a.size()); });
  m.def("pack", &pack, "parts"_a, "formats"_a, "activation"_a, "segments"_a,
        nb::call_guard<qmlp_python::GilReleased>());
  m.def("quantized_linear", &quantized_linear, "x"_a, "weight"_a, "linear_bias"_a.none(),
        "residual"_a.none(), "stream"_a.none(), nb::call_guard<qmlp_python::GilReleased>());
  m.def("fused_swiglu", &fused_swiglu, "x"_a, "gate_up"_a, "gate_bias"_a.none(), "up_bias"_a.none(),
        "stream"_a.none(), nb::call_guard<qmlp_python::GilReleased>());
  m.def("fused_mlp", &fused_mlp, "x"_a, "gate_up"_a, "down"_a, "gate_bias"_a.none(),
        "up_bias"_a.none(), "down_bias"_a.none(), "residual"_a.none(), "stream"_a.none(),
        nb::call_guard<qmlp_python::GilReleased>());
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, "stream"_a.none(),
        nb::call_guard<qmlp_python::GilReleased>());
  m.def("rope", &rope, "x"_a, "inv_freqs"_a, "dims"_a, "traditional"_a, "base"_a, "scale"_a,
        "offset"_a, "stream"_a.none(), nb::call_guard<qmlp_python::GilReleased>());
  m.def("dequantize_rows", &dequantize_rows, "codes"_a, "scales"_a, "biases"_a, "bits"_a,
        "group_size"_a, "stream"_a.none(), nb::call_guard<qmlp_python::GilReleased>());
  m.def("unpack", &unpack, "weight"_a, "ids"_a.none(), "stream"_a.none(),
        nb::call_guard<qmlp_python::GilReleased>());
  bind_layer(m);
}
