#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>

#include "base/float16.h"
#include "builtin_text.h"
#include "commands.h"
#include "context.h"
#include "format.h"
#include "io/output_file.h"
#include "json_out.h"
#include "kl_record.h"
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
  std::optional<std::string> record;
  std::optional<std::string> recorded;
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
    ids = value_or_throw(value_or_throw(Tokenizer::open(flags.model))->encode_prompt(text));
  }
  if (flags.positions > 0 && static_cast<std::int64_t>(ids.size()) > flags.positions) {
    ids.resize(static_cast<std::size_t>(flags.positions));
  }
  if (ids.empty()) fail_usage("no tokens to run");
  return ids;
}

// Positions that share one context: the whole text, cut where the model's context ends.
std::int64_t window_size(const Flags& flags, const ModelConfig& config, std::int64_t tokens) {
  const std::int64_t most = config.context_length > 0 ? config.context_length : 4096;
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

// Positions [begin, begin + tokens.size()) of the text, within the window that ends at window_end.
struct Chunk {
  std::int64_t begin = 0;
  std::span<const std::int32_t> tokens;
  bool new_window = false;
  std::int64_t window_end = 0;
};

template <class Run>
void for_each_chunk(std::span<const std::int32_t> tokens, std::int64_t window, Progress& progress,
                    Run&& run) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t start = 0; start < total; start += window) {
    const std::int64_t end = std::min(start + window, total);
    for (std::int64_t begin = start; begin < end; begin += kChunk) {
      check_stop();
      progress.update("position", begin, total);
      const auto count = static_cast<std::size_t>(std::min(kChunk, end - begin));
      run(Chunk{begin, tokens.subspan(static_cast<std::size_t>(begin), count), begin == start,
                end});
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

// Runs one mode over the text: for the best logits of each position, or to record all of them.
template <class Use>
void run_one_mode(const LoadedModel& loaded, const FusionOptions& fusion,
                  std::span<const std::int32_t> tokens, std::int64_t window, Context& context,
                  Use&& use) {
  const std::int64_t vocab = loaded.model->config().vocab_size;
  const auto session = make_session(loaded.model, fusion, window, {}, *loaded.pool);
  std::vector<float> logits(static_cast<std::size_t>(std::min(kChunk, window) * vocab));
  Progress progress(context.progress);
  for_each_chunk(tokens, window, progress, [&](const Chunk& chunk) {
    if (chunk.new_window) value_or_throw(session->truncate(0));
    const auto out = std::span(logits).first(chunk.tokens.size() * static_cast<std::size_t>(vocab));
    value_or_throw(session->forward(chunk.tokens, Logits::all, out));
    use(chunk, out);
  });
}

int run_top_logits(const Flags& flags, const RunOptions& options, Context& context) {
  const auto checkpoint = open_checkpoint(flags.model, options);
  const auto vocab = static_cast<std::size_t>(checkpoint->config().vocab_size);
  const std::vector<std::int32_t> tokens = read_tokens(flags, checkpoint->config());
  const std::int64_t window =
      window_size(flags, checkpoint->config(), static_cast<std::int64_t>(tokens.size()));
  const LoadedModel loaded = load_model(checkpoint, options, context);
  Json positions = Json::array();
  const auto add = [&](const Chunk& chunk, std::span<const float> logits) {
    for (std::size_t i = 0; i < chunk.tokens.size(); ++i) {
      const auto row = logits.subspan(i * vocab, vocab);
      const auto ids = top_tokens(row, flags.top_logits);
      Json values = Json::array();
      for (const std::int32_t id : ids) {
        values.push(static_cast<double>(row[static_cast<std::size_t>(id)]));
      }
      positions.push(Json::object()
                         .set("position", chunk.begin + static_cast<std::int64_t>(i))
                         .set("token_id", chunk.tokens[i])
                         .set("ids", Json::array_of(ids))
                         .set("logits", std::move(values))
                         .set("logsumexp", log_sum_exp(row))
                         .take());
    }
  };
  run_one_mode(loaded, options.fusion, tokens, window, context, add);
  context.out.line(Json::object()
                       .set("model", flags.model)
                       .set("activations", to_string(loaded.model->activations()))
                       .set("window", window)
                       .set("token_ids", Json::array_of(tokens))
                       .set("positions", std::move(positions))
                       .dump(2));
  return kDone;
}

int run_record(const Flags& flags, const RunOptions& options, Context& context) {
  value_or_throw(OutputFile::check(*flags.record));
  const auto checkpoint = open_checkpoint(flags.model, options);
  const std::vector<std::int32_t> tokens = read_tokens(flags, checkpoint->config());
  const std::int64_t window =
      window_size(flags, checkpoint->config(), static_cast<std::int64_t>(tokens.size()));
  const LoadedModel loaded = load_model(checkpoint, options, context);
  LogitsRecorder recorder(*flags.record, tokens, window, checkpoint->config().vocab_size);
  run_one_mode(loaded, options.fusion, tokens, window, context,
               [&](const Chunk&, std::span<const float> logits) { recorder.write(logits); });
  recorder.finish();
  if (flags.json) {
    context.out.line(Json::object()
                         .set("model", flags.model)
                         .set("activations", to_string(loaded.model->activations()))
                         .set("recorded", *flags.record)
                         .set("positions", tokens.size())
                         .set("window", window)
                         .dump(2));
  } else {
    context.out.line(*flags.record + ": " + std::to_string(tokens.size()) + " positions, " +
                     to_string(loaded.model->activations()));
  }
  return kDone;
}

struct Comparison {
  KlSummary summary;
  std::vector<double> layer_errors;
  std::vector<std::int32_t> tokens;
  std::int64_t window = 0;
  std::string activations[2];
};

// Where the reference's logits come from: a second run in step with the test, or a recording.
struct Reference {
  std::shared_ptr<const Model> model;
  std::unique_ptr<Session> session;
  std::optional<LogitsRecording> recording;
};

void check_vocab(const Flags& flags, const std::string& other, std::int64_t have,
                 std::int64_t need) {
  if (have == need) return;
  fail_usage(other + ": has " + std::to_string(have) + " tokens, " + flags.model + " has " +
             std::to_string(need));
}

Comparison compare(const Flags& flags, const RunOptions& options, const Mode& reference_mode,
                   const Mode& test_mode, Context& context) {
  Comparison result;
  const auto checkpoint = open_checkpoint(flags.model, options);
  const std::int64_t vocab = checkpoint->config().vocab_size;
  auto reference_checkpoint = checkpoint;
  if (flags.reference_model) {
    reference_checkpoint = open_checkpoint(*flags.reference_model, options);
    check_vocab(flags, *flags.reference_model, reference_checkpoint->config().vocab_size, vocab);
  }
  Reference reference;
  if (flags.recorded) {
    reference.recording.emplace(*flags.recorded);
    check_vocab(flags, *flags.recorded, reference.recording->vocab_size(), vocab);
    result.tokens = reference.recording->tokens();
    result.window = reference.recording->window();
  } else {
    result.tokens = read_tokens(flags, checkpoint->config());
    result.window =
        window_size(flags, checkpoint->config(), static_cast<std::int64_t>(result.tokens.size()));
  }

  RunOptions run = options;
  run.model = test_mode.model;
  const LoadedModel test = load_model(checkpoint, run, context);
  result.activations[0] = "recorded";
  result.activations[1] = to_string(test.model->activations());
  LayerErrors errors;
  std::function<void(const TapEvent&)> test_observer;
  if (!flags.recorded) {
    reference.model = test.model;
    if (flags.reference_model || !reference_mode.same_weights(test_mode)) {
      run.model = reference_mode.model;
      reference.model = load_model(reference_checkpoint, run, context).model;
    }
    result.activations[0] = to_string(reference.model->activations());
    std::function<void(const TapEvent&)> observer;
    const ModelConfig& a = reference.model->config();
    const ModelConfig& b = test.model->config();
    if (a.num_hidden_layers == b.num_hidden_layers && a.hidden_size == b.hidden_size) {
      observer = [&errors](const TapEvent& event) { errors.reference(event); };
      test_observer = [&errors](const TapEvent& event) { errors.test(event); };
    }
    reference.session =
        make_session(reference.model, reference_mode.fusion, result.window, observer, *test.pool);
  }
  const auto test_session =
      make_session(test.model, test_mode.fusion, result.window, test_observer, *test.pool);

  const auto chunk_floats = static_cast<std::size_t>(std::min(kChunk, result.window) * vocab);
  std::vector<float> reference_logits(chunk_floats);
  std::vector<float> test_logits(chunk_floats);
  std::vector<PositionStats> stats;
  Progress progress(context.progress);
  for_each_chunk(result.tokens, result.window, progress, [&](const Chunk& chunk) {
    if (chunk.new_window) {
      if (reference.session) value_or_throw(reference.session->truncate(0));
      value_or_throw(test_session->truncate(0));
    }
    errors.next_chunk();
    const std::size_t count = chunk.tokens.size() * static_cast<std::size_t>(vocab);
    const auto a = std::span(reference_logits).first(count);
    const auto b = std::span(test_logits).first(count);
    if (reference.session) {
      value_or_throw(reference.session->forward(chunk.tokens, Logits::all, a));
    } else {
      reference.recording->read(chunk.begin, a);
    }
    value_or_throw(test_session->forward(chunk.tokens, Logits::all, b));
    std::vector<std::int32_t> next;
    for (std::size_t i = 0; i < chunk.tokens.size(); ++i) {
      const std::int64_t at = chunk.begin + static_cast<std::int64_t>(i) + 1;
      next.push_back(at < chunk.window_end ? result.tokens[static_cast<std::size_t>(at)] : -1);
    }
    const auto rows = compare_logits(a, b, vocab, next, *test.pool);
    stats.insert(stats.end(), rows.begin(), rows.end());
  });
  result.summary = summarize(stats);
  result.layer_errors = errors.relative_rms();
  return result;
}

void check_flags(const Flags& flags) {
  const bool comparing = flags.reference || flags.test || flags.reference_model || flags.fail_above;
  if (flags.top_logits > 0) {
    if (comparing || flags.recorded || flags.record) {
      fail_usage(
          "--top-logits runs one mode: use --activations and the like, not --reference, "
          "--test, --reference-model, --fail-above, --record or --recorded");
    }
    if (!flags.json) fail_usage("--top-logits needs --json");
  }
  if (flags.record && (comparing || flags.recorded)) {
    fail_usage(
        "--record runs one mode: use --activations and the like, not --reference, --test, "
        "--reference-model, --fail-above or --recorded");
  }
  if (flags.recorded) {
    if (flags.reference || flags.reference_model) {
      fail_usage("--recorded is the reference: leave --reference and --reference-model out");
    }
    if (flags.prompt || flags.text_file || flags.ids_file || flags.prompt_ids ||
        flags.positions > 0 || flags.window > 0) {
      fail_usage(
          "--recorded brings its own tokens: leave -p, --text, --ids, --prompt-ids, "
          "--positions and --window out");
    }
  }
}

int run_kl(const Flags& flags, Context& context) {
  check_flags(flags);
  context.progress = flags.run.progress();
  const RunOptions options = flags.run.resolve();
  if (flags.top_logits > 0) return run_top_logits(flags, options, context);
  if (flags.record) return run_record(flags, options, context);
  const bool default_reference = !flags.reference && !flags.reference_model && !flags.recorded;
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
            .set("reference",
                 mode_json(flags.recorded.value_or(flags.reference_model.value_or(flags.model)),
                           reference, 0))
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
  command->add_option("--record", f.record, "Run one mode and write its logits to a file")
      ->type_name("FILE");
  command->add_option("--recorded", f.recorded, "Compare with the logits of such a file")
      ->type_name("FILE");
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
      "  qmlp kl MODEL --record f32.logits --activations f32 && qmlp kl MODEL --recorded "
      "f32.logits\n"
      "  qmlp kl MODEL --top-logits 8 --prompt-ids 1,2,3 --activations f32 --json");
  set_run(*command, context, [flags](Context& c) { return run_kl(*flags, c); });
}

}  // namespace qmlp::cli
