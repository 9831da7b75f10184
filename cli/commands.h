#pragma once

namespace CLI {
class App;
}

// Each command adds itself to the program's options and, when named, leaves what to do in the
// context.
namespace qmlp::cli {

struct Context;

void add_info(CLI::App& app, Context& context);
void add_inspect(CLI::App& app, Context& context);
void add_generate(CLI::App& app, Context& context);
void add_kl(CLI::App& app, Context& context);
void add_convert(CLI::App& app, Context& context);
void add_bench(CLI::App& app, Context& context);
void add_verify(CLI::App& app, Context& context);

}  // namespace qmlp::cli
