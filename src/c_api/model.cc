#include <algorithm>

#include "base/try.h"
#include "c_api/convert.h"
#include "c_api/guard.h"
#include "c_api/handles.h"

using qmlp::c_api::guarded;
using qmlp::c_api::read_versioned;

extern "C" {

qmlp_status qmlp_checkpoint_open(const char* path, qmlp_checkpoint** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_checkpoint_open", path);
    QMLP_NOT_NULL("qmlp_checkpoint_open", out);
    QMLP_ASSIGN(auto checkpoint, qmlp::Checkpoint::open(path));
    *out = new qmlp_checkpoint{std::move(checkpoint)};
    return {};
  });
}
void qmlp_checkpoint_free(qmlp_checkpoint* checkpoint) { delete checkpoint; }

qmlp_status qmlp_model_load(const qmlp_checkpoint* checkpoint, const qmlp_model_options* options,
                            qmlp_pool* pool, qmlp_model** out) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_model_load";
    QMLP_NOT_NULL(kName, checkpoint);
    QMLP_NOT_NULL(kName, pool);
    QMLP_NOT_NULL(kName, out);
    const qmlp_model_options defaults = QMLP_MODEL_OPTIONS_INIT;
    QMLP_ASSIGN(const qmlp_model_options from,
                read_versioned("qmlp_model_options", options, defaults, sizeof(defaults)));
    qmlp::ModelOptions to;
    if (from.activations != -1) {
      QMLP_ASSIGN(to.activations, qmlp::c_api::to_dtype("activations", from.activations));
    }
    QMLP_ASSIGN(to.precision, qmlp::c_api::to_precision(from.precision));
    QMLP_ASSIGN(to.accumulation, qmlp::c_api::to_accumulation(from.accumulation));
    to.segments = from.segments;
    if (from.force_isa != nullptr) to.force_isa = from.force_isa;
    if (from.progress != nullptr) {
      to.progress = [&from](std::string_view what, std::int64_t done, std::int64_t total) {
        from.progress(from.progress_context, std::string(what).c_str(), done, total);
      };
    }
    QMLP_ASSIGN(auto model, qmlp::Model::load(checkpoint->checkpoint, to, *pool->pool));
    *out = new qmlp_model{std::move(model)};
    return {};
  });
}
void qmlp_model_free(qmlp_model* model) { delete model; }
int64_t qmlp_model_vocab_size(const qmlp_model* model) {
  return model == nullptr ? 0 : model->model->config().vocab_size;
}
int64_t qmlp_model_num_layers(const qmlp_model* model) {
  return model == nullptr ? 0 : model->model->config().num_hidden_layers;
}
int64_t qmlp_model_hidden_size(const qmlp_model* model) {
  return model == nullptr ? 0 : model->model->config().hidden_size;
}
qmlp_dtype qmlp_model_activations(const qmlp_model* model) {
  return model == nullptr ? QMLP_F32 : static_cast<qmlp_dtype>(model->model->activations());
}
uint64_t qmlp_model_packed_bytes(const qmlp_model* model) {
  return model == nullptr ? 0 : model->model->packed_bytes();
}
int32_t qmlp_model_is_eos(const qmlp_model* model, int32_t token) {
  if (model == nullptr) return 0;
  const std::vector<std::int32_t>& ids = model->model->config().eos_token_ids;
  return std::find(ids.begin(), ids.end(), token) != ids.end() ? 1 : 0;
}

qmlp_status qmlp_session_create(const qmlp_model* model, const qmlp_session_options* options,
                                qmlp_pool* pool, qmlp_session** out) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_session_create";
    QMLP_NOT_NULL(kName, model);
    QMLP_NOT_NULL(kName, pool);
    QMLP_NOT_NULL(kName, out);
    const qmlp_session_options defaults = QMLP_SESSION_OPTIONS_INIT;
    QMLP_ASSIGN(const qmlp_session_options from,
                read_versioned("qmlp_session_options", options, defaults, sizeof(defaults)));
    qmlp::SessionOptions to;
    to.max_tokens = from.max_tokens;
    to.prefill_chunk = from.prefill_chunk;
    to.fusion.fused = from.fused != 0;
    to.check_finite = from.check_finite != 0;
    QMLP_ASSIGN(auto session, qmlp::Session::create(model->model, to, *pool->pool));
    *out = new qmlp_session{pool->pool, model->model->config().vocab_size, std::move(session)};
    return {};
  });
}
void qmlp_session_free(qmlp_session* session) { delete session; }
int64_t qmlp_session_position(const qmlp_session* session) {
  return session == nullptr ? 0 : session->session->position();
}
int64_t qmlp_session_max_tokens(const qmlp_session* session) {
  return session == nullptr ? 0 : session->session->max_tokens();
}

qmlp_status qmlp_session_forward(qmlp_session* session, const int32_t* tokens, size_t num_tokens,
                                 float* logits, size_t logits_count) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_session_forward";
    QMLP_NOT_NULL(kName, session);
    if (num_tokens != 0) QMLP_NOT_NULL(kName, tokens);
    if (logits_count != 0) QMLP_NOT_NULL(kName, logits);
    const auto vocab_size = static_cast<std::size_t>(session->vocab_size);
    qmlp::Logits which = qmlp::Logits::none;
    // One token's logits are the last's and all of them: the same call either way.
    if (logits_count == vocab_size) {
      which = qmlp::Logits::last;
    } else if (logits_count != 0 && logits_count / vocab_size == num_tokens &&
               logits_count % vocab_size == 0) {
      which = qmlp::Logits::all;
    } else if (logits_count != 0) {
      return qmlp::Error{qmlp::Errc::invalid_argument,
                         std::string(kName) + ": logits_count is " + std::to_string(logits_count) +
                             ", needs 0, " + std::to_string(vocab_size) +
                             " for the last token, or that times " + std::to_string(num_tokens)};
    }
    return session->session->forward({tokens, num_tokens}, which, {logits, logits_count});
  });
}
qmlp_status qmlp_session_truncate(qmlp_session* session, int64_t position) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_session_truncate", session);
    return session->session->truncate(position);
  });
}
qmlp_status qmlp_session_save(const qmlp_session* session, const char* path) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_session_save", session);
    QMLP_NOT_NULL("qmlp_session_save", path);
    return session->session->save(path);
  });
}
qmlp_status qmlp_session_load(qmlp_session* session, const char* path) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_session_load", session);
    QMLP_NOT_NULL("qmlp_session_load", path);
    return session->session->load(path);
  });
}

qmlp_status qmlp_sampler_create(const qmlp_sampling_options* options, qmlp_sampler** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_sampler_create", out);
    const qmlp_sampling_options defaults = QMLP_SAMPLING_OPTIONS_INIT;
    QMLP_ASSIGN(const qmlp_sampling_options from,
                read_versioned("qmlp_sampling_options", options, defaults, sizeof(defaults)));
    qmlp::SamplingOptions to;
    to.temperature = from.temperature;
    to.top_p = from.top_p;
    to.top_k = from.top_k;
    to.min_p = from.min_p;
    to.repeat_penalty = from.repeat_penalty;
    to.repeat_window = from.repeat_window;
    to.seed = from.seed;
    QMLP_TRY(validate(to));
    *out = new qmlp_sampler{qmlp::Sampler(to)};
    return {};
  });
}
void qmlp_sampler_free(qmlp_sampler* sampler) { delete sampler; }
qmlp_status qmlp_sampler_sample(qmlp_sampler* sampler, const float* logits, size_t num_logits,
                                const int32_t* history, size_t num_history, int32_t* token) {
  return guarded([&]() -> qmlp::Status {
    constexpr const char* kName = "qmlp_sampler_sample";
    QMLP_NOT_NULL(kName, sampler);
    QMLP_NOT_NULL(kName, logits);
    QMLP_NOT_NULL(kName, token);
    if (num_history != 0) QMLP_NOT_NULL(kName, history);
    if (num_logits == 0) {
      return qmlp::Error{qmlp::Errc::invalid_argument,
                         std::string(kName) + ": num_logits is 0, needs 1 or more"};
    }
    *token = sampler->sampler.sample({logits, num_logits}, {history, num_history});
    return {};
  });
}

}  // extern "C"
