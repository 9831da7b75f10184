#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "qmlp/cpu.h"
#include "qmlp/model.h"
#include "report.h"

namespace qmlp::cli {

// Paths through the forward that must give the same logits to the bit: chunked prefill, token by
// token, unfused, after truncate, with poisoned scratch, with another number of threads.
// A refused pass is a failed check. Throws Exception when interrupted.
std::vector<CheckResult> check_model(const std::shared_ptr<const Model>& model, Precision precision,
                                     std::int64_t num_tokens, std::uint64_t seed, ThreadPool& pool,
                                     ThreadPool& other_pool,
                                     const std::function<void(std::string_view)>& progress);

}  // namespace qmlp::cli
