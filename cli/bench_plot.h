#pragma once

#include <string>
#include <vector>

#include "bench_case.h"

namespace qmlp::cli {

// One panel: a shape with one thread count.
struct PlotPanel {
  std::string title;
  std::vector<BenchRow> rows;
};

// An SVG document: percent of the machine's limit over M (logarithmic), a line for each variant.
std::string plot_svg(const std::vector<PlotPanel>& panels, const std::string& caption);

}  // namespace qmlp::cli
