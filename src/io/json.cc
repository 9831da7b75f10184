#include "io/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

namespace qmlp {
namespace {

// Below this size a scan is as fast as a binary search and the index costs memory.
constexpr std::size_t kIndexedObject = 16;

// One printable line of what the parser library says: it quotes the text, which may be anything.
std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  for (const char c : text) {
    if (out.size() >= limit) return out + "...";
    out += c >= 0x20 && c < 0x7F ? c : '?';
  }
  return out;
}

void write_string(std::string_view text, std::string& out) {
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          char escape[8];
          std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
          out += escape;
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

void write_double(double value, std::string& out) {
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  char text[64];
  // Both forms are the shortest that read back exactly; people expect 100000.0, not 1e+05.
  const double magnitude = std::fabs(value);
  const bool plain = value == 0.0 || (magnitude >= 1e-4 && magnitude < 1e15);
  const auto end = std::to_chars(text, text + sizeof text, value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific)
                       .ptr;
  const std::string_view written(text, static_cast<std::size_t>(end - text));
  out += written;
  // Keeps a double a double when it is read again.
  if (written.find_first_of(".e") == std::string_view::npos) out += ".0";
}

}  // namespace

// Receives nlohmann's events and builds the value; refuses what the parser itself lets through.
class JsonBuilder {
 public:
  // NOLINTBEGIN: the names and types that nlohmann's sax_parse calls.
  bool null() { return add(Json()); }
  bool boolean(bool value) { return add(Json(value)); }
  bool number_integer(std::int64_t value) { return add(Json(value)); }
  bool number_unsigned(std::uint64_t value) {
    if (value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return add(Json(static_cast<std::int64_t>(value)));
    }
    return add(Json(value));
  }
  bool number_float(double value, const std::string&) { return add(Json(value)); }
  bool string(std::string& value) { return add(Json(std::move(value))); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(std::size_t) { return open(Json(JsonObject())); }
  bool key(std::string& name) {
    open_.back()->object()->members_.push_back({std::move(name), Json()});
    return true;
  }
  bool end_object() {
    const auto repeated = open_.back()->object()->build_index();
    if (repeated) {
      error_ = "duplicate key '" + printable(*repeated, 200) + "'";
      return false;
    }
    open_.pop_back();
    return true;
  }
  bool start_array(std::size_t) { return open(Json(JsonArray())); }
  bool end_array() {
    open_.pop_back();
    return true;
  }
  template <class Exception>
  bool parse_error(std::size_t position, const std::string&, const Exception& exception) {
    std::string_view text = exception.what();
    if (const auto at = text.find(": "); at != std::string_view::npos) text.remove_prefix(at + 2);
    error_ =
        "byte " + std::to_string(position > 0 ? position - 1 : 0) + ": " + printable(text, 160);
    return false;
  }
  // NOLINTEND

  Json& root() { return root_; }
  const std::string& error() const { return error_; }

 private:
  Json* place(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (JsonArray* array = open_.back()->array()) {
      array->push_back(std::move(value));
      return &array->back();
    }
    Json& slot = open_.back()->object()->members_.back().value;
    slot = std::move(value);
    return &slot;
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  // A container stays where it is until it is closed: only its own elements are added meanwhile.
  bool open(Json value) {
    if (open_.size() >= static_cast<std::size_t>(Json::kMaxDepth)) {
      error_ = "nested deeper than " + std::to_string(Json::kMaxDepth) + " levels";
      return false;
    }
    open_.push_back(place(std::move(value)));
    return true;
  }

  Json root_;
  std::vector<Json*> open_;
  std::string error_;
};

Result<Json> Json::parse(std::string_view text, std::string_view what) {
  JsonBuilder builder;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
    return Error{Errc::corrupt_file, std::string(what) + ": invalid JSON: " + builder.error()};
  }
  // The parser takes a NUL for the end of the text; what follows it was not looked at.
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    return Error{Errc::corrupt_file, std::string(what) + ": invalid JSON: byte " +
                                         std::to_string(nul) +
                                         ": a NUL after the value; expected end of input"};
  }
  return std::move(builder.root());
}

std::size_t JsonObject::size() const noexcept { return members_.size(); }

std::optional<std::string_view> JsonObject::build_index() {
  by_name_.resize(members_.size());
  for (std::size_t i = 0; i < by_name_.size(); ++i) by_name_[i] = static_cast<std::uint32_t>(i);
  std::sort(by_name_.begin(), by_name_.end(), [this](std::uint32_t a, std::uint32_t b) {
    return members_[a].name < members_[b].name;
  });
  for (std::size_t i = 1; i < by_name_.size(); ++i) {
    const std::string& name = members_[by_name_[i]].name;
    if (members_[by_name_[i - 1]].name == name) return name;
  }
  if (members_.size() < kIndexedObject) by_name_ = {};
  return std::nullopt;
}

const Json* JsonObject::find(std::string_view name) const noexcept {
  if (by_name_.size() == members_.size() && !by_name_.empty()) {
    const auto at = std::lower_bound(
        by_name_.begin(), by_name_.end(), name,
        [this](std::uint32_t index, std::string_view key) { return members_[index].name < key; });
    return at != by_name_.end() && members_[*at].name == name ? &members_[*at].value : nullptr;
  }
  for (const JsonMember& member : members_) {
    if (member.name == name) return &member.value;
  }
  return nullptr;
}

void JsonObject::set(std::string name, Json value) {
  if (const Json* old = find(name)) {
    *const_cast<Json*>(old) = std::move(value);
    return;
  }
  append(std::move(name), std::move(value));
}

void JsonObject::append(std::string name, Json value) {
  by_name_.clear();
  members_.push_back({std::move(name), std::move(value)});
}

void JsonObject::erase(std::string_view name) {
  by_name_.clear();
  members_.erase(std::remove_if(members_.begin(), members_.end(),
                                [name](const JsonMember& member) { return member.name == name; }),
                 members_.end());
}

const char* Json::kind_name() const noexcept {
  switch (value_.index()) {
    case 0:
      return "null";
    case 1:
      return "a boolean";
    case 2:
    case 3:
      return "an integer";
    case 4:
      return "a number";
    case 5:
      return "a string";
    case 6:
      return "an array";
    default:
      return "an object";
  }
}

std::optional<bool> Json::boolean() const noexcept {
  const bool* value = std::get_if<bool>(&value_);
  return value != nullptr ? std::optional<bool>(*value) : std::nullopt;
}

std::optional<std::int64_t> Json::integer() const noexcept {
  const auto* value = std::get_if<std::int64_t>(&value_);
  return value != nullptr ? std::optional<std::int64_t>(*value) : std::nullopt;
}

std::optional<std::uint64_t> Json::unsigned_integer() const noexcept {
  if (const auto* value = std::get_if<std::uint64_t>(&value_)) return *value;
  const auto value = integer();
  if (!value || *value < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*value);
}

std::optional<double> Json::number() const noexcept {
  if (const auto* value = std::get_if<double>(&value_)) return *value;
  if (const auto* value = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*value);
  if (const auto* value = std::get_if<std::uint64_t>(&value_)) return static_cast<double>(*value);
  return std::nullopt;
}

const Json* Json::find(std::string_view name) const noexcept {
  const JsonObject* members = object();
  return members != nullptr ? members->find(name) : nullptr;
}

namespace {

void write_value(const Json& value, int indent, int level, std::string& out) {
  const auto new_line = [&](int at_level) {
    if (indent < 0) return;
    out += '\n';
    out.append(static_cast<std::size_t>(indent) * static_cast<std::size_t>(at_level), ' ');
  };
  if (const JsonArray* array = value.array()) {
    out += '[';
    bool first = true;
    for (const Json& element : *array) {
      if (!first) out += indent < 0 ? ", " : ",";
      first = false;
      new_line(level + 1);
      write_value(element, indent, level + 1, out);
    }
    if (!array->empty()) new_line(level);
    out += ']';
  } else if (const JsonObject* object = value.object()) {
    out += '{';
    bool first = true;
    for (const JsonMember& member : object->members()) {
      if (!first) out += indent < 0 ? ", " : ",";
      first = false;
      new_line(level + 1);
      write_string(member.name, out);
      out += ": ";
      write_value(member.value, indent, level + 1, out);
    }
    if (object->size() != 0) new_line(level);
    out += '}';
  } else if (const std::string* text = value.string()) {
    write_string(*text, out);
  } else if (const auto flag = value.boolean()) {
    out += *flag ? "true" : "false";
  } else if (const auto integer = value.integer()) {
    out += std::to_string(*integer);
  } else if (const auto large = value.unsigned_integer()) {
    out += std::to_string(*large);
  } else if (const auto number = value.number()) {
    write_double(*number, out);
  } else {
    out += "null";
  }
}

}  // namespace

std::string Json::dump(int indent) const {
  std::string out;
  write_value(*this, indent, 0, out);
  return out;
}

}  // namespace qmlp
