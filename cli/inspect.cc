#include <CLI/CLI.hpp>
#include <map>

#include "commands.h"
#include "context.h"
#include "format.h"
#include "json_out.h"
#include "model_features.h"
#include "model_loading.h"
#include "options.h"
#include "qmlp/plan.h"

namespace qmlp::cli {
namespace {

constexpr std::int64_t kPrefillM = 256;  // the tokens of one prefill pass
constexpr std::string_view kGate = ".mlp.gate_proj";
constexpr std::string_view kUp = ".mlp.up_proj";
constexpr std::string_view kEmbedding = "model.embed_tokens";

struct Flags {
  RunFlags run;
  std::string model;
  std::string machine;
  bool explain = false;
  bool json = false;
};

// What runs a module: a kernel for one token and for a prefill pass, or why none does.
struct Choice {
  std::string decode;
  std::string prefill;
  std::string reason;
  std::string contract;  // "f32", "tensor/2"
};

class Inspector {
 public:
  Inspector(const Checkpoint& checkpoint, const RunOptions& options, const DeviceFacts& facts)
      : checkpoint_(checkpoint), options_(options), facts_(facts) {
    const ModuleInfo* embedding = checkpoint.find_module(kEmbedding);
    activations_ = options.model.activations.value_or(
        embedding != nullptr ? embedding->spec.scale_dtype : DType::bf16);
  }

  DType activations() const { return activations_; }

  Choice choose(const ModuleInfo& module) const {
    if (module.path == kEmbedding && !checkpoint_.config().tie_word_embeddings) {
      return {"row lookup", "row lookup", "", ""};
    }
    const auto pair = swiglu(module);
    Choice decode = pair && fuses(1) ? choose(*pair) : choose(linear(module));
    const Choice prefill = pair && fuses(kPrefillM) ? choose(*pair) : choose(linear(module));
    decode.prefill = prefill.prefill;
    if (decode.reason.empty()) decode.reason = prefill.reason;
    return decode;
  }

  // Every kernel's verdict on the module's prefill problem.
  std::vector<KernelVerdict> verdicts(const ModuleInfo& module) const {
    const auto pair = swiglu(module);
    return pair && fuses(kPrefillM) ? explain(*pair, facts_) : explain(linear(module), facts_);
  }

 private:
  bool fuses(std::int64_t M) const {
    return options_.fusion.fused && M >= options_.fusion.fuse_min_m &&
           options_.fusion.fused_max_calls != 0;
  }

  // The SwiGLU problem that a gate or up module is half of.
  std::optional<SwigluProblem> swiglu(const ModuleInfo& module) const {
    const std::string_view path = module.path;
    const std::string_view suffix = path.ends_with(kGate) ? kGate : path.ends_with(kUp) ? kUp : "";
    if (suffix.empty()) return std::nullopt;
    const std::string stem(path.substr(0, path.size() - suffix.size()));
    const ModuleInfo* gate = checkpoint_.find_module(stem + std::string(kGate));
    const ModuleInfo* up = checkpoint_.find_module(stem + std::string(kUp));
    if (gate == nullptr || up == nullptr) return std::nullopt;
    SwigluProblem problem;
    problem.M_max = kPrefillM;
    problem.hidden = gate->K;
    problem.intermediate = gate->N;
    problem.gate = gate->spec;
    problem.up = up->spec;
    problem.activation = activations_;
    problem.precision = options_.model.precision;
    problem.accumulation = options_.model.accumulation;
    problem.segments = options_.model.segments;
    return problem;
  }

  LinearProblem linear(const ModuleInfo& module) const {
    LinearProblem problem;
    problem.M_max = kPrefillM;
    problem.N = module.N;
    problem.K = module.K;
    problem.weight = module.spec;
    problem.activation = activations_;
    problem.accumulation = options_.model.accumulation;
    problem.segments = options_.model.segments;
    return problem;
  }

  template <class Problem>
  Choice choose(const Problem& problem) const {
    const auto plan = make_plan(problem, facts_);
    if (!plan) return {"none", "none", plan.error().message, ""};
    std::string contract = to_string(plan->accumulation());
    if (plan->accumulation() == Accumulation::tensor) {
      contract += "/" + std::to_string(plan->segments());
    }
    return {std::string(plan->kernel_name(1)), std::string(plan->kernel_name(kPrefillM)), "",
            contract};
  }

  const Checkpoint& checkpoint_;
  const RunOptions& options_;
  const DeviceFacts& facts_;
  DType activations_ = DType::bf16;
};

struct Totals {
  std::uint64_t parameters = 0;
  std::uint64_t module_bytes = 0;
  std::uint64_t other_bytes = 0;  // norms
  struct Width {
    std::int64_t modules = 0;
    std::uint64_t parameters = 0;
    std::uint64_t bytes = 0;
  };
  std::map<std::string, Width> widths;
};

Totals count(const Checkpoint& checkpoint) {
  Totals totals;
  for (const ModuleInfo& module : checkpoint.modules()) {
    const auto parameters =
        static_cast<std::uint64_t>(module.N) * static_cast<std::uint64_t>(module.K);
    totals.parameters += parameters;
    totals.module_bytes += module.bytes;
    Totals::Width& width = totals.widths[spec_text(module.spec)];
    ++width.modules;
    width.parameters += parameters;
    width.bytes += module.bytes;
  }
  std::uint64_t all = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) all += tensor.bytes;
  totals.other_bytes = all > totals.module_bytes ? all - totals.module_bytes : 0;
  return totals;
}

double bits_per_weight(std::uint64_t bytes, std::uint64_t parameters) {
  return parameters == 0 ? 0.0 : 8.0 * static_cast<double>(bytes) / static_cast<double>(parameters);
}

std::uint64_t cache_bytes_per_token(const ModelConfig& config, DType activations) {
  return static_cast<std::uint64_t>(2 * config.num_hidden_layers * config.num_key_value_heads *
                                    config.head_dim) *
         size_of(activations);
}

Json config_json(const ModelConfig& config) {
  Json json = Json::object();
  json.set("model_type", config.model_type);
  json.set("hidden_size", config.hidden_size);
  json.set("intermediate_size", config.intermediate_size);
  json.set("num_hidden_layers", config.num_hidden_layers);
  json.set("num_attention_heads", config.num_attention_heads);
  json.set("num_key_value_heads", config.num_key_value_heads);
  json.set("head_dim", config.head_dim);
  json.set("vocab_size", config.vocab_size);
  json.set("max_position_embeddings", config.max_position_embeddings);
  json.set("rms_norm_eps", config.rms_norm_eps);
  json.set("tie_word_embeddings", config.tie_word_embeddings);
  json.set("eos_token_ids", Json::array_of(config.eos_token_ids));
  add_features(config, json);
  return json;
}

Json inspect_json(const Flags& flags, const Checkpoint& checkpoint, const Inspector& inspector,
                  const std::string& machine) {
  Json modules = Json::array();
  for (const ModuleInfo& module : checkpoint.modules()) {
    const Choice choice = inspector.choose(module);
    Json json = Json::object();
    json.set("path", module.path);
    json.set("shape", Json::array().push(module.N).push(module.K).take());
    json.set("bits", module.spec.bits);
    json.set("group_size", module.spec.group_size);
    json.set("scale_dtype", to_string(module.spec.scale_dtype));
    json.set("source", module.spec_source);
    json.set("stored_path", module.stored_path);
    json.set("row_begin", module.row_begin);
    json.set("linear_bias", module.has_linear_bias);
    json.set("bytes", module.bytes);
    json.set("decode_kernel", choice.reason.empty() ? Json(choice.decode) : Json());
    json.set("prefill_kernel", choice.reason.empty() ? Json(choice.prefill) : Json());
    if (!choice.contract.empty()) json.set("accumulation", choice.contract);
    if (!choice.reason.empty()) json.set("reason", choice.reason);
    if (flags.explain) {
      Json verdicts = Json::array();
      for (const KernelVerdict& verdict : inspector.verdicts(module)) {
        verdicts.push(Json::object()
                          .set("kernel", verdict.kernel)
                          .set("supported", static_cast<bool>(verdict.support))
                          .set("reason", to_string(verdict.support))
                          .take());
      }
      json.set("kernels", std::move(verdicts));
    }
    modules.push(std::move(json));
  }
  const Totals totals = count(checkpoint);
  Json widths = Json::array();
  for (const auto& [name, width] : totals.widths) {
    widths.push(Json::object()
                    .set("format", name)
                    .set("modules", width.modules)
                    .set("parameters", width.parameters)
                    .set("bytes", width.bytes)
                    .take());
  }
  Json json = Json::object();
  json.set("model", flags.model);
  json.set("machine", machine);
  json.set("activations", to_string(inspector.activations()));
  json.set("config", config_json(checkpoint.config()));
  json.set("modules", std::move(modules));
  json.set("totals",
           Json::object()
               .set("parameters", totals.parameters)
               .set("module_bytes", totals.module_bytes)
               .set("other_bytes", totals.other_bytes)
               .set("file_bytes", checkpoint.file_bytes())
               .set("bits_per_weight", bits_per_weight(totals.module_bytes, totals.parameters))
               .set("cache_bytes_per_token",
                    cache_bytes_per_token(checkpoint.config(), inspector.activations()))
               .set("formats", std::move(widths))
               .take());
  json.set("mapped", checkpoint.mapped());
  json.set("warnings", Json::array_of(checkpoint.warnings()));
  return json;
}

void print_text(const Flags& flags, const Checkpoint& checkpoint, const Inspector& inspector,
                const std::string& machine, Output& out) {
  const ModelConfig& config = checkpoint.config();
  out.line(flags.model);
  out.line(format(
      "%s: %lld layers, hidden %lld, intermediate %lld, heads %lld (kv %lld) of %lld, "
      "vocabulary %lld%s, context %lld",
      config.model_type.c_str(), static_cast<long long>(config.num_hidden_layers),
      static_cast<long long>(config.hidden_size), static_cast<long long>(config.intermediate_size),
      static_cast<long long>(config.num_attention_heads),
      static_cast<long long>(config.num_key_value_heads), static_cast<long long>(config.head_dim),
      static_cast<long long>(config.vocab_size), config.tie_word_embeddings ? " (tied head)" : "",
      static_cast<long long>(config.context_length)));
  for (const std::string& line : feature_lines(config)) out.line("  " + line);
  out.line("kernels for " + machine + ", activations " + to_string(inspector.activations()) + "\n");

  Table table({{"module"},
               {"N", true},
               {"K", true},
               {"format"},
               {"from"},
               {"bytes", true},
               {"decode"},
               {"prefill"}});
  std::map<std::string, std::string> reasons;  // reason -> first module that has it
  for (const ModuleInfo& module : checkpoint.modules()) {
    const Choice choice = inspector.choose(module);
    if (!choice.reason.empty()) reasons.emplace(choice.reason, module.path);
    const bool same = choice.decode == choice.prefill;
    const std::string stored =
        module.stored_path == module.path
            ? ""
            : " (of " + module.stored_path.substr(module.stored_path.rfind('.') + 1) + ")";
    table.row({module.path + stored + (module.has_linear_bias ? " +bias" : ""),
               std::to_string(module.N), std::to_string(module.K), spec_text(module.spec),
               module.spec_source, std::to_string(module.bytes), choice.decode,
               same ? "same" : choice.prefill});
  }
  out.write(table.text());
  for (const auto& [reason, path] : reasons) out.line("no kernel (" + path + "): " + reason);

  const Totals totals = count(checkpoint);
  Table widths(
      {{"format"}, {"modules", true}, {"weights", true}, {"bytes", true}, {"bits/weight", true}});
  for (const auto& [name, width] : totals.widths) {
    widths.row({name, std::to_string(width.modules), std::to_string(width.parameters),
                std::to_string(width.bytes),
                format("%.2f", bits_per_weight(width.bytes, width.parameters))});
  }
  widths.row({"all", std::to_string(checkpoint.modules().size()), std::to_string(totals.parameters),
              std::to_string(totals.module_bytes),
              format("%.2f", bits_per_weight(totals.module_bytes, totals.parameters))});
  out.write("\n" + widths.text());
  out.line("norms and the rest " + human_bytes(totals.other_bytes) + "; files " +
           human_bytes(checkpoint.file_bytes()) + "; cache " +
           human_bytes(cache_bytes_per_token(config, inspector.activations())) + " a token");
  for (const std::string& warning : checkpoint.warnings()) out.line("warning: " + warning);

  if (flags.explain) {
    std::map<std::string, bool> shown;  // one module of each format and shape is enough
    for (const ModuleInfo& module : checkpoint.modules()) {
      const std::string key = module.path.substr(module.path.rfind('.') + 1) +
                              spec_text(module.spec) + std::to_string(module.N) + "x" +
                              std::to_string(module.K);
      if (!shown.emplace(key, true).second) continue;
      out.line("\n" + module.path + ", " + spec_text(module.spec));
      for (const KernelVerdict& verdict : inspector.verdicts(module)) {
        out.line("  " + std::string(verdict.kernel) + ": " + to_string(verdict.support));
      }
    }
  }
}

int run_inspect(const Flags& flags, Context& context) {
  const RunOptions options = flags.run.resolve();
  const auto checkpoint = open_checkpoint(flags.model, options);
  DeviceFacts facts = options.facts;
  std::string machine = std::string("this machine (") + to_string(facts.isa) + ")";
  if (!flags.machine.empty()) {
    facts = value_or_throw(machine_facts(flags.machine));
    machine = flags.machine;
  }
  const Inspector inspector(*checkpoint, options, facts);
  if (flags.json) {
    context.out.line(inspect_json(flags, *checkpoint, inspector, machine).dump(2));
  } else {
    print_text(flags, *checkpoint, inspector, machine, context.out);
  }
  return kDone;
}

}  // namespace

void add_inspect(CLI::App& app, Context& context) {
  CLI::App* command =
      app.add_subcommand("inspect", "Per tensor: format, where it came from, the kernel that runs");
  const auto flags = std::make_shared<Flags>();
  command->add_option("MODEL", flags->model, "Checkpoint folder")->required();
  command
      ->add_option("--machine", flags->machine,
                   "Plan for another machine: portable, avx2, avx512, a100, h200")
      ->type_name("NAME");
  command->add_flag("--explain", flags->explain, "Every kernel's verdict");
  command->add_flag("--json", flags->json, "Print one JSON object");
  flags->run.add_to(
      *command, kThreadOptions | kDeviceOptions | kNumericOptions | kFusionOptions | kMmapOptions);
  command->footer(
      "Examples:\n"
      "  qmlp inspect models/smollm2-135m\n"
      "  qmlp inspect models/smollm2-135m --machine h200 --explain\n"
      "  qmlp inspect models/smollm2-135m --json | python3 -m json.tool");
  set_run(*command, context, [flags](Context& c) { return run_inspect(*flags, c); });
}

}  // namespace qmlp::cli
