#include "bench_model.h"

#include <algorithm>
#include <chrono>

#include "bench_case.h"
#include "context.h"
#include "progress.h"

namespace qmlp::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::int64_t kPrefillTokens = 256;
constexpr std::int64_t kDecodeTokens = 64;
constexpr int kPrefillRuns = 3;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Whether a token's forward reads all of the module: an untied embedding gives one row only.
bool is_read_whole(const ModuleInfo& module, const ModelConfig& config) {
  return module.path != "model.embed_tokens" || config.tie_word_embeddings;
}

}  // namespace

ModelSpeed measure_model(const Checkpoint& checkpoint, const std::shared_ptr<const Model>& model,
                         const FusionOptions& fusion, const MachineLimits& limits, ThreadPool& pool,
                         Context& context) {
  const ModelConfig& config = model->config();
  const std::int64_t most = config.context_length > 0 ? config.context_length : 1 << 20;
  ModelSpeed speed;
  speed.threads = pool.num_threads();
  speed.prefill_tokens = std::min(kPrefillTokens, std::max<std::int64_t>(most / 2, 1));
  speed.decode_tokens = std::min(kDecodeTokens, most - speed.prefill_tokens);
  SessionOptions options;
  options.max_tokens = speed.prefill_tokens + speed.decode_tokens;
  options.prefill_chunk = speed.prefill_tokens;
  options.fusion = fusion;
  const auto session = value_or_throw(Session::create(model, options, pool));

  std::vector<std::int32_t> prompt;
  for (std::int64_t i = 0; i < speed.prefill_tokens; ++i) {
    prompt.push_back(static_cast<std::int32_t>((i * 7919 + 13) % config.vocab_size));
  }
  std::vector<float> logits(static_cast<std::size_t>(config.vocab_size));
  Progress progress(context.progress);
  std::vector<double> prefill_seconds;
  for (int run = 0; run < kPrefillRuns; ++run) {
    check_stop();
    progress.update("prefill run", run, kPrefillRuns);
    value_or_throw(session->truncate(0));
    const auto start = Clock::now();
    value_or_throw(session->forward(prompt, Logits::last, logits));
    prefill_seconds.push_back(seconds_since(start));
  }
  const double prefill = quantile(prefill_seconds, 0.5);
  speed.prefill_tokens_per_s = static_cast<double>(speed.prefill_tokens) / prefill;

  std::vector<double> token_us;
  for (std::int64_t i = 0; i < speed.decode_tokens; ++i) {
    check_stop();
    progress.update("decode token", i, speed.decode_tokens);
    const auto token =
        static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    const auto start = Clock::now();
    value_or_throw(session->forward({&token, 1}, Logits::last, logits));
    token_us.push_back(1e6 * seconds_since(start));
  }
  const double median_us = quantile(token_us, 0.5);
  speed.decode_tokens_per_s = median_us > 0.0 ? 1e6 / median_us : 0.0;
  speed.decode_p10_us = quantile(token_us, 0.1);
  speed.decode_p90_us = quantile(token_us, 0.9);

  double layer_flops = 0.0;  // of one token, without the head, which prefill runs for one row only
  for (const ModuleInfo& module : checkpoint.modules()) {
    if (is_read_whole(module, config)) speed.bytes_per_token += static_cast<double>(module.bytes);
    const bool head = module.path == "model.embed_tokens" || module.path == "lm_head";
    if (!head) layer_flops += 2.0 * static_cast<double>(module.N) * static_cast<double>(module.K);
  }
  const double cached =
      static_cast<double>(session->cache_bytes()) *
      (static_cast<double>(speed.prefill_tokens) + 0.5 * static_cast<double>(speed.decode_tokens)) /
      static_cast<double>(session->max_tokens());
  speed.bytes_per_token += cached;
  speed.percent_of_bandwidth =
      100.0 * speed.bytes_per_token * speed.decode_tokens_per_s / limits.read_bytes_per_s;
  speed.prefill_percent_of_peak =
      100.0 * layer_flops * speed.prefill_tokens_per_s / limits.flops_per_s;
  return speed;
}

}  // namespace qmlp::cli
