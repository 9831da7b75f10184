#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qmlp/checkpoint.h"
#include "qmlp/cpu.h"
#include "qmlp/model.h"
#include "qmlp/plan.h"
#include "report.h"

namespace qmlp::cli {

// One op of a loaded model with the checkpoint's own weights, which are what it must compute with.
struct OpSubject {
  Model::Op op;
  struct Part {
    std::string module;  // "model.layers.0.mlp.gate_proj"
    QuantizedTensorView source;
  };
  std::vector<Part> parts;  // one, or gate and up
};

struct OpCheckOptions {
  std::vector<std::int64_t> rows;  // values of M, ascending
  DeviceFacts facts;
  DType activations = DType::bf16;
  Precision precision = Precision::match;
  std::optional<Accumulation> accumulation;
  int segments = 0;
  std::uint64_t seed = 1;
  std::int64_t sampled_columns = 24;  // outputs a row that the slow references compute
  bool plant_kernel_fault = false;    // in the first call of the op itself
};

// Every check of one op, all of them run. `pool` is the model's; `other_pool` has another number of
// threads. Throws Exception when an op refuses what it must take.
OpReport check_op(const OpSubject& subject, const OpCheckOptions& options, ThreadPool& pool,
                  ThreadPool& other_pool);

// The names of check_op's results, in order.
const std::vector<std::string>& op_check_names();

}  // namespace qmlp::cli
