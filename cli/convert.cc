#include <CLI/CLI.hpp>

#include "commands.h"
#include "context.h"
#include "format.h"
#include "json_out.h"
#include "options.h"
#include "parse.h"
#include "progress.h"
#include "qmlp/checkpoint.h"

namespace qmlp::cli {
namespace {

struct Flags {
  RunFlags run;
  std::string source;
  std::string destination;
  std::vector<std::string> bits;
  std::optional<std::string> scale_dtype;
  std::int64_t group_size = 0;
  bool force = false;
  bool json = false;
};

int run_convert(const Flags& flags, Context& context) {
  ConvertOptions options;
  for (const std::string& text : flags.bits) {
    for (QuantPattern& pattern : value_or_throw(parse_quant_patterns(text))) {
      options.patterns.push_back(std::move(pattern));
    }
  }
  if (flags.group_size != 0) options.group_size = static_cast<int>(flags.group_size);
  if (flags.scale_dtype) options.scale_dtype = parse_dtype("--scale-dtype", *flags.scale_dtype);
  options.force = flags.force;
  Progress progress(flags.run.progress());
  options.progress = [&](std::string_view what, std::int64_t done, std::int64_t total) {
    progress.update(what, done, total);
  };
  options.stop_requested = stop_requested;
  const ConvertReport report = value_or_throw(convert(flags.source, flags.destination, options));
  progress.clear();
  if (flags.json) {
    context.out.line(Json::object()
                         .set("source", flags.source)
                         .set("destination", flags.destination)
                         .set("tensors", report.num_tensors)
                         .set("bytes_written", report.bytes_written)
                         .set("lossless", report.lossless)
                         .set("notes", Json::array_of(report.notes))
                         .dump(2));
    return kDone;
  }
  context.out.line(flags.destination + ": " + std::to_string(report.num_tensors) + " tensors, " +
                   human_bytes(report.bytes_written) + ", " +
                   (report.lossless ? "lossless" : "not lossless"));
  for (const std::string& note : report.notes) context.out.line("note: " + note);
  return kDone;
}

}  // namespace

void add_convert(CLI::App& app, Context& context) {
  CLI::App* command = app.add_subcommand(
      "convert", "Make an MLX checkpoint of a GGUF file or a safetensors folder");
  const auto flags = std::make_shared<Flags>();
  Flags& f = *flags;
  command
      ->add_option(
          "SRC", f.source,
          "GGUF file (any part of a split one), MLX checkpoint or float safetensors folder")
      ->required();
  command->add_option("DST", f.destination, "Folder to make")->required();
  command
      ->add_option("--bits", f.bits,
                   "PATTERN=BITS[/GROUP],...: gate=4,up=8,down=6/32,layers.0.*=8; the last match "
                   "wins (default: what is affine or float stays so)")
      ->type_name("SPEC")
      ->expected(1)
      ->take_all()
      ->allow_extra_args(false);
  add_int_option(*command, "--group-size", f.group_size, 32, 128,
                 "Group for patterns without one: 32, 64 or 128");
  command->add_option("--scale-dtype", f.scale_dtype, "f16, bf16 or f32 (default: the source's)")
      ->type_name("T");
  command->add_flag("--force", f.force, "Replace DST");
  command->add_flag("--json", f.json, "Print one JSON object");
  f.run.add_to(*command, kProgressOptions);
  command->footer(
      "Examples:\n"
      "  qmlp convert SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2-135m\n"
      "  qmlp convert models/smollm2-135m models/mixed --bits gate=4,up=8,down=6\n"
      "  qmlp convert float-model models/q4 --bits '*=4/64,head=8'");
  set_run(*command, context, [flags](Context& c) { return run_convert(*flags, c); });
}

}  // namespace qmlp::cli
