#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qmlp/cpu.h"

namespace qmlp::cli {

// Two next-token distributions at one position.
struct PositionStats {
  double kl = 0.0;                  // KL(reference || test), natural logarithm
  std::int32_t reference_best = 0;  // most likely token, the lower id of equals
  std::int32_t test_best = 0;
  double reference_nll = 0.0;  // -log p of the token that follows; NaN when none follows
  double test_nll = 0.0;
};

double log_sum_exp(std::span<const float> logits);

// Rows of `reference` and `test` are positions; next[i] < 0 where no token follows.
std::vector<PositionStats> compare_logits(std::span<const float> reference,
                                          std::span<const float> test, std::int64_t vocab_size,
                                          std::span<const std::int32_t> next, ThreadPool& pool);

struct KlSummary {
  std::int64_t positions = 0;
  double mean_kl = 0.0;
  double median_kl = 0.0;
  double p99_kl = 0.0;
  double max_kl = 0.0;
  std::int64_t max_position = 0;
  double argmax_agreement = 0.0;
  double reference_perplexity = 0.0;
  double test_perplexity = 0.0;
};
KlSummary summarize(std::span<const PositionStats> positions);

// The k best tokens, best first, the lower id of equals first.
std::vector<std::int32_t> top_tokens(std::span<const float> logits, std::int64_t k);

}  // namespace qmlp::cli
