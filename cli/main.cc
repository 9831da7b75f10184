#include <CLI/CLI.hpp>
#include <new>

#include "commands.h"
#include "context.h"
#include "qmlp/version.h"

namespace qmlp::cli {
namespace {

constexpr const char* kFooter =
    "Exit status: 0 done, 1 a check failed, 2 bad usage or input, 3 device or system error, "
    "130 interrupted.\n"
    "Examples:\n"
    "  qmlp inspect models/smollm2-135m\n"
    "  qmlp generate models/smollm2-135m --chat -p 'What is the capital of France?'\n"
    "  qmlp COMMAND --help";

bool is_path(const CLI::Option& option) {
  if (option.get_type_name() == "FILE") return true;
  for (const char* name : {"MODEL", "model", "SRC", "--reference-model"}) {
    if (option.check_name(name)) return true;
  }
  return false;
}

// An empty path is a script's variable that was not set: messages would name nothing, and options
// whose default is no path would be taken for absent.
void refuse_empty_paths(CLI::App& app) {
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    for (CLI::Option* option : command->get_options()) {
      if (!is_path(*option)) continue;
      option->check([](const std::string& path) {
        return path.empty() ? std::string("'' was given, needs a path") : std::string();
      });
    }
  }
}

int run_command(Context& context, int argc, const char* const* argv) {
  CLI::App app{"Exact, fast inference kernels for MLX-quantized language models", "qmlp"};
  app.set_version_flag("--version", std::string("qmlp ") + version());
  app.require_subcommand(1);
  app.footer(kFooter);
  add_info(app, context);
  add_inspect(app, context);
  add_verify(app, context);
  add_generate(app, context);
  add_kl(app, context);
  add_convert(app, context);
  add_bench(app, context);
  refuse_empty_paths(app);
  if (argc > 1 && argv[1][0] != '-') {
    const auto named =
        app.get_subcommands([&](const CLI::App* command) { return command->check_name(argv[1]); });
    if (named.empty()) {
      fail_usage(std::string("no command is called \"") + argv[1] + "\"; see qmlp --help");
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForVersion&) {
    context.out.line(app.version());
    return kDone;
  } catch (const CLI::CallForHelp&) {
    context.out.write(app.help());
    return kDone;
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const std::string command = chosen.empty() ? "qmlp" : "qmlp " + chosen.front()->get_name();
    print_error(std::string(error.what()) + "; see " + command + " --help");
    return kBadInput;
  }
  return context.run(context);
}

// Every way a command can end, as an exit status.
int guarded_main(int argc, const char* const* argv) {
  Context context;
  for (int i = 0; i < argc; ++i) context.command_line += (i > 0 ? " " : "") + std::string(argv[i]);
  const auto report = [&](int status, std::string_view text) {
    context.out.discard();  // half a result would look like a whole one
    print_error(text);
    return status;
  };
  try {
    const int status = run_command(context, argc, argv);
    context.out.flush();
    return status;
  } catch (const CheckFailed& error) {
    return report(kCheckFailed, error.what());
  } catch (const Exception& error) {
    return report(exit_code(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return report(kSystemError, "out of memory");
  } catch (const std::exception& error) {
    return report(kSystemError, std::string("internal error: ") + error.what());
  }
}

}  // namespace
}  // namespace qmlp::cli

int main(int argc, char** argv) {
  qmlp::cli::reserve_standard_descriptors();
  qmlp::cli::install_signal_handlers();
  return qmlp::cli::guarded_main(argc, argv);
}
