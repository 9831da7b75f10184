#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "qmlp/model.h"

namespace qmlp::cli {

// Collects the raw gate projections of a session and writes them as one safetensors file:
// `model.layers.<i>.mlp.gate_proj`, rows in the order in which tokens were run.
class GateTap {
 public:
  void record(const TapEvent& event);
  void write(const std::string& path) const;  // throws Exception

 private:
  struct Rows {
    std::vector<std::byte> bytes;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    DType dtype = DType::f32;
  };
  std::map<std::int64_t, Rows> layers_;
};

}  // namespace qmlp::cli
