#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "context.h"
#include "format.h"
#include "json_out.h"
#include "model_loading.h"
#include "options.h"
#include "parse.h"
#include "progress.h"
#include "verify/model_checks.h"
#include "verify/op_checks.h"
#include "verify/vectors.h"

namespace qmlp::cli {
namespace {

constexpr const char* kFooter =
    "Runs every check and prints every result; exit status 1 when any failed.\n"
    "Examples:\n"
    "  qmlp verify models/smollm2-135m\n"
    "  qmlp verify models/smollm2-135m --layers 0-3 --rows 1,17 --json\n"
    "  qmlp verify --vectors tests/data/mlx-cuda/*.safetensors\n"
    "docs/testing.md says what each check compares.";

enum class PlantSite : std::uint8_t { none, kernel, weight, scale };
struct Plant {
  PlantSite site = PlantSite::none;
  std::int64_t layer = 0;
};

struct Flags {
  RunFlags run;
  std::string model;
  std::vector<std::string> vectors;
  std::string layers;
  std::string rows = "1,2,5,17,64";
  std::string plant;
  std::int64_t tokens = 24;
  std::int64_t seed = 1;
  bool fail_fast = false;
  bool json = false;
};

struct LayerRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

LayerRange parse_layers(const std::string& text, std::int64_t count) {
  const auto ends = split(text, '-');
  if (ends.empty() || ends.size() > 2) {
    fail_usage("--layers: \"" + text + "\" is not a layer or a range such as 0-3");
  }
  LayerRange range;
  range.first = parse_int("--layers", ends.front(), 0, count - 1);
  range.last = parse_int("--layers", ends.back(), range.first, count - 1);
  return range;
}

Plant parse_plant(const std::string& text) {
  if (text.empty()) return {};
  const auto parts = split(text, ':');
  constexpr std::string_view kSites[] = {"kernel", "weight", "scale"};
  Plant plant;
  plant.site = static_cast<PlantSite>(1 + parse_choice("--plant", parts.front(), kSites));
  if (parts.size() > 2) fail_usage("--plant: \"" + text + "\" is not kernel|weight|scale[:LAYER]");
  if (parts.size() == 2) plant.layer = parse_int("--plant", parts.back(), 0, 1 << 20);
  return plant;
}

// The layer of a module path, or -1.
std::int64_t layer_of(std::string_view path) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!path.starts_with(kPrefix)) return -1;
  return std::atoll(std::string(path.substr(kPrefix.size())).c_str());
}

// A copy of a weight with one bit of one code, or of one scale, changed.
QuantizedTensor damaged(const QuantizedTensorView& source, PlantSite site) {
  const auto copy = [](std::span<const std::byte> bytes) {
    return std::vector<std::byte>(bytes.begin(), bytes.end());
  };
  QuantizedTensor weight{copy(source.codes), copy(source.scales), copy(source.biases), source.N,
                         source.K,           source.spec};
  std::vector<std::byte>& bytes =
      site == PlantSite::scale && !weight.scales.empty() ? weight.scales : weight.codes;
  // The least significant byte of a little-endian scale somewhere in the middle.
  const std::size_t element = site == PlantSite::scale ? size_of(source.spec.scale_dtype) : 1;
  bytes[bytes.size() / 2 / element * element] ^= std::byte{1};
  return weight;
}

int run_vectors(const Flags& flags, Context& context) {
  const RunOptions run = flags.run.resolve();
  auto pool = value_or_throw(ThreadPool::create(run.num_threads));
  VectorOptions options;
  options.facts = run.facts;
  options.accumulation = run.model.accumulation;
  options.segments = run.model.segments;
  Table table({{"file"},
               {"contract"},
               {"problems", true},
               {"exact", true},
               {"differ", true},
               {"bounded", true},
               {"worst", true},
               {"result"}});
  Json files = Json::array();
  std::vector<std::string> misses;
  std::int64_t failed = 0;
  int status = kCheckFailed;  // of a failure; an unreadable file has its own
  Progress progress(context.progress);
  for (std::size_t i = 0; i < flags.vectors.size(); ++i) {
    check_stop();
    const std::string& path = flags.vectors[i];
    progress.update(path, static_cast<std::int64_t>(i),
                    static_cast<std::int64_t>(flags.vectors.size()));
    VectorReport report;
    try {
      report = check_vectors(path, options, *pool);
    } catch (const Exception& error) {
      if (error.code() == Errc::interrupted) throw;
      status = exit_code(error.code());
      misses.push_back(std::string("ERROR ") + error.what());
      table.row({path, "-", "-", "-", "-", "-", "-", "error"});
      Json item = Json::object();
      item.set("file", path).set("error", error.what()).set("ok", false);
      files.push(std::move(item));
      ++failed;
      if (flags.fail_fast) break;
      continue;
    }
    if (!report.ok()) ++failed;
    for (const CheckResult* check : {&report.exact, &report.bounded}) {
      if (!check->ok) {
        misses.push_back(format("FAIL %s: %lld misses; first: %s", path.c_str(),
                                static_cast<long long>(check->different), check->detail.c_str()));
      }
    }
    table.row({path, report.contract, std::to_string(report.problems),
               std::to_string(report.exact.compared), std::to_string(report.exact.different),
               std::to_string(report.bounded.compared),
               report.bounded.worst >= 0.0 ? format("%.3f", report.bounded.worst) : "-",
               report.ok() ? "ok" : "FAIL"});
    Json item = Json::object();
    item.set("file", path).set("layout", report.layout).set("made_with", report.made_with);
    item.set("contract", report.contract).set("problems", report.problems);
    item.set("outputs", report.exact.compared + report.bounded.compared);
    item.set("differing", report.exact.different);
    item.set("worst_error", report.bounded.worst >= 0.0 ? Json(report.bounded.worst) : Json());
    item.set("exact", to_json(report.exact)).set("bounded", to_json(report.bounded));
    item.set("ok", report.ok());
    files.push(std::move(item));
    if (flags.fail_fast && failed != 0) break;
  }
  progress.clear();
  if (flags.json) {
    Json out = Json::object();
    out.set("files", std::move(files)).set("failed", failed).set("ok", failed == 0);
    context.out.line(out.dump(2));
  } else {
    context.out.write(table.text());
    for (const std::string& miss : misses) context.out.line(miss);
    context.out.line(
        format("%zu files, %lld failed", flags.vectors.size(), static_cast<long long>(failed)));
  }
  return failed == 0 ? static_cast<int>(kDone) : status;
}

class ModelVerifier {
 public:
  ModelVerifier(const Flags& flags, Context& context)
      : flags_(flags),
        context_(context),
        run_(flags.run.resolve()),
        checkpoint_(open_checkpoint(flags.model, run_)),
        loaded_(load_model(checkpoint_, run_, context)),
        progress_(context.progress) {
    options_.rows = parse_int_list("--rows", flags.rows, 1, 4096);
    std::sort(options_.rows.begin(), options_.rows.end());
    options_.rows.erase(std::unique(options_.rows.begin(), options_.rows.end()),
                        options_.rows.end());
    options_.facts = run_.facts;
    options_.activations = loaded_.model->activations();
    options_.precision = run_.model.precision;
    options_.accumulation = run_.model.accumulation;
    options_.segments = run_.model.segments;
    other_pool_ = value_or_throw(ThreadPool::create(run_.num_threads == 1 ? 3 : 1));
  }

  int run() {
    const std::int64_t layers = loaded_.model->config().num_hidden_layers;
    LayerRange range{0, layers - 1};
    if (!flags_.layers.empty()) range = parse_layers(flags_.layers, layers);
    const Plant plant = parse_plant(flags_.plant);
    if (plant.site != PlantSite::none && plant.layer >= layers) {
      fail_usage(format("--plant: the model has %lld layers", static_cast<long long>(layers)));
    }

    std::vector<const Model::Op*> ops;
    for (const Model::Op& op : loaded_.model->ops()) {
      const std::int64_t layer = layer_of(op.path);
      const bool inside = layer >= range.first && layer <= range.last;
      if (inside || (layer < 0 && flags_.layers.empty())) ops.push_back(&op);
    }
    bool stopped = false;
    for (std::size_t i = 0; i < ops.size() && !stopped; ++i) {
      progress_.update(ops[i]->path, static_cast<std::int64_t>(i),
                       static_cast<std::int64_t>(ops.size()));
      reports_.push_back(check(*ops[i], plant, i));
      stopped = flags_.fail_fast && !reports_.back().ok();
    }
    if (!stopped) {
      model_checks_ =
          check_model(loaded_.model, options_.precision, flags_.tokens,
                      static_cast<std::uint64_t>(flags_.seed), *loaded_.pool, *other_pool_,
                      [this](std::string_view what) { progress_.update(what, 0, 0); });
    }
    progress_.clear();
    return report();
  }

 private:
  OpReport check(const Model::Op& op, const Plant& plant, std::size_t index) {
    OpSubject subject{op, {}};
    if (op.is_swiglu) {
      for (const char* name : {".gate_proj", ".up_proj"}) {
        const std::string module = op.path + name;
        subject.parts.push_back({module, value_or_throw(checkpoint_->weight(module))});
      }
    } else {
      subject.parts.push_back({op.path, value_or_throw(checkpoint_->weight(op.path))});
    }
    OpCheckOptions options = options_;
    options.seed = static_cast<std::uint64_t>(flags_.seed) * 1000003u + index;
    if (op.is_swiglu && layer_of(op.path) == plant.layer) {
      if (plant.site == PlantSite::kernel) options.plant_kernel_fault = true;
      if (plant.site == PlantSite::weight || plant.site == PlantSite::scale) {
        const QuantizedTensor gate = damaged(subject.parts[0].source, plant.site);
        subject.op.weight = value_or_throw(
            pack(op.plan, gate.view(), subject.parts[1].source, cpu_stream(*loaded_.pool)));
      }
    }
    OpReport report;
    try {
      report = check_op(subject, options, *loaded_.pool, *other_pool_);
    } catch (const Exception& error) {
      if (error.code() == Errc::interrupted) throw;
      // A refusal is this module's result; the others still run.
      report.path = op.path;
      report.checks.push_back({});
      report.checks.back().name = "run";
      report.checks.back().miss(error.what());
    }
    for (const OpSubject::Part& part : subject.parts) checkpoint_->release(part.module);
    return report;
  }

  int report() {
    std::int64_t checks = 0;
    std::int64_t failed = 0;
    UlpHistogram ulps;
    for (const OpReport& report : reports_) {
      ulps.add(report.ulps);
      for (const CheckResult& check : report.checks) {
        checks += check.applies();
        failed += !check.ok;
      }
    }
    for (const CheckResult& check : model_checks_) {
      checks += check.applies();
      failed += !check.ok;
    }
    if (flags_.json) {
      print_json(ulps, checks, failed);
    } else {
      print_text(ulps, checks, failed);
    }
    return failed == 0 ? kDone : kCheckFailed;
  }

  std::string contract() const {
    const Plan& plan = loaded_.model->ops().front().plan;
    std::string text = to_string(plan.accumulation());
    if (plan.accumulation() == Accumulation::tensor) {
      text += "/" + std::to_string(plan.segments());
    }
    return text;
  }

  void print_json(const UlpHistogram& ulps, std::int64_t checks, std::int64_t failed) {
    Json ops = Json::array();
    for (const OpReport& report : reports_) ops.push(to_json(report));
    Json model = Json::array();
    for (const CheckResult& check : model_checks_) model.push(to_json(check));
    Json out = Json::object();
    out.set("model", flags_.model).set("activations", to_string(options_.activations));
    out.set("precision", to_string(options_.precision)).set("accumulation", contract());
    out.set("isa", to_string(options_.facts.isa)).set("threads", run_.num_threads);
    out.set("rows", Json::array_of(options_.rows)).set("seed", flags_.seed);
    out.set("ops", std::move(ops)).set("model_checks", std::move(model));
    out.set("ulps", to_json(ulps)).set("checks", checks).set("failed", failed);
    out.set("ok", failed == 0);
    context_.out.line(out.dump(2));
  }

  void print_text(const UlpHistogram& ulps, std::int64_t checks, std::int64_t failed) {
    context_.out.line(format("%s: activations %s, %s, sums %s, %s, %d threads, M %s",
                             flags_.model.c_str(), to_string(options_.activations),
                             to_string(options_.precision), contract().c_str(),
                             to_string(options_.facts.isa), run_.num_threads, flags_.rows.c_str()));
    std::vector<Table::Column> columns = {{"module"}, {"weight"}};
    for (const std::string& name : op_check_names()) columns.push_back({name});
    Table table(columns);
    for (const OpReport& report : reports_) {
      std::vector<std::string> cells = {report.path, report.shape};
      for (const std::string& name : op_check_names()) {
        cells.push_back(cell(report.checks, name));
      }
      table.row(std::move(cells));
    }
    context_.out.write(table.text());
    for (const CheckResult& check : model_checks_) {
      context_.out.line(format("model, %s: %s (%lld logits)", check.name.c_str(),
                               check.ok ? "ok" : "FAIL", static_cast<long long>(check.compared)));
    }
    std::string line = "steps of the type from float64:";
    for (std::size_t i = 0; i < ulps.counts.size(); ++i) {
      line += format("  %s: %lld", std::string(UlpHistogram::kNames[i]).c_str(),
                     static_cast<long long>(ulps.counts[i]));
    }
    context_.out.line(line);
    for (const OpReport& report : reports_) {
      for (const std::string& note : report.notes) context_.out.line("note: " + note);
      for (const CheckResult& check : report.checks) print_miss(report.path, check);
    }
    for (const CheckResult& check : model_checks_) print_miss("model", check);
    context_.out.line(format("%lld checks, %lld failed", static_cast<long long>(checks),
                             static_cast<long long>(failed)));
  }

  void print_miss(const std::string& where, const CheckResult& check) {
    if (check.ok) return;
    context_.out.line(format("FAIL %s, %s: %lld of %lld; first: %s", where.c_str(),
                             check.name.c_str(), static_cast<long long>(check.different),
                             static_cast<long long>(check.compared), check.detail.c_str()));
  }

  const Flags& flags_;
  Context& context_;
  RunOptions run_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  LoadedModel loaded_;
  std::unique_ptr<ThreadPool> other_pool_;
  OpCheckOptions options_;
  std::vector<OpReport> reports_;
  std::vector<CheckResult> model_checks_;
  Progress progress_;
};

int run_verify(const Flags& flags, Context& context) {
  context.progress = flags.run.progress();
  if (flags.model.empty() == flags.vectors.empty()) {
    fail_usage("verify: give a MODEL folder, or --vectors FILE...");
  }
  if (!flags.vectors.empty()) return run_vectors(flags, context);
  return ModelVerifier(flags, context).run();
}

}  // namespace

void add_verify(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "verify", "Prove a model's ops, bit for bit, on this machine; or check golden vectors");
  auto flags = std::make_shared<Flags>();
  command->add_option("model", flags->model, "Folder of an MLX checkpoint")->type_name("MODEL");
  command->add_option("--vectors", flags->vectors, "Golden files to check instead of a model")
      ->type_name("FILE");
  command->add_option("--layers", flags->layers, "Only these layers, such as 3 or 0-3")
      ->type_name("A-B");
  command->add_option("--rows", flags->rows, "Values of M to run (default 1,2,5,17,64)")
      ->type_name("M,...");
  add_int_option(*command, "--tokens", flags->tokens, 2, 4096,
                 "Tokens of the checks on the whole model (default 24)");
  add_int_option(*command, "--seed", flags->seed, 0, std::int64_t{1} << 62,
                 "Seed of the activations (default 1)");
  command->add_flag("--fail-fast", flags->fail_fast, "Stop at the first module that fails");
  command->add_flag("--json", flags->json, "One JSON object on standard output");
  command->add_option("--plant", flags->plant, "kernel|weight|scale[:LAYER]")->group("");
  flags->run.add_to(*command, kThreadOptions | kDeviceOptions | kNumericOptions | kMmapOptions |
                                  kProgressOptions);
  command->footer(kFooter);
  set_run(*command, context, [flags](Context& ctx) { return run_verify(*flags, ctx); });
}

}  // namespace qmlp::cli
