#include "bench_plot.h"

#include <algorithm>
#include <cmath>

#include "format.h"

namespace qmlp::cli {
namespace {

constexpr double kWidth = 760.0;
constexpr double kPanelHeight = 300.0;
constexpr double kLeft = 60.0;
constexpr double kRight = 150.0;
constexpr double kTop = 36.0;
constexpr double kBottom = 44.0;
// Told apart by colour-blind readers, and by their dashes in print.
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7"};
constexpr const char* kDashes[] = {"none", "7 4", "2 3", "9 3 2 3"};

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) + escape(text) +
         "</text>\n";
}

std::string panel_svg(const PlotPanel& panel, double offset) {
  std::vector<std::string> variants;
  std::vector<std::int64_t> all_M;
  double most = 100.0;
  for (const BenchRow& row : panel.rows) {
    if (std::find(variants.begin(), variants.end(), row.variant) == variants.end()) {
      variants.push_back(row.variant);
    }
    if (std::find(all_M.begin(), all_M.end(), row.M) == all_M.end()) all_M.push_back(row.M);
    most = std::max(most, row.percent_of_limit);
  }
  std::sort(all_M.begin(), all_M.end());
  most = 20.0 * std::ceil(most / 20.0);
  const double plot_width = kWidth - kLeft - kRight;
  const double plot_height = kPanelHeight - kTop - kBottom;
  const double low = std::log2(static_cast<double>(all_M.front()));
  const double range = std::max(std::log2(static_cast<double>(all_M.back())) - low, 1e-9);
  const auto x_of = [&](std::int64_t M) {
    return kLeft + plot_width * (std::log2(static_cast<double>(M)) - low) / range;
  };
  const auto y_of = [&](double percent) {
    return offset + kTop + plot_height * (1.0 - percent / most);
  };

  std::string svg = label(kLeft, offset + 20.0, "start", panel.title);
  for (double percent = 0.0; percent <= most; percent += 20.0) {
    svg += format("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", kLeft,
                  kLeft + plot_width, y_of(percent), y_of(percent),
                  percent == 100.0 ? "#666666" : "#dddddd");
    svg += label(kLeft - 8.0, y_of(percent) + 4.0, "end", format("%.0f%%", percent));
  }
  for (const std::int64_t M : all_M) {
    svg += label(x_of(M), y_of(0.0) + 18.0, "middle", std::to_string(M));
  }
  svg += label(kLeft + plot_width / 2, y_of(0.0) + 36.0, "middle", "M (tokens), % of the limit");
  for (std::size_t v = 0; v < variants.size(); ++v) {
    const char* colour = kColours[v % std::size(kColours)];
    const char* dash = kDashes[v % std::size(kDashes)];
    std::string points;
    for (const BenchRow& row : panel.rows) {
      if (row.variant != variants[v]) continue;
      points += format("%.1f,%.1f ", x_of(row.M), y_of(row.percent_of_limit));
      svg += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", x_of(row.M),
                    y_of(row.percent_of_limit), colour);
    }
    svg += format(
        "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
        "stroke-dasharray=\"%s\"/>\n",
        points.c_str(), colour, dash);
    const double y = offset + kTop + 16.0 + 20.0 * static_cast<double>(v);
    const double x = kLeft + plot_width + 14.0;
    svg += format(
        "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" "
        "stroke-width=\"2\" stroke-dasharray=\"%s\"/>\n",
        x, x + 26.0, y, y, colour, dash);
    svg += label(x + 32.0, y + 4.0, "start", variants[v]);
  }
  return svg;
}

}  // namespace

std::string plot_svg(const std::vector<PlotPanel>& panels, const std::string& caption) {
  const double height = kPanelHeight * static_cast<double>(panels.size()) + 30.0;
  std::string svg = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" "
      "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, height);
  double offset = 0.0;
  for (const PlotPanel& panel : panels) {
    svg += panel_svg(panel, offset);
    offset += kPanelHeight;
  }
  svg += label(kLeft, offset + 16.0, "start", caption);
  return svg + "</svg>\n";
}

}  // namespace qmlp::cli
