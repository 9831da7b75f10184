#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "qmlp/c_api.h"
#include "qmlp/qmlp.h"

// What the opaque handles of the C interface hold. Shared ownership inside, so that a caller may
// free them in any order.
// NOLINTBEGIN(readability-identifier-naming): names of the C header
struct qmlp_pool {
  std::shared_ptr<qmlp::ThreadPool> pool;
};
struct qmlp_verdicts {
  std::vector<qmlp::KernelVerdict> verdicts;
};
struct qmlp_plan {
  qmlp::Plan plan;
};
struct qmlp_weight {
  qmlp::PackedWeightPtr weight;
};
struct qmlp_attention_cache {
  std::unique_ptr<qmlp::AttentionCache> cache;
};
struct qmlp_checkpoint {
  std::shared_ptr<const qmlp::Checkpoint> checkpoint;
};
struct qmlp_model {
  std::shared_ptr<const qmlp::Model> model;
};
struct qmlp_session {
  std::shared_ptr<qmlp::ThreadPool> pool;  // outlives the session, which borrows it
  std::int64_t vocab_size = 0;
  std::unique_ptr<qmlp::Session> session;
};
struct qmlp_sampler {
  qmlp::Sampler sampler;
};
struct qmlp_tokenizer {
  std::shared_ptr<const qmlp::Tokenizer> tokenizer;
};
// NOLINTEND(readability-identifier-naming)
