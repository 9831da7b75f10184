#pragma once

#include "qmlp/cpu.h"
#include "qmlp/plan.h"

namespace qmlp::cli {

// What this machine can do at most, measured with a pool's threads.
struct MachineLimits {
  int threads = 1;
  double read_bytes_per_s = 0.0;  // from memory
  double flops_per_s = 0.0;       // f32 multiply-adds of the instruction set, two operations each
};

// Reads `buffer_bytes` (more than the caches hold) and runs multiply-add chains, each in many
// pieces, and keeps the best piece. Takes about half a second.
MachineLimits measure_limits(Isa isa, std::size_t buffer_bytes, ThreadPool& pool);

}  // namespace qmlp::cli
