#include "report.h"

#include <algorithm>

#include "../format.h"
#include "../json_out.h"

namespace qmlp::cli {

void UlpHistogram::add(std::int64_t ulps) {
  const std::size_t bin = ulps < 0     ? 6
                          : ulps <= 2  ? static_cast<std::size_t>(ulps)
                          : ulps <= 4  ? 3
                          : ulps <= 16 ? 4
                                       : 5;
  ++counts[bin];
}

void UlpHistogram::add(const UlpHistogram& other) {
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
}

bool OpReport::ok() const {
  return std::all_of(checks.begin(), checks.end(), [](const CheckResult& c) { return c.ok; });
}

Json to_json(const CheckResult& check) {
  Json out = Json::object();
  out.set("name", check.name).set("ok", check.ok).set("compared", check.compared);
  out.set("different", check.different);
  if (check.worst >= 0.0) out.set("worst_error", check.worst);
  if (!check.detail.empty()) out.set("detail", check.detail);
  return out;
}

Json to_json(const UlpHistogram& ulps) {
  Json out = Json::object();
  for (std::size_t i = 0; i < ulps.counts.size(); ++i) {
    out.set(UlpHistogram::kNames[i], ulps.counts[i]);
  }
  return out;
}

Json to_json(const OpReport& report) {
  Json checks = Json::array();
  for (const CheckResult& check : report.checks) checks.push(to_json(check));
  Json out = Json::object();
  out.set("path", report.path).set("shape", report.shape).set("kernel", report.kernel);
  out.set("ok", report.ok()).set("checks", std::move(checks));
  out.set("ulps", to_json(report.ulps)).set("notes", Json::array_of(report.notes));
  return out;
}

std::string cell(const std::vector<CheckResult>& checks, std::string_view name) {
  for (const CheckResult& check : checks) {
    if (check.name != name) continue;
    if (!check.ok) return "FAIL";
    if (!check.applies()) return "-";
    return check.worst >= 0.0 ? format("%.3f", check.worst) : "ok";
  }
  return "-";
}

}  // namespace qmlp::cli
