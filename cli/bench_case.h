#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "machine_limits.h"
#include "qmlp/cpu.h"
#include "qmlp/plan.h"

namespace qmlp::cli {

// One MLP half to measure: gate and up, hidden -> intermediate.
struct BenchShape {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  QuantSpec gate;
  QuantSpec up;
};
std::string shape_text(const BenchShape& shape);  // "1536x4608 4/64+8/64"

struct BenchSettings {
  DType activation = DType::bf16;
  Precision precision = Precision::match;
  std::optional<Accumulation> accumulation;
  int segments = 0;
  std::vector<std::int64_t> M;
  std::uint64_t rotate_bytes = 0;  // weights to cycle through, so that no call finds its own cached
  double seconds = 1.0;            // time for each M, all variants together
  int min_runs = 5;
};

struct BenchRow {
  std::string variant;  // "fused", "unfused", "dense bf16"
  std::string kernel;
  std::int64_t M = 0;
  std::int64_t copies = 0;         // of the weights, cycled through
  std::uint64_t packed_bytes = 0;  // of one copy
  int runs = 0;
  double median_us = 0.0;
  double p10_us = 0.0;
  double p90_us = 0.0;
  double min_us = 0.0;
  double bytes =
      0.0;  // what a call has to move at least: weights as the format stores them, x, out
  double flops = 0.0;
  double limit_us = 0.0;  // the larger of bytes / bandwidth and flops / peak
  bool memory_bound = false;
  double percent_of_limit = 0.0;
};

struct BenchCaseResult {
  std::vector<BenchRow> rows;
  std::uint64_t rotated_bytes = 0;  // least of the variants
};

// Measures the variants of one shape at every M, interleaved. Throws Exception, and CheckFailed
// when the fused and the unfused result differ in a bit.
BenchCaseResult run_bench_case(const BenchShape& shape, const BenchSettings& settings,
                               const DeviceFacts& facts, const MachineLimits& limits,
                               ThreadPool& pool, class Progress& progress);

double quantile(std::vector<double> values, double q);  // linear between neighbours

}  // namespace qmlp::cli
