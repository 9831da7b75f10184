#include "json_out.h"

#include <nlohmann/json.hpp>

namespace qmlp::cli {
namespace {

using Value = nlohmann::ordered_json;

std::string compact(const Value& value) {
  return value.dump(-1, ' ', false, Value::error_handler_t::replace);
}

void write_indented(const Value& value, int indent, int depth, std::string& out) {
  const bool flat_array =
      value.is_array() &&
      std::none_of(value.begin(), value.end(), [](const Value& v) { return v.is_structured(); });
  if (!value.is_structured() || value.empty() || flat_array) {
    out += compact(value);
    return;
  }
  const std::string inner(static_cast<std::size_t>(indent) * (depth + 1), ' ');
  out += value.is_object() ? "{\n" : "[\n";
  bool first = true;
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (!first) out += ",\n";
    first = false;
    out += inner;
    if (value.is_object()) out += compact(Value(it.key())) + ": ";
    write_indented(*it, indent, depth + 1, out);
  }
  out.append("\n").append(inner, static_cast<std::size_t>(indent));
  out += value.is_object() ? "}" : "]";
}

}  // namespace

struct Json::Impl {
  Value value;
};

Json::Json() : impl_(std::make_unique<Impl>()) {}
Json::Json(bool value) : impl_(new Impl{Value(value)}) {}
Json::Json(double value) : impl_(new Impl{Value(value)}) {}
Json::Json(std::string_view text) : impl_(new Impl{Value(text)}) {}
Json::Json(Signed value) : impl_(new Impl{Value(value.value)}) {}
Json::Json(Unsigned value) : impl_(new Impl{Value(value.value)}) {}
Json::~Json() = default;
Json::Json(Json&& other) noexcept = default;
Json& Json::operator=(Json&& other) noexcept = default;

Json Json::object() {
  Json json;
  json.impl_->value = Value::object();
  return json;
}

Json Json::array() {
  Json json;
  json.impl_->value = Value::array();
  return json;
}

Json& Json::set(std::string_view key, Json value) {
  impl_->value[std::string(key)] = std::move(value.impl_->value);
  return *this;
}

Json& Json::push(Json value) {
  impl_->value.push_back(std::move(value.impl_->value));
  return *this;
}

std::string Json::dump(int indent) const {
  if (indent < 0) return compact(impl_->value);
  std::string out;
  write_indented(impl_->value, indent, 0, out);
  return out;
}

}  // namespace qmlp::cli
