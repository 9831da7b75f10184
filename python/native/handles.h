#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "errors.h"
#include "gil.h"
#include "qmlp/c_api.h"

namespace qmlp_python {

struct PlanDeleter {
  void operator()(qmlp_plan* plan) const noexcept { qmlp_plan_free(plan); }
};
struct WeightDeleter {
  void operator()(qmlp_weight* weight) const noexcept { qmlp_weight_free(weight); }
};
struct PlanHandle {
  std::unique_ptr<qmlp_plan, PlanDeleter> plan;
};
struct WeightHandle {
  std::unique_ptr<qmlp_weight, WeightDeleter> weight;
};

// bits, group_size, scale dtype
using SpecTuple = std::tuple<int, int, int>;
inline qmlp_quant_spec spec_of(const SpecTuple& spec) {
  return {std::get<0>(spec), std::get<1>(spec), std::get<2>(spec)};
}

[[noreturn]] inline void refuse(std::string message) {
  throw CallError{QMLP_INVALID_ARGUMENT, std::move(message)};
}

// The status of a call of the library, made while other Python threads run.
template <class Call>
qmlp_status without_gil(Call call) {
  const GilReleased released;
  return call();
}

// Functions that take addresses, for arrays in a device's memory and for packing: module "_native".
void bind_addresses(nanobind::module_& m);

}  // namespace qmlp_python
