#include "kl_stats.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace qmlp::cli {
namespace {

PositionStats compare_row(std::span<const float> reference, std::span<const float> test,
                          std::int32_t next) {
  PositionStats stats;
  const double reference_lse = log_sum_exp(reference);
  const double test_lse = log_sum_exp(test);
  const auto best = [](std::span<const float> row) {
    return static_cast<std::int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
  };
  stats.reference_best = best(reference);
  stats.test_best = best(test);
  double kl = 0.0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double log_p = reference[i] - reference_lse;
    const double p = std::exp(log_p);
    if (p > 0.0) kl += p * (log_p - (test[i] - test_lse));
  }
  stats.kl = std::max(kl, 0.0);  // rounding can take an exact 0 below it
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  const auto at = static_cast<std::size_t>(next);
  stats.reference_nll = next < 0 ? kNone : reference_lse - reference[at];
  stats.test_nll = next < 0 ? kNone : test_lse - test[at];
  return stats;
}

}  // namespace

double log_sum_exp(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (const float logit : logits) sum += std::exp(logit - most);
  return most + std::log(sum);
}

std::vector<PositionStats> compare_logits(std::span<const float> reference,
                                          std::span<const float> test, std::int64_t vocab_size,
                                          std::span<const std::int32_t> next, ThreadPool& pool) {
  std::vector<PositionStats> stats(next.size());
  pool.for_each(static_cast<std::int64_t>(next.size()), [&](std::int64_t row, int) {
    const auto begin = static_cast<std::size_t>(row * vocab_size);
    const auto count = static_cast<std::size_t>(vocab_size);
    const auto r = static_cast<std::size_t>(row);
    stats[r] = compare_row(reference.subspan(begin, count), test.subspan(begin, count), next[r]);
  });
  return stats;
}

KlSummary summarize(std::span<const PositionStats> positions) {
  KlSummary summary;
  summary.positions = static_cast<std::int64_t>(positions.size());
  if (positions.empty()) return summary;
  std::vector<double> values;
  double kl_sum = 0.0;
  double nll_sum[2] = {};
  std::int64_t agree = 0;
  std::int64_t scored = 0;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const PositionStats& p = positions[i];
    values.push_back(p.kl);
    kl_sum += p.kl;
    if (p.kl > summary.max_kl) {
      summary.max_kl = p.kl;
      summary.max_position = static_cast<std::int64_t>(i);
    }
    agree += p.reference_best == p.test_best;
    if (!std::isnan(p.reference_nll)) {
      nll_sum[0] += p.reference_nll;
      nll_sum[1] += p.test_nll;
      ++scored;
    }
  }
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(positions.size());
  summary.mean_kl = kl_sum / count;
  summary.median_kl = values[values.size() / 2];
  summary.p99_kl = values[std::min(values.size() - 1, values.size() * 99 / 100)];
  summary.argmax_agreement = static_cast<double>(agree) / count;
  const auto perplexity = [&](double sum) {
    return scored > 0 ? std::exp(sum / static_cast<double>(scored))
                      : std::numeric_limits<double>::quiet_NaN();
  };
  summary.reference_perplexity = perplexity(nll_sum[0]);
  summary.test_perplexity = perplexity(nll_sum[1]);
  return summary;
}

std::vector<std::int32_t> top_tokens(std::span<const float> logits, std::int64_t k) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = std::min<std::ptrdiff_t>(k, static_cast<std::ptrdiff_t>(ids.size()));
  std::partial_sort(ids.begin(), ids.begin() + count, ids.end(),
                    [&](std::int32_t a, std::int32_t b) {
                      const float x = logits[static_cast<std::size_t>(a)];
                      const float y = logits[static_cast<std::size_t>(b)];
                      return x > y || (x == y && a < b);
                    });
  ids.resize(static_cast<std::size_t>(count));
  return ids;
}

}  // namespace qmlp::cli
