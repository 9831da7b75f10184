#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/jinja_builtins.h"
#include "text/jinja_lexer.h"
#include "text/quote.h"

namespace qmlp::text::jinja {
namespace {

constexpr std::size_t kMaxText = std::size_t{16} << 20;
constexpr int kMaxNesting = 64;  // of values written as JSON

// A member that may be a path: "function.name".
Result<Value> member(Value object, std::string_view path, std::size_t at) {
  for (;;) {
    const std::size_t dot = path.find('.');
    const std::string_view name = path.substr(0, dot);
    if (object.kind != ValueKind::dict) return refuse(concat("member ", quote(name)), at);
    const Value* found = find(*object.dict, name);
    object = found != nullptr ? Value(*found) : Value();
    if (dot == std::string_view::npos) return object;
    path.remove_prefix(dot + 1);
  }
}

// selectattr, rejectattr, select and reject: elements that pass a test, or that do not.
Result<Value> choose(std::string_view name, const List& parts, std::size_t at) {
  const bool by_member = name.ends_with("attr");
  const std::size_t first = by_member ? 2 : 1;  // of the test's name
  if (parts[0].kind == ValueKind::undefined) return Value::of(List());
  if (parts[0].kind != ValueKind::list || parts.size() < first) {
    return refuse(concat("the filter ", quote(name)), at);
  }
  for (std::size_t i = 1; i < parts.size() && i <= first; ++i) {
    if (parts[i].kind != ValueKind::string) return refuse(concat("the filter ", quote(name)), at);
  }
  List kept;
  for (const Value& element : *parts[0].list) {
    Value tested = element;
    if (by_member) {
      QMLP_ASSIGN(tested, member(element, parts[1].text.bytes, at));
    }
    bool passes = is_true(tested);
    if (parts.size() > first) {
      List test_parts = {std::move(tested)};
      const auto rest = parts.begin() + static_cast<std::ptrdiff_t>(first) + 1;
      test_parts.insert(test_parts.end(), rest, parts.end());
      QMLP_ASSIGN(const Value result, apply_test(parts[first].text.bytes, test_parts, at));
      passes = is_true(result);
    }
    if (passes == name.starts_with("select")) kept.push_back(element);
  }
  return Value::of(std::move(kept));
}

// map(attribute='name') and map('filter').
Result<Value> map(const List& parts, const Dict& named, std::size_t at) {
  const bool by_member = parts.size() == 1 && named.size() == 1 && named[0].first == "attribute" &&
                         named[0].second.kind == ValueKind::string;
  const bool by_filter = parts.size() == 2 && named.empty() && parts[1].kind == ValueKind::string;
  if (parts[0].kind != ValueKind::list || (!by_member && !by_filter)) {
    return refuse("this 'map'", at);
  }
  List out;
  for (const Value& element : *parts[0].list) {
    Result<Value> mapped = by_member ? member(element, named[0].second.text.bytes, at)
                                     : apply_filter(parts[1].text.bytes, {element}, {}, at);
    if (!mapped) return mapped.error();
    out.push_back(*std::move(mapped));
  }
  return Value::of(std::move(out));
}

// Writes values as Python's json.dumps does with ensure_ascii off.
class JsonWriter {
 public:
  JsonWriter(std::int64_t indent, std::size_t at) : indent_(indent), at_(at) {}

  Status write(const Value& value, int depth) {
    if (depth > kMaxNesting) return refuse("a value nested so deep", at_);
    if (out_.size() > kMaxText) return refuse("text this long", at_);
    switch (value.kind) {
      case ValueKind::none:
        put("null");
        return {};
      case ValueKind::boolean:
        put(value.number != 0 ? "true" : "false");
        return {};
      case ValueKind::integer:
        put(std::to_string(value.number));
        return {};
      case ValueKind::string:
        string(value.text);
        return {};
      case ValueKind::list:
        put("[");
        for (std::size_t i = 0; i < value.list->size(); ++i) {
          before_element(i, depth + 1);
          QMLP_TRY(write((*value.list)[i], depth + 1));
        }
        after_elements(value.list->empty(), depth);
        put("]");
        return {};
      case ValueKind::dict:
        put("{");
        for (std::size_t i = 0; i < value.dict->size(); ++i) {
          const auto& [key, element] = (*value.dict)[i];
          before_element(i, depth + 1);
          string(MarkedText::of_message(key));
          put(": ");
          QMLP_TRY(write(element, depth + 1));
        }
        after_elements(value.dict->empty(), depth);
        put("}");
        return {};
      default:
        return refuse("this value as JSON", at_);
    }
  }
  MarkedText take() { return std::move(out_); }

 private:
  void put(std::string_view text) {
    out_.bytes += text;
    out_.from_template.append(text.size(), '\1');
  }
  void new_line(int depth) {
    put("\n");
    put(std::string(static_cast<std::size_t>(indent_ * depth), ' '));
  }
  void before_element(std::size_t index, int depth) {
    if (index > 0) put(indent_ < 0 ? ", " : ",");
    if (indent_ >= 0) new_line(depth);
  }
  void after_elements(bool none, int depth) {
    if (indent_ >= 0 && !none) new_line(depth);
  }
  void string(const MarkedText& text) {
    put("\"");
    for (std::size_t i = 0; i < text.size(); ++i) {
      const char c = text.bytes[i];
      const std::size_t escape = std::string_view("\"\\\b\f\n\r\t").find(c);
      if (escape != std::string_view::npos) {
        const char letters[] = {'\\', "\"\\bfnrt"[escape], '\0'};
        put(letters);
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char code[8];
        std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
        put(code);
      } else {
        out_.bytes += c;
        out_.from_template += text.from_template[i];
      }
    }
    put("\"");
  }

  std::int64_t indent_;  // negative: on one line
  std::size_t at_;
  MarkedText out_;
};

Result<Value> to_json(const Value& value, const Dict& named, std::size_t at) {
  std::int64_t indent = -1;
  for (const auto& [name, option] : named) {
    if (name == "indent" && option.kind == ValueKind::integer && option.number >= 0 &&
        option.number <= 16) {
      indent = option.number;
    } else if (!(name == "ensure_ascii" && option.kind == ValueKind::boolean &&
                 option.number == 0)) {
      return refuse(concat("'tojson' with ", quote(name)), at);
    }
  }
  JsonWriter writer(indent, at);
  QMLP_TRY(writer.write(value, 0));
  return Value::string(writer.take());
}

}  // namespace

Result<Value> apply_filter(std::string_view name, const List& parts, const Dict& named,
                           std::size_t at) {
  const Value& value = parts[0];
  if (name == "tojson" && parts.size() == 1) return to_json(value, named, at);
  if (name == "map") return map(parts, named, at);
  if (!named.empty()) return refuse(concat("the filter ", quote(name)), at);
  if (name == "selectattr" || name == "rejectattr" || name == "select" || name == "reject") {
    return choose(name, parts, at);
  }
  const bool plain = parts.size() == 1;
  if (plain && (name == "length" || name == "count")) {
    QMLP_ASSIGN(const std::int64_t count, length(value, at));
    return Value::integer(count);
  }
  if (name == "default" || name == "d") {
    if (parts.size() > 3) return refuse("this 'default'", at);
    const bool lacking = value.kind == ValueKind::undefined ||
                         (parts.size() == 3 && is_true(parts[2]) && !is_true(value));
    if (!lacking) return value;
    return plain ? Value::string(MarkedText()) : parts[1];
  }
  if (name == "join" && parts.size() <= 2 && value.kind == ValueKind::list) {
    if (plain) return join(*value.list, MarkedText(), at);
    if (parts[1].kind == ValueKind::string) return join(*value.list, parts[1].text, at);
  }
  if (name == "items" && plain) {
    if (value.kind == ValueKind::undefined) return Value::of(List());
    if (value.kind == ValueKind::dict) return call_method(value, "items", {}, at);
  }
  if (value.kind == ValueKind::list && plain && (name == "first" || name == "last")) {
    return item(value, Value::integer(name == "first" ? 0 : -1), at);
  }
  if (plain && name == "list" && value.kind == ValueKind::list) return value;
  if (plain && name == "string") {
    QMLP_ASSIGN(MarkedText text, printed(value, at));
    return Value::string(std::move(text));
  }
  if (value.kind == ValueKind::string) {
    static constexpr std::string_view kMethods[] = {"upper", "lower", "title", "capitalize"};
    if (plain && name == "trim") return Value::string(strip(value.text, true, true, std::nullopt));
    if (name == "replace" || (plain && std::find(std::begin(kMethods), std::end(kMethods), name) !=
                                           std::end(kMethods))) {
      return call_method(value, name, List(parts.begin() + 1, parts.end()), at);
    }
  }
  return refuse(concat("the filter ", quote(name)), at);
}

Result<Value> apply_test(std::string_view name, const List& parts, std::size_t at) {
  const ValueKind kind = parts[0].kind;
  const bool is_number = kind == ValueKind::integer || kind == ValueKind::boolean;
  const auto number = is_number ? std::optional(parts[0].number) : std::nullopt;
  if (parts.size() == 1) {
    if (name == "defined") return Value::boolean(kind != ValueKind::undefined);
    if (name == "undefined") return Value::boolean(kind == ValueKind::undefined);
    if (name == "none") return Value::boolean(kind == ValueKind::none);
    if (name == "string") return Value::boolean(kind == ValueKind::string);
    if (name == "mapping") return Value::boolean(kind == ValueKind::dict);
    if (name == "boolean") return Value::boolean(kind == ValueKind::boolean);
    if (name == "integer") return Value::boolean(kind == ValueKind::integer);
    if (name == "number") return Value::boolean(number.has_value());
    if (name == "true" || name == "false") {
      const bool wanted = name == "true";
      return Value::boolean(kind == ValueKind::boolean && (*number != 0) == wanted);
    }
    if (name == "sequence" || name == "iterable") {
      const bool is_sequence = kind == ValueKind::string || kind == ValueKind::list ||
                               kind == ValueKind::dict || kind == ValueKind::undefined;
      return Value::boolean(is_sequence);
    }
    if ((name == "odd" || name == "even") && number) {
      return Value::boolean((*number % 2 != 0) == (name == "odd"));
    }
  }
  if (parts.size() == 2) {
    static constexpr std::pair<std::string_view, std::string_view> kOperators[] = {
        {"equalto", "=="}, {"eq", "=="}, {"ne", "!="}, {"in", "in"},         {"lt", "<"},
        {"lessthan", "<"}, {"le", "<="}, {"gt", ">"},  {"greaterthan", ">"}, {"ge", ">="}};
    for (const auto& [test, op] : kOperators) {
      if (name == test || (name == op && op != "in")) {
        return apply_operator(op, parts[0], parts[1], at);
      }
    }
  }
  return refuse(concat("the test ", quote(name)), at);
}

}  // namespace qmlp::text::jinja
