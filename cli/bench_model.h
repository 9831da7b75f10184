#pragma once

#include "machine_limits.h"
#include "model_loading.h"
#include "options.h"
#include "qmlp/checkpoint.h"

namespace qmlp::cli {

struct Context;

// A whole model, prefill and decode.
struct ModelSpeed {
  int threads = 1;
  std::int64_t prefill_tokens = 0;
  double prefill_tokens_per_s = 0.0;
  std::int64_t decode_tokens = 0;
  double decode_tokens_per_s = 0.0;  // 1 / median time of a token
  double decode_p10_us = 0.0;
  double decode_p90_us = 0.0;
  double bytes_per_token = 0.0;  // weights as the file stores them, and the cache at mid-run
  double percent_of_bandwidth = 0.0;
  double prefill_percent_of_peak = 0.0;  // multiply-adds of the linear layers
};
ModelSpeed measure_model(const Checkpoint& checkpoint, const std::shared_ptr<const Model>& model,
                         const FusionOptions& fusion, const MachineLimits& limits, ThreadPool& pool,
                         Context& context);

}  // namespace qmlp::cli
