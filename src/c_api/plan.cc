#include <cstdio>

#include "base/try.h"
#include "c_api/convert.h"
#include "c_api/guard.h"
#include "c_api/handles.h"

namespace qmlp::c_api {
namespace {

void fill(const Support& from, qmlp_support& to) {
  to = {};
  to.supported = from ? 1 : 0;
  to.reason = to_string(from.reason);
  to.field = from.field;
  to.have = from.have;
  to.need = from.need;
  std::snprintf(to.sentence, sizeof(to.sentence), "%s", to_string(from).c_str());
}

template <class Problem>
Status supports_of(const char* function, const Problem* problem, const char* device,
                   qmlp_support* out) {
  QMLP_NOT_NULL(function, problem);
  QMLP_NOT_NULL(function, out);
  QMLP_ASSIGN(const auto to, to_problem(problem));
  const Result<DeviceFacts> facts = to_facts(device, nullptr);
  if (facts) {
    fill(supports(to, *facts), *out);
    return {};
  }
  // No driver, no GPU, one that is too old, a build without CUDA: an answer, not a mistake.
  const Error& error = facts.error();
  if (error.code != Errc::device && error.code != Errc::unsupported) return error;
  fill(Support{Reason::no_device, "device", 0, "cpu or a CUDA device"}, *out);
  std::snprintf(out->sentence, sizeof(out->sentence), "%s", error.message.c_str());
  return {};
}

template <class Problem>
Status explain_of(const char* function, const Problem* problem, const char* device,
                  qmlp_verdicts** out) {
  QMLP_NOT_NULL(function, problem);
  QMLP_NOT_NULL(function, out);
  QMLP_ASSIGN(const auto to, to_problem(problem));
  QMLP_ASSIGN(const DeviceFacts facts, to_facts(device, nullptr));
  *out = new qmlp_verdicts{explain(to, facts)};
  return {};
}

template <class Problem>
Status plan_of(const char* function, const Problem* problem, const char* device,
               const qmlp_plan_options* options, qmlp_plan** out) {
  QMLP_NOT_NULL(function, problem);
  QMLP_NOT_NULL(function, out);
  const qmlp_plan_options defaults = QMLP_PLAN_OPTIONS_INIT;
  QMLP_ASSIGN(const qmlp_plan_options from,
              read_versioned("qmlp_plan_options", options, defaults, sizeof(defaults)));
  QMLP_ASSIGN(const auto to, to_problem(problem));
  QMLP_ASSIGN(const DeviceFacts facts, to_facts(device, from.force_isa));
  PlanOptions plan_options;
  if (from.force_kernel != nullptr) plan_options.force_kernel = from.force_kernel;
  QMLP_ASSIGN(Plan plan, make_plan(to, facts, plan_options));
  *out = new qmlp_plan{std::move(plan)};
  return {};
}

}  // namespace
}  // namespace qmlp::c_api

using qmlp::c_api::guarded;

extern "C" {

qmlp_status qmlp_pool_create(int32_t num_threads, qmlp_pool** out) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_pool_create", out);
    const int threads = num_threads == 0 ? qmlp::default_num_threads() : num_threads;
    QMLP_ASSIGN(std::shared_ptr<qmlp::ThreadPool> pool, qmlp::ThreadPool::create(threads));
    *out = new qmlp_pool{std::move(pool)};
    return {};
  });
}
void qmlp_pool_free(qmlp_pool* pool) { delete pool; }
qmlp_status qmlp_pool_run(qmlp_pool* pool, int64_t num_tasks,
                          void (*task)(void* context, int64_t index, int32_t thread),
                          void* context) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_pool_run", pool);
    QMLP_NOT_NULL("qmlp_pool_run", task);
    pool->pool->run(num_tasks, task, context);
    return {};
  });
}
int32_t qmlp_pool_num_threads(const qmlp_pool* pool) {
  return pool == nullptr ? 0 : pool->pool->num_threads();
}
int32_t qmlp_default_num_threads(void) { return qmlp::default_num_threads(); }

qmlp_status qmlp_supports_linear(const qmlp_linear_problem* problem, const char* device,
                                 qmlp_support* out) {
  return guarded(
      [&] { return qmlp::c_api::supports_of("qmlp_supports_linear", problem, device, out); });
}
qmlp_status qmlp_supports_swiglu(const qmlp_swiglu_problem* problem, const char* device,
                                 qmlp_support* out) {
  return guarded(
      [&] { return qmlp::c_api::supports_of("qmlp_supports_swiglu", problem, device, out); });
}

qmlp_status qmlp_explain_linear(const qmlp_linear_problem* problem, const char* device,
                                qmlp_verdicts** out) {
  return guarded(
      [&] { return qmlp::c_api::explain_of("qmlp_explain_linear", problem, device, out); });
}
qmlp_status qmlp_explain_swiglu(const qmlp_swiglu_problem* problem, const char* device,
                                qmlp_verdicts** out) {
  return guarded(
      [&] { return qmlp::c_api::explain_of("qmlp_explain_swiglu", problem, device, out); });
}
void qmlp_verdicts_free(qmlp_verdicts* verdicts) { delete verdicts; }
size_t qmlp_verdicts_count(const qmlp_verdicts* verdicts) {
  return verdicts == nullptr ? 0 : verdicts->verdicts.size();
}
const char* qmlp_verdicts_get(const qmlp_verdicts* verdicts, size_t index, qmlp_support* support) {
  if (verdicts == nullptr || index >= verdicts->verdicts.size()) return nullptr;
  const qmlp::KernelVerdict& verdict = verdicts->verdicts[index];
  if (support != nullptr) {
    const qmlp_status status = guarded([&]() -> qmlp::Status {
      qmlp::c_api::fill(verdict.support, *support);
      return {};
    });
    if (status != QMLP_OK) return nullptr;
  }
  return verdict.kernel.data();  // a row's name is a C string
}

qmlp_status qmlp_plan_linear(const qmlp_linear_problem* problem, const char* device,
                             const qmlp_plan_options* options, qmlp_plan** out) {
  return guarded(
      [&] { return qmlp::c_api::plan_of("qmlp_plan_linear", problem, device, options, out); });
}
qmlp_status qmlp_plan_swiglu(const qmlp_swiglu_problem* problem, const char* device,
                             const qmlp_plan_options* options, qmlp_plan** out) {
  return guarded(
      [&] { return qmlp::c_api::plan_of("qmlp_plan_swiglu", problem, device, options, out); });
}
void qmlp_plan_free(qmlp_plan* plan) { delete plan; }
const char* qmlp_plan_kernel_name(const qmlp_plan* plan, int64_t M) {
  return plan == nullptr ? "" : plan->plan.kernel_name(M).data();
}
size_t qmlp_plan_workspace_bytes(const qmlp_plan* plan, int64_t M) {
  return plan == nullptr || M < 0 ? 0 : plan->plan.workspace_bytes(M);
}
qmlp_accumulation qmlp_plan_accumulation(const qmlp_plan* plan) {
  if (plan == nullptr) return QMLP_ACCUMULATION_DEFAULT;
  return plan->plan.accumulation() == qmlp::Accumulation::tensor ? QMLP_ACCUMULATION_TENSOR
                                                                 : QMLP_ACCUMULATION_F32;
}
int32_t qmlp_plan_segments(const qmlp_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.segments();
}
qmlp_device_kind qmlp_plan_device_kind(const qmlp_plan* plan) {
  return plan != nullptr && plan->plan.device().kind == qmlp::DeviceKind::cuda ? QMLP_CUDA
                                                                               : QMLP_CPU;
}
int32_t qmlp_plan_can_run(const qmlp_plan* plan) {
  return plan != nullptr && plan->plan.device().present ? 1 : 0;
}

qmlp_status qmlp_dispatch_counts(void (*visit)(void* context, const char* kernel, uint64_t calls),
                                 void* context) {
  return guarded([&]() -> qmlp::Status {
    QMLP_NOT_NULL("qmlp_dispatch_counts", visit);
    for (const qmlp::KernelCount& count : qmlp::dispatch_counts()) {
      visit(context, count.kernel.data(), count.calls);
    }
    return {};
  });
}
void qmlp_reset_dispatch_counts(void) { qmlp::reset_dispatch_counts(); }

}  // extern "C"
