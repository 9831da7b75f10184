#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>

#include "commands.h"
#include "context.h"
#include "format.h"
#include "gate_tap.h"
#include "io/output_file.h"
#include "json_out.h"
#include "model_loading.h"
#include "options.h"
#include "parse.h"
#include "qmlp/tokenizer.h"
#include "stop_filter.h"
#include "text/utf8.h"

namespace qmlp::cli {
namespace {

constexpr std::int64_t kPrefillChunk = 256;

struct Flags {
  RunFlags run;
  std::string model;
  std::string source;  // "-": standard input
  std::optional<std::string> text;
  std::optional<std::string> file;
  std::optional<std::string> ids;
  std::optional<std::string> system;
  std::string thinking;  // "on", "off", or empty: the template's default
  bool chat = false;
  bool bos = false;
  std::int64_t max_new = 256;
  std::int64_t ctx = 0;
  bool greedy = false;
  std::optional<double> temperature, top_p, min_p, repeat_penalty;
  std::int64_t top_k = 0;
  std::int64_t repeat_window = 64;
  std::int64_t seed = 0;
  std::vector<std::string> stops;
  bool ignore_eos = false;
  bool show_special = false;
  std::string cache_load;
  std::string cache_save;
  bool cache_append = false;
  bool json = false;
  bool quiet = false;
};

SamplingOptions sampling_options(const Flags& flags) {
  if (flags.greedy && flags.temperature.value_or(0.0) > 0.0) {
    fail_usage("--greedy and --temperature above 0 contradict each other");
  }
  SamplingOptions options;
  options.temperature = flags.temperature.value_or(0.0);
  if (options.temperature == 0.0) {
    const char* idle = flags.top_p       ? "--top-p"
                       : flags.min_p     ? "--min-p"
                       : flags.top_k > 0 ? "--top-k"
                                         : nullptr;
    if (idle != nullptr) {
      fail_usage(std::string(idle) + " needs --temperature above 0: greedy choice ignores it");
    }
  }
  options.top_p = flags.top_p.value_or(1.0);
  options.top_k = flags.top_k;
  options.min_p = flags.min_p.value_or(0.0);
  options.repeat_penalty = flags.repeat_penalty.value_or(1.0);
  options.repeat_window = flags.repeat_window;
  options.seed = static_cast<std::uint64_t>(flags.seed);
  value_or_throw(validate(options));
  return options;
}

void check_flags(const Flags& flags) {
  const int sources = !flags.source.empty() + flags.text.has_value() + flags.file.has_value() +
                      flags.ids.has_value();
  if (!flags.source.empty() && flags.source != "-") {
    fail_usage("prompt source: \"" + flags.source +
               "\" is not \"-\" (standard input); give text with -p, a file with -f");
  }
  if (sources != 1) {
    fail_usage(sources == 0 ? "no prompt: give -p TEXT, -f FILE, - (standard input) or --prompt-ids"
                            : "give one prompt: -p, -f, - or --prompt-ids");
  }
  if (flags.system && !flags.chat) fail_usage("--system needs --chat");
  if (!flags.thinking.empty() && !flags.chat) fail_usage("--thinking needs --chat");
  if (flags.chat && flags.ids) fail_usage("--chat makes a prompt from text, not from --prompt-ids");
  if (flags.chat && flags.bos)
    fail_usage("--bos: the chat template already says how a prompt starts");
  if (flags.cache_append && flags.cache_load.empty()) {
    fail_usage("--prompt-cache-append needs --prompt-cache-load");
  }
  for (const std::string& stop : flags.stops) {
    if (stop.empty()) fail_usage("--stop: needs a text");
    if (const auto at = text::find_invalid_utf8(stop)) {
      fail_usage("--stop: invalid UTF-8 at byte " + std::to_string(*at));
    }
  }
}

std::vector<std::int32_t> prompt_tokens(const Flags& flags, const ModelConfig& config,
                                        const Tokenizer* tokenizer) {
  std::vector<std::int32_t> ids;
  if (flags.ids) {
    ids = parse_token_ids("--prompt-ids", *flags.ids, config.vocab_size);
  } else {
    const std::string text = flags.text ? *flags.text : read_input(flags.file.value_or("-"));
    if (text.empty()) fail_usage("the prompt is empty");
    if (const auto at = text::find_invalid_utf8(text)) {
      fail_usage("the prompt is not valid UTF-8: byte " + std::to_string(*at));
    }
    if (flags.chat) {
      std::vector<ChatMessage> messages;
      if (flags.system) {
        if (const auto at = text::find_invalid_utf8(*flags.system)) {
          fail_usage("--system: invalid UTF-8 at byte " + std::to_string(*at));
        }
        messages.push_back({"system", *flags.system});
      }
      messages.push_back({"user", text});
      ChatOptions options;
      if (!flags.thinking.empty()) options.enable_thinking = flags.thinking == "on";
      ids = value_or_throw(tokenizer->encode_chat(messages, options));
    } else {
      // What follows a cache is no start of a text.
      ids = value_or_throw(flags.cache_append ? tokenizer->encode(text)
                                              : tokenizer->encode_prompt(text));
    }
  }
  if (flags.bos) {
    if (!config.bos_token_id) fail_usage("--bos: the model's config names no bos_token_id");
    // The tokenizer may have put it there.
    if (ids.empty() || ids.front() != *config.bos_token_id) {
      ids.insert(ids.begin(), *config.bos_token_id);
    }
  }
  if (ids.empty()) fail_usage("the prompt is empty");
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= config.vocab_size) {
      fail_usage("the tokenizer gives id " + std::to_string(id) + ", the model has " +
                 std::to_string(config.vocab_size) + " tokens");
    }
  }
  return ids;
}

// The context to allocate: --ctx, else just what the prompt and the answer need.
std::int64_t context_size(const Flags& flags, const ModelConfig& config, std::int64_t prompt) {
  const std::int64_t most = config.context_length;
  if (flags.ctx > 0) {
    if (most > 0 && flags.ctx > most) {
      fail_usage("--ctx " + std::to_string(flags.ctx) + " is past the " + std::to_string(most) +
                 " positions the model was made for");
    }
    return flags.ctx;
  }
  std::int64_t needed = prompt + flags.max_new;
  if (!flags.cache_load.empty()) needed = std::max<std::int64_t>(needed, 4096);
  return most > 0 ? std::min(needed, most) : needed;
}

void check_fits(std::int64_t prompt, std::int64_t ctx, bool ctx_given) {
  if (prompt <= ctx) return;
  fail_usage("the prompt has " + std::to_string(prompt) + " tokens, " +
             (ctx_given ? "--ctx holds " : "the model's context holds ") + std::to_string(ctx));
}

struct Outcome {
  std::vector<std::int32_t> token_ids;
  std::string text;
  const char* stop_reason = "length";
  std::int64_t reused = 0;  // prompt tokens that came from a cache
  double prefill_seconds = 0.0;
  double decode_seconds = 0.0;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Fills the cache with the prompt, reusing what a loaded cache already holds of it.
void prefill(Session& session, std::span<const std::int32_t> prompt, std::span<float> logits,
             const Context& context, Outcome& outcome) {
  const auto start = std::chrono::steady_clock::now();
  const auto cached = session.tokens();
  const auto mismatch = std::mismatch(cached.begin(), cached.end(), prompt.begin(), prompt.end());
  // The last token always runs again, since its logits are wanted.
  outcome.reused = std::min<std::int64_t>(mismatch.first - cached.begin(),
                                          static_cast<std::int64_t>(prompt.size()) - 1);
  if (outcome.reused < session.position()) value_or_throw(session.truncate(outcome.reused));
  run_prompt(session, prompt.subspan(static_cast<std::size_t>(outcome.reused)), kPrefillChunk,
             logits, context);
  outcome.prefill_seconds = seconds_since(start);
}

// Shows text as it becomes complete.
class TextSink {
 public:
  TextSink(const Flags& flags, const Tokenizer* tokenizer, Context& context)
      : filter_(flags.stops),
        tokenizer_(tokenizer),
        context_(context),
        stream_(!flags.json),
        show_special_(flags.show_special) {
    if (tokenizer != nullptr) detokenizer_.emplace(*tokenizer);
  }

  void token(std::int32_t id) {
    if (tokenizer_ == nullptr) {
      if (stream_) emit(std::to_string(id) + " ");
      return;
    }
    if (!show_special_ && tokenizer_->is_special(id)) return;
    // A padding row of the embedding has no text.
    emit(filter_.push(detokenizer_->push(id)));
  }
  bool stopped() const { return filter_.stopped(); }
  std::string finish() {
    if (!stopped() && detokenizer_) emit(filter_.push(detokenizer_->finish()));
    emit(filter_.finish());
    if (stream_ && !text_.empty() && text_.back() != '\n') context_.out.write("\n");
    context_.out.flush();
    return text_;
  }

 private:
  void emit(const std::string& text) {
    text_ += text;
    if (!stream_ || text.empty()) return;
    context_.out.write(text);
    context_.out.flush();
  }

  std::optional<Detokenizer> detokenizer_;
  StopFilter filter_;
  const Tokenizer* tokenizer_;
  Context& context_;
  bool stream_;
  bool show_special_;
  std::string text_;
};

void decode(const Flags& flags, Session& session, const ModelConfig& config, Sampler& sampler,
            std::vector<std::int32_t> history, std::span<float> logits, TextSink& sink,
            const Context& context, Outcome& outcome) {
  const auto start = std::chrono::steady_clock::now();
  const auto& ends = config.eos_token_ids;
  for (std::int64_t n = 0; n < flags.max_new; ++n) {
    if (stop_requested()) {
      outcome.stop_reason = "interrupted";
      break;
    }
    const std::int32_t token = sampler.sample(logits, history);
    outcome.token_ids.push_back(token);
    history.push_back(token);
    const bool end = std::find(ends.begin(), ends.end(), token) != ends.end();
    if (end && !flags.ignore_eos) {
      if (flags.show_special) sink.token(token);
      outcome.stop_reason = "end_token";
      break;
    }
    sink.token(token);
    if (context.out.reader_gone()) break;  // whoever read the text has seen enough
    if (sink.stopped()) {
      outcome.stop_reason = "stop_text";
      break;
    }
    if (n + 1 == flags.max_new) break;
    if (session.position() == session.max_tokens()) {
      outcome.stop_reason = "context";
      break;
    }
    value_or_throw(session.forward({&token, 1}, Logits::last, logits));
  }
  outcome.decode_seconds = seconds_since(start);
  outcome.text = sink.finish();
}

Json counts_json() {
  Json counts = Json::object();
  for (const KernelCount& count : dispatch_counts()) {
    counts.set(count.kernel, count.calls);
  }
  return counts;
}

double rate(std::int64_t count, double seconds) {
  return count > 0 && seconds > 0.0 ? static_cast<double>(count) / seconds : 0.0;
}

void report(const Flags& flags, const RunOptions& options, const LoadedModel& loaded,
            const Session& session, std::span<const std::int32_t> prompt, bool has_text,
            const Outcome& outcome, Context& context) {
  const auto prefilled = static_cast<std::int64_t>(prompt.size()) - outcome.reused;
  const auto generated = static_cast<std::int64_t>(outcome.token_ids.size());
  const double prefill_rate = rate(prefilled, outcome.prefill_seconds);
  const double decode_rate = rate(generated - 1, outcome.decode_seconds);
  if (flags.json) {
    Json json = Json::object();
    json.set("model", flags.model);
    json.set("activations", to_string(loaded.model->activations()));
    json.set("device", "cpu");
    json.set("isa", to_string(options.facts.isa));
    json.set("threads", options.num_threads);
    json.set("switches", Json::object()
                             .set("fused", options.fusion.fused)
                             .set("fuse_min_m", options.fusion.fuse_min_m)
                             .set("fused_max_calls", options.fusion.fused_max_calls)
                             .set("poison_scratch", options.fusion.poison_scratch)
                             .set("precision", to_string(options.model.precision))
                             .take());
    json.set("prompt_ids", Json::array_of(prompt));
    json.set("token_ids", Json::array_of(outcome.token_ids));
    json.set("text", has_text ? Json(outcome.text) : Json());
    json.set("stop_reason", outcome.stop_reason);
    json.set("prompt_tokens", prompt.size());
    json.set("reused_tokens", outcome.reused);
    json.set("load_s", loaded.load_seconds);
    json.set("prefill_s", outcome.prefill_seconds);
    json.set("prefill_tokens_per_s", prefill_rate);
    json.set("decode_s", outcome.decode_seconds);
    json.set("decode_tokens_per_s", decode_rate);
    json.set("ctx", session.max_tokens());
    json.set("memory", Json::object()
                           .set("packed_bytes", loaded.model->packed_bytes())
                           .set("cache_bytes", session.cache_bytes())
                           .set("peak_rss_bytes", peak_rss_bytes())
                           .take());
    json.set("kernels", counts_json());
    context.out.line(json.dump(2));
    return;
  }
  if (options.counts) {
    for (const KernelCount& count : dispatch_counts()) {
      print_note(format("%12llu  %s\n", static_cast<unsigned long long>(count.calls),
                        std::string(count.kernel).c_str()));
    }
  }
  if (flags.quiet) return;
  print_note(format("prompt %zu tokens", prompt.size()));
  if (outcome.reused > 0) {
    print_note(format(" (%lld from the cache)", static_cast<long long>(outcome.reused)));
  }
  print_note(format(", %.1f tokens/s; generated %lld tokens, %.1f tokens/s; stopped: %s\n",
                    prefill_rate, static_cast<long long>(generated), decode_rate,
                    outcome.stop_reason));
  print_note("memory: weights " + human_bytes(loaded.model->packed_bytes()) + ", cache " +
             human_bytes(session.cache_bytes()) + ", peak " + human_bytes(peak_rss_bytes()) + "\n");
}

int run_generate(const Flags& flags, Context& context) {
  context.progress = flags.run.progress() && !flags.quiet;
  check_flags(flags);
  const SamplingOptions sampling = sampling_options(flags);
  RunOptions options = flags.run.resolve();
  if (!flags.cache_save.empty()) value_or_throw(OutputFile::check(flags.cache_save));
  if (!options.tap_gate.empty()) value_or_throw(OutputFile::check(options.tap_gate));
  const auto checkpoint = open_checkpoint(flags.model, options);
  const ModelConfig config = checkpoint->config();

  auto tokenizer = Tokenizer::open(flags.model);
  if (!tokenizer && !flags.ids) throw Exception(tokenizer.error());
  if (!tokenizer && !flags.stops.empty()) {
    fail_usage("--stop needs the model's tokenizer: " + tokenizer.error().message);
  }
  const Tokenizer* tokens = tokenizer ? tokenizer->get() : nullptr;
  std::vector<std::int32_t> prompt = prompt_tokens(flags, config, tokens);
  const std::int64_t ctx = context_size(flags, config, static_cast<std::int64_t>(prompt.size()));
  check_fits(static_cast<std::int64_t>(prompt.size()), ctx, flags.ctx > 0);

  const LoadedModel loaded = load_model(checkpoint, options, context);
  GateTap tap;
  SessionOptions session_options;
  session_options.max_tokens = ctx;
  session_options.prefill_chunk = std::min(kPrefillChunk, ctx);
  session_options.fusion = options.fusion;
  if (!options.tap_gate.empty()) {
    session_options.tap_gate = true;
    session_options.observer = [&tap](const TapEvent& event) { tap.record(event); };
  }
  const auto session = value_or_throw(Session::create(loaded.model, session_options, *loaded.pool));
  if (!flags.cache_load.empty()) {
    value_or_throw(session->load(flags.cache_load));
    if (flags.cache_append) {
      const auto cached = session->tokens();
      prompt.insert(prompt.begin(), cached.begin(), cached.end());
      check_fits(static_cast<std::int64_t>(prompt.size()), ctx, flags.ctx > 0);
    }
  }

  reset_dispatch_counts();
  Outcome outcome;
  std::vector<float> logits(static_cast<std::size_t>(config.vocab_size));
  prefill(*session, prompt, logits, context, outcome);
  Sampler sampler(sampling);
  TextSink sink(flags, tokens, context);
  decode(flags, *session, config, sampler, prompt, logits, sink, context, outcome);

  if (!flags.cache_save.empty()) value_or_throw(session->save(flags.cache_save));
  if (!options.tap_gate.empty()) tap.write(options.tap_gate);
  if (!context.out.reader_gone()) {
    report(flags, options, loaded, *session, prompt, tokens != nullptr, outcome, context);
  }
  return outcome.stop_reason == std::string_view("interrupted") ? kInterrupted : kDone;
}

}  // namespace

void add_generate(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand("generate", "Continue a prompt, streaming the text");
  const auto flags = std::make_shared<Flags>();
  Flags& f = *flags;
  command->add_option("MODEL", f.model, "Checkpoint folder")->required();
  command->add_option("SOURCE", f.source, "\"-\": read the prompt from standard input");
  command->add_option("-p,--prompt", f.text, "The prompt")->type_name("TEXT");
  command->add_option("-f,--file", f.file, "Read the prompt from a file, unchanged")
      ->type_name("FILE");
  command->add_option("--prompt-ids", f.ids, "The prompt as token ids: 1,2,3")->type_name("IDS");
  command->add_flag("--chat", f.chat, "Put the prompt into the model's chat template");
  command->add_option("--system", f.system, "System message (with --chat)")->type_name("TEXT");
  command
      ->add_option(
          "--thinking", f.thinking,
          "Whether a model that can think first does (with --chat; default: its template's)")
      ->check(CLI::IsMember({"on", "off"}))
      ->type_name("on|off");
  command->add_flag("--bos", f.bos, "Start a raw prompt with the model's bos token");
  add_int_option(*command, "-n,--max-tokens", f.max_new, 0, 1 << 30,
                 "Most tokens to generate (default 256)");
  add_int_option(*command, "--ctx", f.ctx, 1, 1 << 30,
                 "Context to allocate (default: what prompt and answer need)");
  command->add_flag("--greedy", f.greedy, "Take the likeliest token (the default)");
  add_double_option(*command, "--temperature", f.temperature, 0.0, 1e9,
                    "Sample at this temperature (default 0: greedy)");
  add_double_option(*command, "--top-p", f.top_p, 0.0, 1.0, "Smallest set with this probability");
  add_int_option(*command, "--top-k", f.top_k, 0, 1 << 30, "Only the k likeliest (0: all)");
  add_double_option(*command, "--min-p", f.min_p, 0.0, 1.0,
                    "Only tokens with this share of the likeliest one's probability");
  add_double_option(*command, "--repeat-penalty", f.repeat_penalty, 0.0, 1e9,
                    "Divide the logits of recent tokens by this (default 1)");
  add_int_option(*command, "--repeat-window", f.repeat_window, 0, 1 << 30,
                 "Recent tokens that the penalty sees (default 64)");
  add_int_option(*command, "--seed", f.seed, 0, std::numeric_limits<std::int64_t>::max(),
                 "Seed of sampling (default 0)");
  command->add_option("--stop", f.stops, "Stop before this text; may be repeated")
      ->type_name("TEXT")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  command->add_flag("--ignore-eos", f.ignore_eos, "Go on past end tokens");
  command->add_flag("--show-special", f.show_special, "Show special tokens in the text");
  command
      ->add_option("--prompt-cache-load", f.cache_load,
                   "Reuse what a saved cache has of the prompt")
      ->type_name("FILE");
  command->add_option("--prompt-cache-save", f.cache_save, "Save the cache at the end")
      ->type_name("FILE");
  command->add_flag("--prompt-cache-append", f.cache_append,
                    "The prompt follows the loaded cache's tokens");
  command->add_flag("--json", f.json, "Print one JSON object");
  command->add_flag("-q,--quiet", f.quiet, "No statistics, no progress");
  f.run.add_to(*command, kThreadOptions | kDeviceOptions | kNumericOptions | kFusionOptions |
                             kTapOptions | kCountOptions | kMmapOptions | kProgressOptions);
  command->footer(
      "Examples:\n"
      "  qmlp generate MODEL --chat -p 'What is the capital of France?' -n 40\n"
      "  git log -1 | qmlp generate MODEL - --temperature 0.8 --top-p 0.95 --seed 7\n"
      "  qmlp generate MODEL -f long.txt --prompt-cache-save long.cache -n 0\n"
      "  qmlp generate MODEL --prompt-ids 1,2,3 --greedy --json");
  set_run(*command, context, [flags](Context& c) { return run_generate(*flags, c); });
}

}  // namespace qmlp::cli
