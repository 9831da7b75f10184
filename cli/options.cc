#include "options.h"

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "context.h"
#include "parse.h"
#include "progress.h"

namespace qmlp::cli {
namespace {

struct Setting {
  std::string source;  // the option or variable that gave the text
  std::string text;
};

std::optional<Setting> setting(const char* option, const std::optional<std::string>& text,
                               const char* variable) {
  if (text) return Setting{option, *text};
  if (variable == nullptr) return std::nullopt;
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return Setting{variable, value};
}

void check_device(std::string_view text) {
  if (text == "cpu") return;
  if (text == "cuda" || text.starts_with("cuda:")) {
    if (text.size() > 4) parse_int("--device cuda", text.substr(5), 0, 1023);
    fail(Errc::device,
         "--device " + std::string(text) +
             ": the program runs models on CPUs; GPUs are for the library and the Python package");
  }
  fail_usage("--device: \"" + std::string(text) + "\" is not cpu, cuda or cuda:N");
}

Isa isa_from_name(std::string_view name) {
  if (name == "avx512") return Isa::avx512;
  return name == "avx2" ? Isa::avx2 : Isa::portable;
}

}  // namespace

void RunFlags::add_to(CLI::App& command, unsigned groups) {
  groups_ = groups;
  const std::string group = "Run options";
  if (groups & kThreadOptions) {
    command.add_option("--threads", threads_, "Threads (QMLP_THREADS; default: what may be used)")
        ->type_name("N")
        ->group(group);
  }
  if (groups & kDeviceOptions) {
    command.add_option("--device", device_, "cpu, or cuda[:N]")->type_name("DEV")->group(group);
    command.add_option("--isa", isa_, "Best instruction set: portable, avx2, avx512 (QMLP_ISA)")
        ->type_name("ISA")
        ->group(group);
  }
  if (groups & kNumericOptions) {
    command
        .add_option("--activations", activations_,
                    "bf16, f16 or f32 (default: the type of the embedding's scales)")
        ->type_name("T")
        ->group(group);
    command.add_option("--precision", precision_, "match or wide (QMLP_PRECISION; default match)")
        ->type_name("P")
        ->group(group);
    command.add_option("--accumulation", accumulation_, "f32 or tensor[/S], S = 1, 2, 4, 8")
        ->type_name("A")
        ->group(group);
  }
  if (groups & kFusionOptions) {
    command.add_option("--fused", fused_, "Fused SwiGLU on or off (QMLP_FUSED; default 1)")
        ->type_name("0|1")
        ->group(group);
    command.add_option("--fuse-min-m", fuse_min_m_, "Smallest M to fuse (QMLP_FUSE_MIN_M)")
        ->type_name("M")
        ->group(group);
    command
        .add_option("--fused-max-calls", fused_max_calls_,
                    "Fuse only the first N calls (QMLP_FUSED_MAX_CALLS)")
        ->type_name("N")
        ->group(group);
    command
        .add_flag("--poison-scratch,!--no-poison-scratch", poison_scratch_,
                  "Fill scratch with NaN before each layer (QMLP_POISON_SCRATCH)")
        ->group(group);
  }
  if (groups & kTapOptions) {
    command
        .add_option("--tap-gate", tap_gate_,
                    "Write the raw gate projections to a safetensors file (QMLP_TAP_GATE)")
        ->type_name("FILE")
        ->group(group);
  }
  if (groups & kCountOptions) {
    command.add_flag("--counts", counts_, "Report how often each kernel ran")->group(group);
  }
  if (groups & kMmapOptions) {
    command.add_flag("--no-mmap", no_mmap_, "Read the files into memory")->group(group);
  }
  if (groups & kProgressOptions) {
    command
        .add_flag("--progress,!--no-progress", progress_,
                  "Progress on standard error (default: when it is a terminal)")
        ->group(group);
  }
}

bool RunFlags::progress() const { return progress_ == 0 ? progress_by_default() : progress_ > 0; }

RunOptions RunFlags::resolve() const {
  RunOptions options;
  if (device_) check_device(*device_);
  options.facts = host_facts();
  options.num_threads = default_num_threads();
  options.threads_source = options.isa_source = "default";
  if (groups_ & kThreadOptions) {
    if (const auto s = setting("--threads", threads_, "QMLP_THREADS")) {
      options.num_threads = static_cast<int>(parse_int(s->source, s->text, 1, 1024));
      options.threads_source = s->source;
    }
  }
  if (groups_ & kDeviceOptions) {
    if (const auto s = setting("--isa", isa_, "QMLP_ISA")) {
      const std::string_view name = parse_isa(s->source, s->text);
      if (isa_from_name(name) > options.facts.isa) {
        fail(Errc::device, s->source + ": this machine has no " + std::string(name) +
                               "; its best is " + to_string(options.facts.isa));
      }
      options.facts.isa = isa_from_name(name);
      options.model.force_isa = name;
      options.isa_source = s->source;
    }
  }
  options.facts.num_threads = options.num_threads;
  if (groups_ & kNumericOptions) {
    if (activations_) options.model.activations = parse_dtype("--activations", *activations_);
    if (const auto s = setting("--precision", precision_, "QMLP_PRECISION")) {
      options.model.precision = parse_precision(s->source, s->text);
    }
    if (accumulation_) {
      const AccumulationChoice choice = parse_accumulation("--accumulation", *accumulation_);
      options.model.accumulation = choice.accumulation;
      options.model.segments = choice.segments;
    }
  }
  if (groups_ & kFusionOptions) {
    if (const auto s = setting("--fused", fused_, "QMLP_FUSED")) {
      options.fusion.fused = parse_switch(s->source, s->text);
    }
    if (const auto s = setting("--fuse-min-m", fuse_min_m_, "QMLP_FUSE_MIN_M")) {
      options.fusion.fuse_min_m = parse_int(s->source, s->text, 1);
    }
    if (const auto s = setting("--fused-max-calls", fused_max_calls_, "QMLP_FUSED_MAX_CALLS")) {
      options.fusion.fused_max_calls = parse_int(s->source, s->text, 0);
    }
    if (poison_scratch_ != 0) {
      options.fusion.poison_scratch = poison_scratch_ > 0;
    } else if (const auto s = setting("", std::nullopt, "QMLP_POISON_SCRATCH")) {
      options.fusion.poison_scratch = parse_switch(s->source, s->text);
    }
  }
  if (groups_ & kTapOptions) {
    if (const auto s = setting("--tap-gate", tap_gate_, "QMLP_TAP_GATE")) {
      options.tap_gate = s->text;
    }
  }
  options.counts = counts_;
  options.checkpoint.use_mmap = !no_mmap_;
  return options;
}

std::vector<std::int64_t> resolve_thread_list(const std::optional<std::string>& text) {
  const auto s = setting("--threads", text, "QMLP_THREADS");
  if (!s) return {default_num_threads()};
  return parse_int_list(s->source, s->text, 1, 1024);
}

void add_int_option(CLI::App& command, const std::string& names, std::int64_t& value,
                    std::int64_t min, std::int64_t max, const std::string& help) {
  const std::string name = names.substr(names.rfind(',') + 1);
  command
      .add_option_function<std::string>(
          names,
          [&value, name, min, max](const std::string& text) {
            value = parse_int(name, text, min, max);
          },
          help)
      ->type_name("N");
}

void add_double_option(CLI::App& command, const std::string& names, std::optional<double>& value,
                       double min, double max, const std::string& help) {
  const std::string name = names.substr(names.rfind(',') + 1);
  command
      .add_option_function<std::string>(
          names,
          [&value, name, min, max](const std::string& text) {
            value = parse_double(name, text, min, max);
          },
          help)
      ->type_name("X");
}

void set_run(CLI::App& command, Context& context, std::function<int(Context&)> run) {
  command.callback([&context, run = std::move(run)] { context.run = run; });
}

}  // namespace qmlp::cli
