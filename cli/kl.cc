#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>

#include "base/float16.h"
#include "builtin_text.h"
#include "commands.h"
#include "context.h"
#include "format.h"
#include "json_out.h"
#include "kl_stats.h"
#include "model_loading.h"
#include "options.h"
#include "parse.h"
#include "progress.h"
#include "qmlp/tokenizer.h"
#include "text/utf8.h"

namespace qmlp::cli {
namespace {

constexpr std::int64_t kChunk = 64;  // positions whose logits are held at once

struct Flags {
  RunFlags run;
  std::string model;
  std::optional<std::string> reference_model;
  std::optional<std::string> prompt;
  std::optional<std::string> text_file;
  std::optional<std::string> ids_file;
  std::optional<std::string> prompt_ids;
  std::optional<std::string> reference;
  std::optional<std::string> test;
  std::int64_t positions = 0;
  std::int64_t window = 0;
  std::int64_t top_logits = 0;
  std::optional<double> fail_above;
  bool json = false;
};

// One way to run a model: the shared options with the changes that --reference or --test names.
struct Mode {
  std::string text;
  ModelOptions model;
  FusionOptions fusion;
  bool same_weights(const Mode& other) const {
    return model.activations == other.model.activations &&
           model.precision == other.model.precision &&
           model.accumulation == other.model.accumulation &&
           model.segments == other.model.segments && model.force_isa == other.model.force_isa;
  }
};

Mode parse_mode(const std::string& option, const std::string& text, const RunOptions& base) {
  Mode mode{text, base.model, base.fusion};
  if (text.empty()) return mode;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    const std::string name = option + " " + std::string(key);
    if (key == "activations") {
      mode.model.activations = parse_dtype(name, value);
    } else if (key == "precision") {
      mode.model.precision = parse_precision(name, value);
    } else if (key == "accumulation") {
      const AccumulationChoice choice = parse_accumulation(name, value);
      mode.model.accumulation = choice.accumulation;
      mode.model.segments = choice.segments;
    } else if (key == "isa") {
      mode.model.force_isa = parse_isa(name, value);
    } else if (key == "fused") {
      mode.fusion.fused = parse_switch(name, value);
    } else {
      fail_usage(option + ": \"" + std::string(key) +
                 "\" is not activations, precision, accumulation, isa or fused");
    }
  }
  return mode;
}

std::vector<std::int32_t> read_tokens(const Flags& flags, const ModelConfig& config) {
  const int sources = flags.prompt.has_value() + flags.text_file.has_value() +
                      flags.ids_file.has_value() + flags.prompt_ids.has_value();
  if (sources > 1) fail_usage("give one of -p, --text, --ids and --prompt-ids");
  std::vector<std::int32_t> ids;
  if (flags.prompt_ids) {
    ids = parse_token_ids("--prompt-ids", *flags.prompt_ids, config.vocab_size);
  } else if (flags.ids_file) {
    ids = parse_token_ids(*flags.ids_file, read_input(*flags.ids_file), config.vocab_size);
  } else {
    const std::string text = flags.prompt      ? *flags.prompt
                             : flags.text_file ? read_input(*flags.text_file)
                                               : std::string(builtin_text());
    if (const auto at = text::find_invalid_utf8(text)) {
      fail_usage("the text is not valid UTF-8: byte " + std::to_string(*at));
    }
    ids = value_or_throw(value_or_throw(Tokenizer::open(flags.model))->encode(text));
  }
  if (flags.positions > 0 && static_cast<std::int64_t>(ids.size()) > flags.positions) {
    ids.resize(static_cast<std::size_t>(flags.positions));
  }
  if (ids.empty()) fail_usage("no tokens to run");
  return ids;
}

// Positions that share one context: the whole text, cut where the model's context ends.
std::int64_t window_size(const Flags& flags, const ModelConfig& config, std::int64_t tokens) {
  const std::int64_t most =
      config.max_position_embeddings > 0 ? config.max_position_embeddings : 4096;
  if (flags.window > most) {
    fail_usage("--window " + std::to_string(flags.window) + " is past the " + std::to_string(most) +
               " positions the model was made for");
  }
  return std::min(flags.window > 0 ? flags.window : std::min<std::int64_t>(most, 4096), tokens);
}

std::unique_ptr<Session> make_session(const std::shared_ptr<const Model>& model,
                                      const FusionOptions& fusion, std::int64_t window,
                                      std::function<void(const TapEvent&)> observer,
                                      ThreadPool& pool) {
  SessionOptions options;
  options.max_tokens = window;
  options.prefill_chunk = std::min(kChunk, window);
  options.fusion = fusion;
  options.observer = std::move(observer);
  return value_or_throw(Session::create(model, options, pool));
}

// Calls `run(begin, tokens, new_window)` for each chunk of the text, in order.
template <class Run>
void for_each_chunk(std::span<const std::int32_t> tokens, std::int64_t window, Progress& progress,
                    Run&& run) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t start = 0; start < total; start += window) {
    const std::int64_t end = std::min(start + window, total);
    for (std::int64_t begin = start; begin < end; begin += kChunk) {
      check_stop();
      progress.update("position", begin, total);
      const std::int64_t count = std::min(kChunk, end - begin);
      run(begin, tokens.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)),
          begin == start, end);
    }
  }
}

// How far the test run's residual stream is from the reference's, layer by layer.
class LayerErrors {
 public:
  void reference(const TapEvent& event) {
    if (event.tap != Tap::layer_out) return;
    std::vector<float>& rows = rows_[event.layer];
    const MatrixView& v = event.values;
    for (std::int64_t r = 0; r < v.rows; ++r) {
      for (std::int64_t c = 0; c < v.cols; ++c) {
        rows.push_back(load_float(v.data, v.dtype, r * v.row_stride + c));
      }
    }
  }
  void test(const TapEvent& event) {
    if (event.tap != Tap::layer_out) return;
    const std::vector<float>& rows = rows_[event.layer];
    std::size_t& next = next_[event.layer];
    Sums& sums = sums_[event.layer];
    const MatrixView& v = event.values;
    for (std::int64_t r = 0; r < v.rows; ++r) {
      for (std::int64_t c = 0; c < v.cols; ++c, ++next) {
        const double expected = rows[next];
        const double error = load_float(v.data, v.dtype, r * v.row_stride + c) - expected;
        sums.error += error * error;
        sums.reference += expected * expected;
      }
    }
  }
  void next_chunk() {
    for (auto& [layer, rows] : rows_) rows.clear();
    next_.clear();
  }
  std::vector<double> relative_rms() const {
    std::vector<double> values;
    for (const auto& [layer, sums] : sums_) {
      values.push_back(sums.reference > 0.0 ? std::sqrt(sums.error / sums.reference) : 0.0);
    }
    return values;
  }

 private:
  struct Sums {
    double error = 0.0;
    double reference = 0.0;
  };
  std::map<std::int64_t, std::vector<float>> rows_;
  std::map<std::int64_t, std::size_t> next_;
  std::map<std::int64_t, Sums> sums_;
};

int run_top_logits(const Flags& flags, const RunOptions& options, Context& context) {
  const auto checkpoint = open_checkpoint(flags.model, options);
  const std::int64_t vocab = checkpoint->config().vocab_size;
  const std::vector<std::int32_t> tokens = read_tokens(flags, checkpoint->config());
  const std::int64_t window =
      window_size(flags, checkpoint->config(), static_cast<std::int64_t>(tokens.size()));
  const LoadedModel loaded = load_model(checkpoint, options, context);
  const auto session = make_session(loaded.model, options.fusion, window, {}, *loaded.pool);
  std::vector<float> logits(static_cast<std::size_t>(std::min(kChunk, window) * vocab));
  Json positions = Json::array();
  Progress progress(context.progress);
  for_each_chunk(
      tokens, window, progress,
      [&](std::int64_t begin, std::span<const std::int32_t> chunk, bool fresh, std::int64_t) {
        if (fresh) value_or_throw(session->truncate(0));
        const std::span<float> out(logits.data(), chunk.size() * static_cast<std::size_t>(vocab));
        value_or_throw(session->forward(chunk, Logits::all, out));
        for (std::size_t i = 0; i < chunk.size(); ++i) {
          const auto row =
              out.subspan(i * static_cast<std::size_t>(vocab), static_cast<std::size_t>(vocab));
          const auto ids = top_tokens(row, flags.top_logits);
          Json values = Json::array();
          for (const std::int32_t id : ids) {
            values.push(static_cast<double>(row[static_cast<std::size_t>(id)]));
          }
          positions.push(Json::object()
                             .set("position", begin + static_cast<std::int64_t>(i))
                             .set("token_id", chunk[i])
                             .set("ids", Json::array_of(ids))
                             .set("logits", std::move(values))
                             .set("logsumexp", log_sum_exp(row))
                             .take());
        }
      });
  progress.clear();
  context.out.line(Json::object()
                       .set("model", flags.model)
                       .set("activations", to_string(loaded.model->activations()))
                       .set("window", window)
                       .set("token_ids", Json::array_of(tokens))
                       .set("positions", std::move(positions))
                       .dump(2));
  return kDone;
}

struct Comparison {
  KlSummary summary;
  std::vector<double> layer_errors;
  std::vector<std::int32_t> tokens;
  std::int64_t window = 0;
  std::string activations[2];
};

Comparison compare(const Flags& flags, const RunOptions& options, const Mode& reference_mode,
                   const Mode& test_mode, Context& context) {
  Comparison result;
  const auto checkpoint = open_checkpoint(flags.model, options);
  const std::int64_t vocab = checkpoint->config().vocab_size;
  auto reference_checkpoint = checkpoint;
  if (flags.reference_model) {
    reference_checkpoint = open_checkpoint(*flags.reference_model, options);
    if (reference_checkpoint->config().vocab_size != vocab) {
      fail_usage(*flags.reference_model + ": has " +
                 std::to_string(reference_checkpoint->config().vocab_size) + " tokens, " +
                 flags.model + " has " + std::to_string(vocab));
    }
  }
  result.tokens = read_tokens(flags, checkpoint->config());
  result.window =
      window_size(flags, checkpoint->config(), static_cast<std::int64_t>(result.tokens.size()));

  RunOptions run = options;
  run.model = test_mode.model;
  const LoadedModel test = load_model(checkpoint, run, context);
  auto reference = test.model;
  if (flags.reference_model || !reference_mode.same_weights(test_mode)) {
    run.model = reference_mode.model;
    reference = load_model(reference_checkpoint, run, context).model;
  }
  result.activations[0] = to_string(reference->activations());
  result.activations[1] = to_string(test.model->activations());
  const bool same_layers =
      reference->config().num_hidden_layers == test.model->config().num_hidden_layers &&
      reference->config().hidden_size == test.model->config().hidden_size;

  LayerErrors errors;
  std::function<void(const TapEvent&)> observers[2];
  if (same_layers) {
    observers[0] = [&errors](const TapEvent& event) { errors.reference(event); };
    observers[1] = [&errors](const TapEvent& event) { errors.test(event); };
  }
  const auto reference_session =
      make_session(reference, reference_mode.fusion, result.window, observers[0], *test.pool);
  const auto test_session =
      make_session(test.model, test_mode.fusion, result.window, observers[1], *test.pool);
  const auto chunk_floats = static_cast<std::size_t>(std::min(kChunk, result.window) * vocab);
  std::vector<float> reference_logits(chunk_floats);
  std::vector<float> test_logits(chunk_floats);
  std::vector<PositionStats> stats;
  Progress progress(context.progress);
  for_each_chunk(
      result.tokens, result.window, progress,
      [&](std::int64_t begin, std::span<const std::int32_t> chunk, bool fresh, std::int64_t end) {
        if (fresh) {
          value_or_throw(reference_session->truncate(0));
          value_or_throw(test_session->truncate(0));
        }
        errors.next_chunk();
        const std::size_t count = chunk.size() * static_cast<std::size_t>(vocab);
        const std::span<float> a(reference_logits.data(), count);
        const std::span<float> b(test_logits.data(), count);
        value_or_throw(reference_session->forward(chunk, Logits::all, a));
        value_or_throw(test_session->forward(chunk, Logits::all, b));
        std::vector<std::int32_t> next;
        for (std::size_t i = 0; i < chunk.size(); ++i) {
          const std::int64_t at = begin + static_cast<std::int64_t>(i) + 1;
          next.push_back(at < end ? result.tokens[static_cast<std::size_t>(at)] : -1);
        }
        const auto rows = compare_logits(a, b, vocab, next, *test.pool);
        stats.insert(stats.end(), rows.begin(), rows.end());
      });
  progress.clear();
  result.summary = summarize(stats);
  result.layer_errors = errors.relative_rms();
  return result;
}

int run_kl(const Flags& flags, Context& context) {
  context.progress = flags.run.progress();
  const RunOptions options = flags.run.resolve();
  if (flags.top_logits > 0) {
    if (flags.reference || flags.test || flags.reference_model || flags.fail_above) {
      fail_usage(
          "--top-logits runs one mode: use --activations and the like, not --reference, "
          "--test, --reference-model or --fail-above");
    }
    if (!flags.json) fail_usage("--top-logits needs --json");
    return run_top_logits(flags, options, context);
  }
  const bool default_reference = !flags.reference && !flags.reference_model;
  const Mode reference = parse_mode(
      "--reference", default_reference ? "activations=f32" : flags.reference.value_or(""), options);
  const Mode test = parse_mode("--test", flags.test.value_or(""), options);
  const Comparison result = compare(flags, options, reference, test, context);
  const KlSummary& s = result.summary;
  const bool failed = flags.fail_above && !(s.mean_kl <= *flags.fail_above);
  if (flags.json) {
    const auto mode_json = [&](const std::string& model, const Mode& mode, int index) {
      return Json::object()
          .set("model", model)
          .set("mode", mode.text)
          .set("activations", result.activations[index])
          .set("perplexity", index == 0 ? s.reference_perplexity : s.test_perplexity)
          .take();
    };
    context.out.line(
        Json::object()
            .set("reference", mode_json(flags.reference_model.value_or(flags.model), reference, 0))
            .set("test", mode_json(flags.model, test, 1))
            .set("positions", s.positions)
            .set("window", result.window)
            .set("mean_kl", s.mean_kl)
            .set("median_kl", s.median_kl)
            .set("p99_kl", s.p99_kl)
            .set("max_kl", s.max_kl)
            .set("max_kl_position", s.max_position)
            .set("argmax_agreement", s.argmax_agreement)
            .set("layer_relative_rms_error", Json::array_of(result.layer_errors))
            .dump(2));
  } else {
    Output& out = context.out;
    out.line(format("%lld positions in windows of %lld; reference %s%s, test %s%s",
                    static_cast<long long>(s.positions), static_cast<long long>(result.window),
                    result.activations[0].c_str(),
                    reference.text.empty() ? "" : (" (" + reference.text + ")").c_str(),
                    result.activations[1].c_str(),
                    test.text.empty() ? "" : (" (" + test.text + ")").c_str()));
    out.line(format("KL(reference || test): mean %.3e, median %.3e, 99%% %.3e, max %.3e at %lld",
                    s.mean_kl, s.median_kl, s.p99_kl, s.max_kl,
                    static_cast<long long>(s.max_position)));
    out.line(format("argmax agreement %.2f%%, perplexity %.4f and %.4f", 100.0 * s.argmax_agreement,
                    s.reference_perplexity, s.test_perplexity));
    if (!result.layer_errors.empty()) {
      Table table({{"layer", true}, {"relative RMS error", true}});
      for (std::size_t i = 0; i < result.layer_errors.size(); ++i) {
        table.row({std::to_string(i), format("%.3e", result.layer_errors[i])});
      }
      out.write(table.text());
    }
  }
  if (failed) {
    context.out.flush();
    print_error(format("mean KL %.3e is above --fail-above %.3e", s.mean_kl, *flags.fail_above));
  }
  return failed ? kCheckFailed : kDone;
}

}  // namespace

void add_kl(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("kl", "Teacher-forced agreement of two modes; perplexity");
  const auto flags = std::make_shared<Flags>();
  Flags& f = *flags;
  command->add_option("MODEL", f.model, "Checkpoint folder")->required();
  command->add_option("--reference", f.reference, "KEY=VALUE,... (default activations=f32)")
      ->type_name("MODE");
  command
      ->add_option("--test", f.test,
                   "KEY=VALUE,... of activations, precision, accumulation, isa, fused (default: "
                   "the run options)")
      ->type_name("MODE");
  command->add_option("--reference-model", f.reference_model, "Compare with another checkpoint")
      ->type_name("FOLDER");
  command->add_option("-p,--prompt", f.prompt, "Text to run (default: a built-in text)")
      ->type_name("TEXT");
  command->add_option("--text", f.text_file, "Text file to run, - for standard input")
      ->type_name("FILE");
  command->add_option("--ids", f.ids_file, "File of token ids")->type_name("FILE");
  command->add_option("--prompt-ids", f.prompt_ids, "Token ids: 1,2,3")->type_name("IDS");
  add_int_option(*command, "--positions", f.positions, 1, 1 << 30, "Run at most this many tokens");
  add_int_option(*command, "--window", f.window, 2, 1 << 30,
                 "Tokens that share a context (default: the model's, at most 4096)");
  add_int_option(*command, "--top-logits", f.top_logits, 1, 1 << 20,
                 "Instead of a comparison: the K best logits of each position (with --json)");
  add_double_option(*command, "--fail-above", f.fail_above, 0.0, 1e9,
                    "Exit with 1 when the mean KL is above this");
  command->add_flag("--json", f.json, "Print one JSON object");
  f.run.add_to(*command, kThreadOptions | kDeviceOptions | kNumericOptions | kFusionOptions |
                             kMmapOptions | kProgressOptions);
  command->footer(
      "Examples:\n"
      "  qmlp kl MODEL --test activations=bf16 --fail-above 1e-2\n"
      "  qmlp kl MODEL --reference fused=0 --test fused=1\n"
      "  qmlp kl MODEL --test accumulation=tensor/1,activations=f16 --text book.txt\n"
      "  qmlp kl q4-model --reference-model q8-model\n"
      "  qmlp kl MODEL --top-logits 8 --prompt-ids 1,2,3 --activations f32 --json");
  set_run(*command, context, [flags](Context& c) { return run_kl(*flags, c); });
}

}  // namespace qmlp::cli
