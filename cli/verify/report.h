#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qmlp::cli {

class Json;

// One kind of check on one op or on the whole model.
struct CheckResult {
  std::string name;  // "weights", "fused", ... (docs/testing.md lists them)
  bool ok = true;
  std::int64_t compared = 0;   // values
  std::int64_t different = 0;  // of them, how many missed
  double worst = -1.0;         // largest error in units of its bound; negative: an exact check
  std::string detail;          // the first miss, or why the check does not apply

  bool applies() const { return compared > 0 || !ok; }
  void miss(const std::string& what) {
    ok = false;
    if (different++ == 0) detail = what;
  }
};

// How far outputs lie from the float64 value, in steps of their type.
struct UlpHistogram {
  static constexpr std::array<std::string_view, 7> kNames = {"0",    "1",   "2",         "3-4",
                                                             "5-16", ">16", "not finite"};
  std::array<std::int64_t, 7> counts{};
  void add(std::int64_t ulps);  // negative: not finite
  void add(const UlpHistogram& other);
};

struct OpReport {
  std::string path;
  std::string shape;  // "gate 4 bits/32 f16, up 4 bits/32 f16, [1536, 576]"
  std::string kernel;
  std::vector<CheckResult> checks;
  std::vector<std::string> notes;
  UlpHistogram ulps;

  bool ok() const;
};

Json to_json(const CheckResult& check);
Json to_json(const OpReport& report);
Json to_json(const UlpHistogram& ulps);

// The cell of a table: "ok", "FAIL", "0.42" for an error in bounds, "-" where it does not apply.
std::string cell(const std::vector<CheckResult>& checks, std::string_view name);

}  // namespace qmlp::cli
