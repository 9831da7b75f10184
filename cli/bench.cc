#include <CLI/CLI.hpp>
#include <algorithm>

#include "bench_case.h"
#include "bench_model.h"
#include "bench_plot.h"
#include "commands.h"
#include "context.h"
#include "format.h"
#include "io/output_file.h"
#include "json_out.h"
#include "machine.h"
#include "machine_limits.h"
#include "model_loading.h"
#include "options.h"
#include "parse.h"
#include "progress.h"
#include "qmlp/quant.h"
#include "qmlp/version.h"

namespace qmlp::cli {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kRotateCap = 1536 * kMiB;

struct Flags {
  RunFlags run;
  std::string model;
  std::vector<std::string> shapes;
  std::optional<std::string> M;
  std::vector<std::string> bits;
  std::optional<std::string> group;
  std::optional<std::string> threads;
  std::optional<std::string> json;
  std::optional<std::string> plot;
  std::optional<double> seconds;
  std::int64_t rotate_mib = 0;
  std::int64_t min_runs = 5;
  bool quick = false;
};

// "4" or "4,8": gate and up.
std::pair<int, int> pair_of(const std::string& name, const std::string& text) {
  const auto values = parse_int_list(name, text, 1, 1024);
  if (values.size() > 2) fail_usage(name + ": \"" + text + "\" is not one value or gate,up");
  return {static_cast<int>(values.front()), static_cast<int>(values.back())};
}

void add_shape(std::vector<BenchShape>& shapes, const BenchShape& shape) {
  value_or_throw(validate(shape.gate));
  value_or_throw(validate(shape.up));
  const bool known = std::any_of(shapes.begin(), shapes.end(), [&](const BenchShape& s) {
    return s.hidden == shape.hidden && s.intermediate == shape.intermediate &&
           s.gate == shape.gate && s.up == shape.up;
  });
  if (!known) shapes.push_back(shape);
}

// The different gate and up formats of a model's layers.
std::vector<BenchShape> model_shapes(const Checkpoint& checkpoint) {
  std::vector<BenchShape> shapes;
  for (std::int64_t layer = 0; layer < checkpoint.config().num_hidden_layers; ++layer) {
    const std::string mlp = "model.layers." + std::to_string(layer) + ".mlp.";
    const ModuleInfo* gate = checkpoint.find_module(mlp + "gate_proj");
    const ModuleInfo* up = checkpoint.find_module(mlp + "up_proj");
    if (gate == nullptr || up == nullptr) continue;
    add_shape(shapes, {gate->K, gate->N, gate->spec, up->spec});
  }
  return shapes;
}

std::vector<BenchShape> option_shapes(const Flags& flags, DType activation) {
  const DType scales = activation == DType::f32 ? DType::f16 : activation;
  const auto groups = pair_of("--group", flags.group.value_or("64"));
  std::vector<BenchShape> shapes;
  for (const std::string& text : flags.shapes) {
    const auto sides = parse_int_list("--shape", text, 1, 1 << 24);
    if (sides.size() != 2) {
      fail_usage("--shape: \"" + text + "\" is not HIDDEN,INTERMEDIATE");
    }
    for (const std::string& bits_text : flags.bits) {
      const auto bits = pair_of("--bits", bits_text);
      add_shape(shapes, {sides[0],
                         sides[1],
                         {bits.first, groups.first, scales},
                         {bits.second, groups.second, scales}});
    }
  }
  return shapes;
}

struct Rotation {
  std::uint64_t bytes = 0;
  std::string note;  // why it is less than three times the last-level cache; empty when it is not
};

Rotation choose_rotation(const Flags& flags, const MachineInfo& machine) {
  const std::uint64_t cache = machine.last_level_cache_bytes();
  const std::uint64_t wanted = std::max<std::uint64_t>(3 * cache, 64 * kMiB);
  Rotation rotation{wanted, ""};
  std::uint64_t cap = kRotateCap;
  if (const std::uint64_t available = available_memory_bytes(); available > 0) {
    cap = std::min(cap, available / 4);  // quantized and dense copies, and the limit's buffer
  }
  rotation.bytes = flags.rotate_mib > 0 ? static_cast<std::uint64_t>(flags.rotate_mib) * kMiB
                                        : std::min(wanted, cap);
  if (rotation.bytes < 3 * cache) {
    rotation.note = "weights rotate through " + human_bytes(rotation.bytes) +
                    ", less than 3 x the last-level cache of " + human_bytes(cache) +
                    ": some reads may hit it";
  }
  return rotation;
}

struct ThreadResults {
  MachineLimits limits;
  std::vector<std::pair<BenchShape, BenchCaseResult>> cases;
  std::optional<ModelSpeed> model;
};

Json row_json(const BenchShape& shape, const BenchSettings& settings, int threads,
              const BenchRow& row) {
  Json json = Json::object();
  json.set("hidden", shape.hidden);
  json.set("intermediate", shape.intermediate);
  json.set("gate_bits", shape.gate.bits);
  json.set("gate_group", shape.gate.group_size);
  json.set("up_bits", shape.up.bits);
  json.set("up_group", shape.up.group_size);
  json.set("scale_dtype", to_string(shape.gate.scale_dtype));
  json.set("activations", to_string(settings.activation));
  json.set("threads", threads);
  json.set("M", row.M);
  json.set("variant", row.variant);
  json.set("kernel", row.kernel);
  json.set("copies", row.copies);
  json.set("packed_bytes", row.packed_bytes);
  json.set("runs", row.runs);
  json.set("median_us", row.median_us);
  json.set("p10_us", row.p10_us);
  json.set("p90_us", row.p90_us);
  json.set("min_us", row.min_us);
  json.set("bytes", row.bytes);
  json.set("flops", row.flops);
  json.set("gb_per_s", 1e-3 * row.bytes / row.median_us);
  json.set("gflop_per_s", 1e-3 * row.flops / row.median_us);
  json.set("limit_us", row.limit_us);
  json.set("bound", row.memory_bound ? "memory" : "compute");
  json.set("percent_of_limit", row.percent_of_limit);
  return json;
}

Json model_json(const ModelSpeed& speed) {
  return Json::object()
      .set("threads", speed.threads)
      .set("prefill_tokens", speed.prefill_tokens)
      .set("prefill_tokens_per_s", speed.prefill_tokens_per_s)
      .set("prefill_percent_of_peak", speed.prefill_percent_of_peak)
      .set("decode_tokens", speed.decode_tokens)
      .set("decode_tokens_per_s", speed.decode_tokens_per_s)
      .set("decode_p10_us", speed.decode_p10_us)
      .set("decode_p90_us", speed.decode_p90_us)
      .set("bytes_per_token", speed.bytes_per_token)
      .set("percent_of_bandwidth", speed.percent_of_bandwidth)
      .take();
}

Json bench_json(const Flags& flags, const BenchSettings& settings, const RunOptions& options,
                const MachineInfo& machine, const Rotation& rotation,
                const std::vector<ThreadResults>& results, const Context& context) {
  Json limits = Json::array();
  Json rows = Json::array();
  Json models = Json::array();
  for (const ThreadResults& r : results) {
    limits.push(Json::object()
                    .set("threads", r.limits.threads)
                    .set("read_gb_per_s", 1e-9 * r.limits.read_bytes_per_s)
                    .set("fma_gflop_per_s", 1e-9 * r.limits.flops_per_s)
                    .take());
    for (const auto& [shape, result] : r.cases) {
      for (const BenchRow& row : result.rows) {
        rows.push(row_json(shape, settings, r.limits.threads, row));
      }
    }
    if (r.model) models.push(model_json(*r.model));
  }
  Json json = Json::object();
  json.set("version", version());
  json.set("build", build_type_text());
  json.set("compiler", compiler_text());
  json.set("command", context.command_line);
  json.set("cpu", machine.cpu);
  json.set("system", machine.system);
  json.set("isa", to_string(options.facts.isa));
  json.set("last_level_cache_bytes", machine.last_level_cache_bytes());
  json.set("rotate_bytes", rotation.bytes);
  if (!rotation.note.empty()) json.set("note", rotation.note);
  json.set("limits", std::move(limits));
  json.set("rows", std::move(rows));
  if (!flags.model.empty()) {
    json.set("model", flags.model);
    json.set("model_runs", std::move(models));
  }
  return json;
}

void print_header(const RunOptions& options, const MachineInfo& machine, const Rotation& rotation,
                  Output& out) {
  out.line(std::string("qmlp ") + version() + ", " + build_type_text() + " build, " +
           compiler_text() + "; " + machine.cpu + ", " + to_string(options.facts.isa));
  if (!rotation.note.empty()) out.line("note: " + rotation.note);
}

void print_case(const BenchShape& shape, const BenchSettings& settings,
                const ThreadResults& results, const BenchCaseResult& result, Output& out) {
  out.line(
      format("\n%s, activations %s, %d thread%s (limits %.1f GB/s, %.0f GFLOP/s); fused = "
             "unfused to the bit",
             shape_text(shape).c_str(), to_string(settings.activation), results.limits.threads,
             results.limits.threads == 1 ? "" : "s", 1e-9 * results.limits.read_bytes_per_s,
             1e-9 * results.limits.flops_per_s));
  Table table({{"M", true},
               {"variant"},
               {"median us", true},
               {"p10", true},
               {"p90", true},
               {"GB/s", true},
               {"GFLOP/s", true},
               {"% of limit", true},
               {"bound"},
               {"runs", true},
               {"kernel"}});
  for (const BenchRow& row : result.rows) {
    table.row({std::to_string(row.M), row.variant, format("%.1f", row.median_us),
               format("%.1f", row.p10_us), format("%.1f", row.p90_us),
               format("%.2f", 1e-3 * row.bytes / row.median_us),
               format("%.1f", 1e-3 * row.flops / row.median_us),
               format("%.1f", row.percent_of_limit), row.memory_bound ? "memory" : "compute",
               std::to_string(row.runs), row.kernel});
  }
  out.write(table.text());
  out.flush();
}

void print_model(const ModelSpeed& speed, Output& out) {
  out.line(
      format("\nwhole model, %d thread%s: prefill %.1f tokens/s (M = %lld, %.1f%% of the FMA "
             "peak), decode %.1f tokens/s (token %.0f to %.0f us), %.1f MB a token, %.1f%% of "
             "the bandwidth",
             speed.threads, speed.threads == 1 ? "" : "s", speed.prefill_tokens_per_s,
             static_cast<long long>(speed.prefill_tokens), speed.prefill_percent_of_peak,
             speed.decode_tokens_per_s, speed.decode_p10_us, speed.decode_p90_us,
             1e-6 * speed.bytes_per_token, speed.percent_of_bandwidth));
  out.flush();
}

int run_bench(Flags& flags, Context& context) {
  context.progress = flags.run.progress();
  RunOptions options = flags.run.resolve();
  const auto thread_counts = resolve_thread_list(flags.threads);
  std::shared_ptr<const Checkpoint> checkpoint;
  BenchSettings settings;
  settings.activation = options.model.activations.value_or(DType::bf16);
  std::vector<BenchShape> shapes;
  if (!flags.model.empty()) {
    if (!flags.shapes.empty() || !flags.bits.empty() || flags.group) {
      fail_usage("give MODEL, or --shape with --bits and --group");
    }
    checkpoint = open_checkpoint(flags.model, options);
    const ModuleInfo* embedding = checkpoint->find_module("model.embed_tokens");
    if (!options.model.activations && embedding != nullptr) {
      settings.activation = embedding->spec.scale_dtype;
    }
    shapes = model_shapes(*checkpoint);
  } else {
    if (flags.shapes.empty()) flags.shapes = {"1536,4608"};
    if (flags.bits.empty()) flags.bits = {"4"};
    shapes = option_shapes(flags, settings.activation);
  }
  settings.M = parse_int_list("--m", flags.M.value_or(flags.quick ? "1,64" : "1,2,4,8,16,64,256"),
                              1, 1 << 20);
  settings.precision = options.model.precision;
  settings.accumulation = options.model.accumulation;
  settings.segments = options.model.segments;
  settings.seconds = flags.seconds.value_or(flags.quick ? 0.3 : 1.0);
  settings.min_runs = static_cast<int>(flags.min_runs);

  const bool json_to_stdout = flags.json && *flags.json == "-";
  constexpr auto kSpecial = OutputFile::Special::written;
  if (flags.json && !json_to_stdout) value_or_throw(OutputFile::check(*flags.json, kSpecial));
  if (flags.plot) value_or_throw(OutputFile::check(*flags.plot, kSpecial));
  // Without a file the table is all there is: nobody reads the rest.
  const bool writes_file = (flags.json && !json_to_stdout) || flags.plot;
  const MachineInfo machine = machine_info();
  const Rotation rotation = choose_rotation(flags, machine);
  settings.rotate_bytes = rotation.bytes;
  if (!json_to_stdout) print_header(options, machine, rotation, context.out);

  std::vector<ThreadResults> results;
  for (const std::int64_t threads : thread_counts) {
    ThreadResults& r = results.emplace_back();
    const auto pool = value_or_throw(ThreadPool::create(static_cast<int>(threads)));
    options.num_threads = options.facts.num_threads = static_cast<int>(threads);
    r.limits = measure_limits(options.facts.isa, rotation.bytes, *pool);
    for (const BenchShape& shape : shapes) {
      Progress progress(context.progress);
      r.cases.emplace_back(
          shape, run_bench_case(shape, settings, options.facts, r.limits, *pool, progress));
      progress.clear();
      if (!json_to_stdout) print_case(shape, settings, r, r.cases.back().second, context.out);
      if (!writes_file && context.out.reader_gone()) return kDone;
    }
    if (checkpoint != nullptr) {
      const LoadedModel loaded = load_model(checkpoint, options, context);
      r.model =
          measure_model(*checkpoint, loaded.model, options.fusion, r.limits, *loaded.pool, context);
      if (!json_to_stdout) print_model(*r.model, context.out);
    }
  }
  if (flags.plot) {
    std::vector<PlotPanel> panels;
    for (const ThreadResults& r : results) {
      for (const auto& [shape, result] : r.cases) {
        panels.push_back({shape_text(shape) + ", " + to_string(settings.activation) + ", threads " +
                              std::to_string(r.limits.threads),
                          result.rows});
      }
    }
    const std::string title = machine.cpu + ", " + to_string(options.facts.isa) + ", qmlp " +
                              version() + " " + build_type_text();
    value_or_throw(write_text_file(*flags.plot, plot_svg(panels, title), kSpecial));
  }
  if (flags.json) {
    const std::string text =
        bench_json(flags, settings, options, machine, rotation, results, context).dump(2) + "\n";
    if (json_to_stdout) {
      context.out.write(text);
    } else {
      value_or_throw(write_text_file(*flags.json, text, kSpecial));
    }
  }
  return kDone;
}

}  // namespace

void add_bench(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "bench", "Cold-weight speed of fused, unfused and dense, against the machine's own limits");
  const auto flags = std::make_shared<Flags>();
  Flags& f = *flags;
  command->add_option("MODEL", f.model, "Checkpoint folder: its shapes, and the whole model");
  command->add_option("--shape", f.shapes, "HIDDEN,INTERMEDIATE; may be repeated")
      ->type_name("H,I")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--m", f.M, "Tokens a call (default 1,2,4,8,16,64,256)")->type_name("M,...");
  command->add_option("--bits", f.bits, "Bits of gate and up: 4, or 4,8; may be repeated")
      ->type_name("B[,B]")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--group", f.group, "Group of gate and up (default 64)")->type_name("G[,G]");
  command->add_option("--threads", f.threads, "Thread counts to measure (QMLP_THREADS)")
      ->type_name("N,...");
  add_double_option(*command, "--seconds", f.seconds, 0.0, 3600.0,
                    "Time for each M, all variants together (default 1)");
  add_int_option(*command, "--min-runs", f.min_runs, 1, 1 << 20,
                 "Fewest runs of each variant (default 5)");
  add_int_option(*command, "--rotate-mib", f.rotate_mib, 1, 1 << 20,
                 "Weights to cycle through (default 3 x the last-level cache, at most 1536)");
  command->add_flag("--quick", f.quick, "M = 1 and 64, 0.3 seconds each");
  command->add_option("--json", f.json, "Write the results as JSON, - for standard output")
      ->type_name("FILE");
  command->add_option("--plot", f.plot, "Draw the percent of the limit over M as SVG")
      ->type_name("FILE");
  f.run.add_to(*command,
               kDeviceOptions | kNumericOptions | kFusionOptions | kMmapOptions | kProgressOptions);
  command->footer(
      "Examples:\n"
      "  qmlp bench --shape 4096,14336 --bits 4 --bits 4,8 --m 1,16,256 --threads 1,2\n"
      "  qmlp bench models/smollm2-135m --quick --json bench.json --plot bench.svg");
  set_run(*command, context, [flags](Context& c) { return run_bench(*flags, c); });
}

}  // namespace qmlp::cli
