#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "golden_file.h"
#include "qmlp/cpu.h"
#include "qmlp/plan.h"
#include "report.h"

namespace qmlp::cli {

struct VectorOptions {
  DeviceFacts facts;
  std::optional<Accumulation> accumulation;  // empty: the layout's own contract
  int segments = 0;
};

struct VectorReport {
  std::string file;
  std::string layout;    // "quantized_matmul", "swiglu", "activation_tables"
  std::string contract;  // "tensor/1", "f32"
  std::string made_with;
  std::int64_t problems = 0;
  CheckResult exact;    // outputs that must be equal
  CheckResult bounded;  // outputs that must lie within the bound
  bool ok() const { return exact.ok && bounded.ok; }
};

// Runs the library's ops on a golden file. docs/testing.md says what each layout must satisfy.
VectorReport check_vectors(const std::string& path, const VectorOptions& options, ThreadPool& pool);

}  // namespace qmlp::cli
