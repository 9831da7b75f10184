#pragma once

#include <memory>
#include <string>

#include "options.h"
#include "qmlp/checkpoint.h"
#include "qmlp/cpu.h"
#include "qmlp/model.h"

namespace qmlp::cli {

struct Context;

// A model ready to run, with the threads it runs on.
struct LoadedModel {
  std::unique_ptr<ThreadPool> pool;
  std::shared_ptr<const Model> model;
  double load_seconds = 0.0;
};

// Opens the folder. Throws Exception.
std::shared_ptr<const Checkpoint> open_checkpoint(const std::string& path,
                                                  const RunOptions& options);
// Packs the weights, with progress on standard error. Throws Exception.
LoadedModel load_model(const std::shared_ptr<const Checkpoint>& checkpoint,
                       const RunOptions& options, const Context& context);
// Appends tokens in passes of at most `chunk`, stopping between them when a stop is requested.
// `logits` receives the last position's, or nothing when empty. Throws Exception.
void run_prompt(Session& session, std::span<const std::int32_t> tokens, std::int64_t chunk,
                std::span<float> logits, const Context& context);

std::uint64_t peak_rss_bytes();

}  // namespace qmlp::cli
