#include <algorithm>
#include <cmath>
#include <string>

#include "base/concat.h"
#include "model/pinned_math.h"
#include "qmlp/model.h"

namespace qmlp {
namespace {

using Candidate = std::pair<float, std::int32_t>;

// Higher logit first, then the lower id: a total order, so that every sort gives one result.
bool before(const Candidate& a, const Candidate& b) noexcept {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}
// The order in which the standard heap keeps the best candidate on top.
bool heap_order(const Candidate& a, const Candidate& b) noexcept { return before(b, a); }

std::uint64_t next_random(std::uint64_t& state) noexcept {  // splitmix64
  state += 0x9E3779B97F4A7C15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

Status refuse(const char* field, double value, const char* need) {
  std::string text = std::to_string(value);
  return Error{Errc::invalid_argument, concat(field, ": is ", text, ", must be ", need)};
}

}  // namespace

Status validate(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0) || !std::isfinite(options.temperature)) {
    return refuse("temperature", options.temperature, "finite and at least 0");
  }
  if (!(options.top_p > 0.0 && options.top_p <= 1.0)) {
    return refuse("top_p", options.top_p, "above 0 and at most 1");
  }
  if (options.top_k < 0) {
    return Error{Errc::invalid_argument,
                 concat("top_k: is ", options.top_k, ", must be at least 0 (0 turns it off)")};
  }
  if (!(options.min_p >= 0.0 && options.min_p <= 1.0)) {
    return refuse("min_p", options.min_p, "from 0 to 1");
  }
  if (!(options.repeat_penalty > 0.0) || !std::isfinite(options.repeat_penalty)) {
    return refuse("repeat_penalty", options.repeat_penalty, "finite and above 0 (1 turns it off)");
  }
  if (options.repeat_window < 0) {
    return Error{Errc::invalid_argument, concat("repeat_window: is ", options.repeat_window,
                                                ", must be at least 0 (0 turns it off)")};
  }
  return {};
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), state_(options.seed) {}

std::int32_t Sampler::sample(std::span<const float> logits, std::span<const std::int32_t> history) {
  candidates_.clear();
  candidates_.reserve(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    // A NaN has no place in an order; the caller is told of it before it comes here.
    const float logit = logits[i] == logits[i] ? logits[i] : -INFINITY;
    candidates_.emplace_back(logit, static_cast<std::int32_t>(i));
  }
  if (candidates_.empty()) return -1;

  if (options_.repeat_penalty != 1.0) {
    const auto window = static_cast<std::size_t>(std::max<std::int64_t>(options_.repeat_window, 0));
    const auto recent = history.last(std::min(window, history.size()));
    for (std::size_t i = 0; i < recent.size(); ++i) {
      const std::int32_t id = recent[i];
      if (id < 0 || static_cast<std::size_t>(id) >= logits.size()) continue;
      const float original = logits[static_cast<std::size_t>(id)];
      if (original != original) continue;
      // From the original each time: a token that came twice is penalised once.
      const double penalised =
          original > 0.0f ? original / options_.repeat_penalty : original * options_.repeat_penalty;
      candidates_[static_cast<std::size_t>(id)].first = static_cast<float>(penalised);
    }
  }

  const Candidate best = *std::min_element(candidates_.begin(), candidates_.end(), before);
  if (options_.temperature == 0.0 || !std::isfinite(best.first)) return best.second;

  // The filters look at the distribution before the temperature, as mlx-lm's do. Each keeps the
  // likeliest few, so together they keep the shortest of the three prefixes.
  std::size_t kept = candidates_.size();
  const auto probability = [&](const Candidate& candidate) {  // relative to the best
    return pinned_exp(static_cast<double>(candidate.first) - best.first);
  };
  const bool filtered = options_.top_k > 0 || options_.top_p < 1.0 || options_.min_p > 0.0;
  if (filtered) {
    double total = 0.0;
    if (options_.top_p < 1.0) {
      for (const Candidate& candidate : candidates_) total += probability(candidate);
    }
    const std::size_t most =
        options_.top_k > 0 ? std::min<std::size_t>(kept, static_cast<std::size_t>(options_.top_k))
                           : kept;
    std::make_heap(candidates_.begin(), candidates_.end(), heap_order);
    kept = 0;
    double sum = 0.0;
    while (kept < most) {
      const double p = probability(candidates_.front());
      if (kept > 0 && p < options_.min_p) break;
      // The best of the rest goes to the end of the range that is still a heap.
      std::pop_heap(candidates_.begin(), candidates_.end() - static_cast<std::ptrdiff_t>(kept),
                    heap_order);
      ++kept;
      sum += p;
      if (options_.top_p < 1.0 && sum >= options_.top_p * total) break;
    }
  }

  const auto first = candidates_.end() - static_cast<std::ptrdiff_t>(kept);
  const auto weight = [&](const Candidate& candidate) {
    return pinned_exp((static_cast<double>(candidate.first) - best.first) / options_.temperature);
  };
  double total = 0.0;
  for (auto it = first; it != candidates_.end(); ++it) total += weight(*it);
  const double uniform = static_cast<double>(next_random(state_) >> 11) * 0x1p-53;
  const double target = uniform * total;
  double sum = 0.0;
  for (auto it = first; it != candidates_.end(); ++it) {
    const double w = weight(*it);
    sum += w;
    if (w > 0.0 && sum > target) return it->second;
  }
  return best.second;  // only if the last sum was rounded down to the target
}

}  // namespace qmlp
