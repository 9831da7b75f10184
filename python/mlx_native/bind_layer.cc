#include "bind_layer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qmlp_mlx {
namespace {

// Parts by their names; what is absent or None keeps its default.
LayerParts parts_of(const nb::dict& given) {
  LayerParts p;
  const auto read = [&](const char* name, auto& into) {
    if (!given.contains(name) || given[name].is_none()) return;
    into = nb::cast<std::remove_reference_t<decltype(into)>>(given[name]);
  };
  const auto read_array = [&](const char* name, OptionalArray& into) {
    if (!given.contains(name) || given[name].is_none()) return;
    into = nb::cast<array>(given[name]);
  };
  read("q", p.q);
  read("k", p.k);
  read("v", p.v);
  read("o", p.o);
  read_array("q_bias", p.q_bias);
  read_array("k_bias", p.k_bias);
  read_array("v_bias", p.v_bias);
  read_array("o_bias", p.o_bias);
  read("num_heads", p.num_heads);
  read("num_kv_heads", p.num_kv_heads);
  read("head_dim", p.head_dim);
  read("scale", p.scale);
  read_array("q_norm", p.q_norm);
  read_array("k_norm", p.k_norm);
  read("q_eps", p.q_eps);
  read("k_eps", p.k_eps);
  read_array("frequencies", p.frequencies);
  read("traditional", p.traditional);
  read("rope_scale", p.rope_scale);
  read("rope_dims", p.rope_dims);
  if (given.contains("rope_base")) p.rope_base = nb::cast<float>(given["rope_base"]);
  read_array("rope_periods", p.rope_periods);
  read_array("input_norm", p.input_norm);
  read_array("post_norm", p.post_norm);
  read("input_eps", p.input_eps);
  read("post_eps", p.post_eps);
  read("gate_up", p.gate_up);
  read("down", p.down);
  read_array("gate_bias", p.gate_bias);
  read_array("up_bias", p.up_bias);
  read_array("down_bias", p.down_bias);
  return p;
}

const array* pointer_to(const nb::object& a) {
  return a.is_none() ? nullptr : &nb::cast<const array&>(a);
}

// (out, keys, values, rows), or None where the layer's own code has to run.
nb::object run(const Layer& layer, const array& x, bool cached, const nb::object& rows,
               const nb::object& keys, const nb::object& values, int offset, bool unshared) {
  const KvRowsPtr held = rows.is_none() ? nullptr : nb::cast<KvRowsPtr>(rows);
  std::optional<LayerResult> made =
      layer.run(x, cached, held, pointer_to(keys), pointer_to(values), offset, unshared);
  if (!made) return nb::none();
  if (!cached) return nb::make_tuple(std::move(made->out), nb::none(), nb::none(), nb::none());
  return nb::make_tuple(std::move(made->out), std::move(*made->keys), std::move(*made->values),
                        std::move(made->rows));
}

// Whether a layer's modules, their arrays and their numbers are those that its op was made of. The
// modules are borrowed: who holds this holds them too.
class Guard {
 public:
  enum Answer { kSame, kChanged, kTraced };

  // places: (container, name, module); sources: (module, name), with the arrays' ids, 0 for those
  // that are absent; numbers: (module, name, value).
  Guard(const nb::list& places, const nb::list& sources, const nb::list& ids,
        const nb::list& numbers) {
    for (nb::handle place : places) {
      const nb::handle module = place[2];
      modules_.push_back({place[0].ptr(), nb::borrow(place[1]), module.ptr(), module.type().ptr()});
    }
    std::size_t i = 0;
    for (nb::handle source : sources) {
      arrays_.push_back(
          {source[0].ptr(), nb::borrow(source[1]), nb::cast<std::uintptr_t>(ids[i++])});
    }
    for (nb::handle number : numbers) {
      numbers_.push_back({number[0].ptr(), nb::borrow(number[1]), nb::borrow(number[2])});
    }
  }

  int check() const {
    for (const Place& place : modules_) {
      PyObject* const now = PyDict_GetItemWithError(place.container, place.name.ptr());
      if (now != place.module || nb::handle(now).type().ptr() != place.type) return kChanged;
    }
    for (const Source& source : arrays_) {
      const nb::handle now = PyDict_GetItemWithError(source.module, source.name.ptr());
      if (source.id == 0) {
        if (now.is_valid() && !now.is_none()) return kChanged;
        continue;
      }
      if (!now.is_valid() || !nb::isinstance<array>(now)) return kChanged;
      const array& a = *nb::inst_ptr<array>(now);
      if (a.is_tracer()) return kTraced;
      if (a.id() != source.id) return kChanged;
    }
    for (const Number& number : numbers_) {
      PyObject* const now = PyObject_GetAttr(number.module, number.name.ptr());
      if (now == nullptr) PyErr_Clear();
      const bool same = now == number.value.ptr();
      Py_XDECREF(now);
      if (!same) return kChanged;
    }
    return kSame;
  }

 private:
  struct Place {
    PyObject* container;
    nb::object name;
    PyObject* module;
    PyObject* type;
  };
  struct Source {
    PyObject* module;
    nb::object name;
    std::uintptr_t id;
  };
  struct Number {
    PyObject* module;
    nb::object name, value;  // a number is another object once it was set
  };
  std::vector<Place> modules_;
  std::vector<Source> arrays_;
  std::vector<Number> numbers_;
};

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Guard>(m, "Guard")
      .def(nb::init<const nb::list&, const nb::list&, const nb::list&, const nb::list&>())
      .def("check", &Guard::check)
      .def("__deepcopy__", [](const nb::object&, const nb::object&) { return nb::none(); });
  // A cache that is copied shares its arrays with the copy, so neither goes on in place: what the
  // copy gets is of no use to it, and harmless.
  nb::class_<KvRows>(m, "KvRows")
      .def("__deepcopy__", [](const nb::object&, const nb::object&) { return nb::none(); })
      .def("__reduce__", [](const nb::object&) {
        return nb::make_tuple(nb::module_::import_("qmlp.mlx._layers").attr("no_rows"),
                              nb::make_tuple());
      });
  nb::class_<Layer>(m, "Layer")
      .def("__init__",
           [](Layer* self, const nb::dict& parts) { new (self) Layer(parts_of(parts)); })
      .def("run", &run, "x"_a, "cached"_a, "rows"_a.none(), "keys"_a.none(), "values"_a.none(),
           "offset"_a, "unshared"_a)
      .def("__deepcopy__", [](nb::object self, const nb::object&) { return self; });
  // The identities of arrays (0 for None); None when one stands for another in a traced function.
  m.def("array_ids", [](const nb::list& arrays) -> nb::object {
    nb::list ids;
    for (nb::handle held : arrays) {
      if (held.is_none()) {
        ids.append(0);
        continue;
      }
      const array& a = nb::cast<const array&>(held);
      if (a.is_tracer()) return nb::none();
      ids.append(a.id());
    }
    return ids;
  });
}

}  // namespace qmlp_mlx
