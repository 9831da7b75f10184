#include "model_loading.h"

#include <algorithm>
#include <chrono>

#include <sys/resource.h>

#include "context.h"
#include "progress.h"

namespace qmlp::cli {

std::shared_ptr<const Checkpoint> open_checkpoint(const std::string& path,
                                                  const RunOptions& options) {
  return value_or_throw(Checkpoint::open(path, options.checkpoint));
}

LoadedModel load_model(const std::shared_ptr<const Checkpoint>& checkpoint,
                       const RunOptions& options, const Context& context) {
  LoadedModel loaded;
  const auto start = std::chrono::steady_clock::now();
  loaded.pool = value_or_throw(ThreadPool::create(options.num_threads));
  Progress progress(context.progress);
  ModelOptions model_options = options.model;
  model_options.progress = [&](std::string_view what, std::int64_t done, std::int64_t total) {
    progress.update(what, done, total);
  };
  loaded.model = value_or_throw(Model::load(checkpoint, model_options, *loaded.pool));
  check_stop();
  loaded.load_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return loaded;
}

void run_prompt(Session& session, std::span<const std::int32_t> tokens, std::int64_t chunk,
                std::span<float> logits, const Context& context) {
  Progress progress(context.progress);
  const auto total = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t done = 0; done < total;) {
    check_stop();
    const std::int64_t count = std::min(chunk, total - done);
    const bool last = done + count == total && !logits.empty();
    value_or_throw(session.forward(
        tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)),
        last ? Logits::last : Logits::none, last ? logits : std::span<float>()));
    done += count;
    if (total > chunk) progress.update("prompt", done, total);
  }
}

std::uint64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

}  // namespace qmlp::cli
