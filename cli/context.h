#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "output.h"
#include "qmlp/exceptions.h"
#include "qmlp/status.h"

namespace qmlp::cli {

// What the program's exit status means; docs/cli.md lists it for users.
enum ExitCode : int {
  kDone = 0,
  kCheckFailed = 1,
  kBadInput = 2,
  kSystemError = 3,
  kInterrupted = 130,
};
int exit_code(Errc code) noexcept;

// What every command shares. A command's option callback sets `run`; main calls it.
struct Context {
  Output out;                        // standard output: results, nothing else
  bool progress = false;             // show progress on standard error
  std::string command_line;          // as it was given, for reports
  std::function<int(Context&)> run;  // returns the exit status, or throws Exception
};

// A check of results failed: exit status 1.
struct CheckFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(Errc code, std::string message);
[[noreturn]] void fail_usage(std::string message);  // exit status 2

// A line "qmlp: <text>" on standard error. Line breaks and control characters become spaces.
void print_error(std::string_view text);
// Lines on standard error as they are: statistics that follow a result.
void print_note(std::string_view text);

// SIGINT, SIGTERM and SIGHUP set a flag that long work polls; a second one ends the program at
// once.
void install_signal_handlers();
bool stop_requested() noexcept;
// Throws Errc::interrupted when a stop was requested.
void check_stop();

}  // namespace qmlp::cli
