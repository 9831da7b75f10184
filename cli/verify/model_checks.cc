#include "model_checks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "../context.h"
#include "../format.h"
#include "qmlp/exceptions.h"

namespace qmlp::cli {
namespace {

using Tokens = std::vector<std::int32_t>;

Tokens make_tokens(const ModelConfig& config, std::int64_t count, std::uint64_t seed) {
  Tokens tokens;
  std::uint64_t state = seed;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    tokens.push_back(
        static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(config.vocab_size)));
  }
  if (config.bos_token_id && !tokens.empty()) tokens[0] = *config.bos_token_id;
  return tokens;
}

struct Path {
  std::string name;
  SessionOptions options;
  std::vector<std::int64_t> passes;  // tokens of each forward, in order
  std::int64_t truncate_to = -1;     // after the first time through: forget, and run the rest again
  bool other_threads = false;
};

std::vector<float> run_path(const std::shared_ptr<const Model>& model, const Path& path,
                            const Tokens& tokens, ThreadPool& pool) {
  const auto vocab = static_cast<std::size_t>(model->config().vocab_size);
  auto session = value_or_throw(Session::create(model, path.options, pool));
  std::vector<float> logits(tokens.size() * vocab);
  const auto run = [&](std::size_t begin, std::size_t count) {
    check_stop();
    value_or_throw(session->forward(std::span(tokens).subspan(begin, count), Logits::all,
                                    std::span(logits).subspan(begin * vocab, count * vocab)));
  };
  std::size_t at = 0;
  for (const std::int64_t pass : path.passes) {
    const std::size_t count = std::min(static_cast<std::size_t>(pass), tokens.size() - at);
    if (count == 0) break;
    run(at, count);
    at += count;
  }
  if (path.truncate_to >= 0) {
    value_or_throw(session->truncate(path.truncate_to));
    const auto begin = static_cast<std::size_t>(path.truncate_to);
    std::fill(logits.begin() + static_cast<std::ptrdiff_t>(begin * vocab), logits.end(), NAN);
    run(begin, tokens.size() - begin);
  }
  return logits;
}

void compare(CheckResult& check, const std::vector<float>& got, const std::vector<float>& want,
             std::int64_t vocab) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    ++check.compared;
    if (std::bit_cast<std::uint32_t>(got[i]) == std::bit_cast<std::uint32_t>(want[i])) continue;
    const auto index = static_cast<std::int64_t>(i);
    check.miss(format("token %lld logit %lld is %.9g, one prefill gives %.9g",
                      static_cast<long long>(index / vocab), static_cast<long long>(index % vocab),
                      static_cast<double>(got[i]), static_cast<double>(want[i])));
  }
}

}  // namespace

std::vector<CheckResult> check_model(const std::shared_ptr<const Model>& model, Precision precision,
                                     std::int64_t num_tokens, std::uint64_t seed, ThreadPool& pool,
                                     ThreadPool& other_pool,
                                     const std::function<void(std::string_view)>& progress) {
  const Tokens tokens = make_tokens(model->config(), num_tokens, seed);
  SessionOptions base;
  base.max_tokens = num_tokens;
  base.prefill_chunk = num_tokens;
  Path whole{"prefill", base, {num_tokens}, -1, false};

  std::vector<Path> paths;
  paths.push_back({"chunks", base, {}, -1, false});
  paths.back().options.prefill_chunk = 5;
  paths.back().passes = {num_tokens};
  paths.push_back({"uneven passes", base, {1, 6, 2, num_tokens}, -1, false});
  paths.push_back({"token by token", base, std::vector<std::int64_t>(tokens.size(), 1), -1, false});
  if (precision == Precision::match) {  // `wide` is not the separate ops' arithmetic
    paths.push_back({"unfused", base, {num_tokens}, -1, false});
    paths.back().options.fusion.fused = false;
  }
  paths.push_back({"after truncate", base, {num_tokens}, num_tokens / 2, false});
  paths.push_back({"poisoned scratch", base, {num_tokens}, -1, false});
  paths.back().options.fusion.poison_scratch = true;
  paths.push_back({"threads", base, {num_tokens}, -1, true});

  progress(whole.name);
  std::vector<CheckResult> results;
  std::vector<float> want;
  CheckResult finite;
  finite.name = "finite logits";
  try {
    want = run_path(model, whole, tokens, pool);
  } catch (const Exception& error) {
    if (error.code() == Errc::interrupted) throw;
    finite.miss(error.what());
  }
  for (const float value : want) {
    ++finite.compared;
    if (!std::isfinite(value)) finite.miss("a logit of the prefill is not finite");
  }
  results.push_back(finite);
  if (want.empty()) return results;  // nothing to compare the other paths with
  for (const Path& path : paths) {
    progress(path.name);
    CheckResult check;
    check.name = path.name;
    try {
      compare(check, run_path(model, path, tokens, path.other_threads ? other_pool : pool), want,
              model->config().vocab_size);
    } catch (const Exception& error) {
      if (error.code() == Errc::interrupted) throw;
      check.miss(error.what());
    }
    results.push_back(check);
  }
  return results;
}

}  // namespace qmlp::cli
