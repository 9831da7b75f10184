// A program without exceptions: every failure arrives as a value.
#include <cstdio>

#include "qmlp/qmlp.h"

int main() {
  const auto missing = qmlp::Checkpoint::open("no-such-folder");
  if (missing) return 1;
  std::printf("%s: %s\n", to_string(missing.error().code), missing.error().message.c_str());

  const qmlp::SwigluProblem problem{.M_max = 1,
                                    .hidden = 100,
                                    .intermediate = 64,
                                    .gate = {.bits = 4, .group_size = 64},
                                    .up = {.bits = 4, .group_size = 64}};
  const qmlp::Support support = supports(problem, qmlp::host_facts());
  if (support) return 1;
  std::printf("%s\n", to_string(support).c_str());
  return 0;
}
