#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "io/json.h"
#include "qmlp/status.h"

namespace qmlp {

// Reads fields of one JSON object; an error names the file, the field, what it is and what it must
// be. `what` is borrowed.
class Fields {
 public:
  static constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;

  Fields(const Json& json, std::string_view what) : json_(json), what_(what) {}

  // Null also when the member is null, which configs write for "not set".
  const Json* find(std::string_view name) const;
  bool has(std::string_view name) const { return json_.find(name) != nullptr; }
  std::string_view what() const noexcept { return what_; }

  Error wrong(std::string_view name, const Json& value, std::string_view need) const;
  Error unsupported(std::string_view name, const Json& value, std::string_view only) const;
  // Absent, or null.
  Error missing(std::string_view name, std::string_view need) const;

  // Each leaves `out` alone when the field is absent or null, unless it is required.
  Status size(std::string_view name, std::int64_t& out, std::int64_t limit = kMaxSize) const;
  Status optional_size(std::string_view name, std::int64_t& out,
                       std::int64_t limit = kMaxSize) const;
  Status positive(std::string_view name, double& out) const;
  Status optional_positive(std::string_view name, double& out) const;
  Status flag(std::string_view name, bool& out) const;
  Status text(std::string_view name, std::string& out) const;

 private:
  const Json& json_;
  std::string_view what_;
};

}  // namespace qmlp
