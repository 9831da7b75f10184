#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "qmlp/model.h"
#include "qmlp/plan.h"

namespace CLI {
class App;
}

namespace qmlp::cli {

struct Context;

// The switches that several commands share, resolved: an option beats its QMLP_* variable, which
// beats the default. Variables are read here alone, once.
struct RunOptions {
  int num_threads = 1;
  std::string threads_source;  // "--threads", "QMLP_THREADS" or "default"
  DeviceFacts facts;           // this machine, with --isa and --threads applied
  std::string isa_source;      // "--isa", "QMLP_ISA" or "default"
  ModelOptions model;
  FusionOptions fusion;
  std::string tap_gate;  // file that receives the raw gate projection; empty: none
  bool counts = false;
  CheckpointOptions checkpoint;
};

// Which of the shared options a command has.
enum OptionGroup : unsigned {
  kThreadOptions = 1,    // --threads
  kDeviceOptions = 128,  // --isa, --device
  kNumericOptions = 2,   // --activations, --precision, --accumulation
  kFusionOptions = 4,    // --fused, --fuse-min-m, --fused-max-calls, --poison-scratch
  kTapOptions = 8,       // --tap-gate
  kCountOptions = 16,    // --counts
  kMmapOptions = 32,     // --no-mmap
  kProgressOptions = 64  // --progress, --no-progress
};

class RunFlags {
 public:
  void add_to(CLI::App& command, unsigned groups);
  // Throws Exception: a bad value (naming option or variable), a device or instruction set that is
  // not here.
  RunOptions resolve() const;
  bool progress() const;

 private:
  unsigned groups_ = 0;
  std::optional<std::string> threads_, isa_, device_, activations_, precision_, accumulation_,
      fused_, fuse_min_m_, fused_max_calls_, tap_gate_;
  int poison_scratch_ = 0;  // > 0: asked for, < 0: refused
  int progress_ = 0;
  bool counts_ = false;
  bool no_mmap_ = false;
};

// The thread counts of a --threads list, else QMLP_THREADS, else what this process may use.
std::vector<std::int64_t> resolve_thread_list(const std::optional<std::string>& text);

// Options whose text is checked by parse.h, so that every message has the same form.
void add_int_option(CLI::App& command, const std::string& names, std::int64_t& value,
                    std::int64_t min, std::int64_t max, const std::string& help);
void add_double_option(CLI::App& command, const std::string& names, std::optional<double>& value,
                       double min, double max, const std::string& help);
// Calls `run` with the resolved options when the command line names `command`.
void set_run(CLI::App& command, Context& context, std::function<int(Context&)> run);

}  // namespace qmlp::cli
