#include "text/jinja_builtins.h"

#include <algorithm>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/jinja_lexer.h"
#include "text/quote.h"
#include "text/unicode_space.h"
#include "text/utf8.h"

namespace qmlp::text::jinja {
namespace {

// What a template may build in memory; messages are far smaller.
constexpr std::size_t kMaxText = std::size_t{64} << 20;
constexpr std::size_t kMaxList = std::size_t{1} << 20;

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

// What Python's str.strip() takes: White_Space and four separators of ASCII.
bool python_space(char32_t c) { return is_space(c) || (c >= 0x1C && c <= 0x1F); }

std::size_t last_character_length(std::string_view text) {
  std::size_t length = 1;
  while (length < text.size() && (text[text.size() - length] & 0xC0) == 0x80) ++length;
  return length;
}

// Strips white space, or the characters of `of`.
MarkedText strip(const MarkedText& text, bool left, bool right,
                 const std::optional<std::string>& of) {
  const auto stripped = [&of](std::string_view character) {
    return of ? of->find(character) != std::string::npos
              : python_space(first_utf8_unit(character).code);
  };
  std::string_view rest = text.bytes;
  std::size_t begin = 0;
  while (left && !rest.empty()) {
    const std::size_t length = first_utf8_unit(rest).length;
    if (!stripped(rest.substr(0, length))) break;
    rest.remove_prefix(length);
    begin += length;
  }
  while (right && !rest.empty()) {
    const std::size_t length = last_character_length(rest);
    if (!stripped(rest.substr(rest.size() - length))) break;
    rest.remove_suffix(length);
  }
  return text.substr(begin, begin + rest.size());
}

Result<MarkedText> change_case(const MarkedText& text, std::string_view name, std::size_t at) {
  if (!is_ascii(text.bytes)) return refuse(concat(name, " of text beyond ASCII"), at);
  MarkedText out = text;
  bool start = true;
  for (char& c : out.bytes) {
    const bool upper = c >= 'A' && c <= 'Z';
    const bool lower = c >= 'a' && c <= 'z';
    const bool raise = name == "upper" || (name != "lower" && start);
    if (raise && lower) c = static_cast<char>(c - 32);
    if (!raise && upper) c = static_cast<char>(c + 32);
    start = name == "title" ? !(upper || lower) : false;
  }
  return out;
}

std::optional<std::int64_t> as_integer(const Value& value) {
  if (value.kind != ValueKind::integer && value.kind != ValueKind::boolean) return std::nullopt;
  return value.number;
}

Result<bool> equal(const Value& left, const Value& right, std::size_t at) {
  if (const auto a = as_integer(left), b = as_integer(right); a && b) return *a == *b;
  if (left.kind != right.kind) return false;
  switch (left.kind) {
    case ValueKind::undefined:
    case ValueKind::none:
      return true;
    case ValueKind::string:
      return left.text.bytes == right.text.bytes;
    default:
      return refuse("a comparison of these values", at);
  }
}

// The length that len() gives: characters of a string.
Result<std::int64_t> length(const Value& value, std::size_t at) {
  switch (value.kind) {
    case ValueKind::string:
      return static_cast<std::int64_t>(std::count_if(value.text.bytes.begin(),
                                                     value.text.bytes.end(),
                                                     [](char c) { return (c & 0xC0) != 0x80; }));
    case ValueKind::list:
      return static_cast<std::int64_t>(value.list->size());
    case ValueKind::dict:
      return static_cast<std::int64_t>(value.dict->size());
    case ValueKind::undefined:
      return std::int64_t{0};
    default:
      return refuse("the length of this value", at);
  }
}

Result<Value> contains(const Value& element, const Value& container, std::size_t at) {
  switch (container.kind) {
    case ValueKind::string:
      if (element.kind != ValueKind::string) return refuse("'in' a string", at);
      return Value::boolean(container.text.bytes.find(element.text.bytes) != std::string::npos);
    case ValueKind::list:
      for (const Value& candidate : *container.list) {
        QMLP_ASSIGN(const bool same, equal(element, candidate, at));
        if (same) return Value::boolean(true);
      }
      return Value::boolean(false);
    case ValueKind::dict:
      if (element.kind != ValueKind::string) return refuse("'in' a mapping", at);
      return Value::boolean(find(*container.dict, element.text.bytes) != nullptr);
    case ValueKind::undefined:
      return Value::boolean(false);
    default:
      return refuse("'in' this value", at);
  }
}

Result<Value> integer_operator(std::string_view op, std::int64_t a, std::int64_t b,
                               std::size_t at) {
  std::int64_t out = 0;
  if (op == "+" && !__builtin_add_overflow(a, b, &out)) return Value::integer(out);
  if (op == "-" && !__builtin_sub_overflow(a, b, &out)) return Value::integer(out);
  if (op == "*" && !__builtin_mul_overflow(a, b, &out)) return Value::integer(out);
  if ((op == "//" || op == "%") && b > 0) {
    const std::int64_t rest = (a % b + b) % b;  // Python's sign
    return Value::integer(op == "%" ? rest : (a - rest) / b);
  }
  return refuse(concat("this ", quote(op)), at);
}

Result<Value> compare(std::string_view op, const Value& left, const Value& right, std::size_t at) {
  const auto a = as_integer(left);
  const auto b = as_integer(right);
  const bool strings = left.kind == ValueKind::string && right.kind == ValueKind::string;
  if (!(a && b) && !strings) return refuse(concat("this ", quote(op)), at);
  // UTF-8's byte order is the order of code points.
  const int order =
      strings ? left.text.bytes.compare(right.text.bytes) : (*a > *b ? 1 : 0) - (*a < *b ? 1 : 0);
  if (op == "<") return Value::boolean(order < 0);
  if (op == "<=") return Value::boolean(order <= 0);
  if (op == ">") return Value::boolean(order > 0);
  return Value::boolean(order >= 0);
}

Result<Value> split(const MarkedText& text, const List& arguments, std::size_t at) {
  if (arguments.size() != 1 || arguments[0].kind != ValueKind::string ||
      arguments[0].text.bytes.empty()) {
    return refuse("this 'split'", at);
  }
  const std::string& separator = arguments[0].text.bytes;
  List parts;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = text.bytes.find(separator, begin);
    parts.push_back(Value::string(text.substr(begin, std::min(end, text.size()))));
    if (end == std::string::npos) return Value::of(std::move(parts));
    begin = end + separator.size();
  }
}

Result<Value> replace(const MarkedText& text, const std::string& old, const MarkedText& with,
                      std::size_t at) {
  MarkedText out;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t end = text.bytes.find(old, begin);
    out.append(text.substr(begin, std::min(end, text.size())));
    if (end == std::string::npos) return Value::string(std::move(out));
    if (out.size() + with.size() > kMaxText) return refuse("text this long", at);
    out.append(with);
    begin = end + old.size();
  }
}

}  // namespace

const Value* find(const Dict& dict, std::string_view name) noexcept {
  for (const auto& [key, value] : dict) {
    if (key == name) return &value;
  }
  return nullptr;
}

void set(Dict& dict, std::string_view name, Value value) {
  for (auto& [key, old] : dict) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  dict.emplace_back(std::string(name), std::move(value));
}

bool is_true(const Value& value) noexcept {
  switch (value.kind) {
    case ValueKind::undefined:
    case ValueKind::none:
      return false;
    case ValueKind::boolean:
    case ValueKind::integer:
      return value.number != 0;
    case ValueKind::string:
      return !value.text.bytes.empty();
    case ValueKind::list:
      return !value.list->empty();
    case ValueKind::dict:
      return !value.dict->empty();
    case ValueKind::function:
      return true;
  }
  return false;
}

Result<MarkedText> printed(const Value& value, std::size_t at) {
  switch (value.kind) {
    case ValueKind::undefined:
      return MarkedText();
    case ValueKind::none:
      return MarkedText::of_template("None");
    case ValueKind::boolean:
      return MarkedText::of_template(value.number != 0 ? "True" : "False");
    case ValueKind::integer:
      return MarkedText::of_template(std::to_string(value.number));
    case ValueKind::string:
      return value.text;
    default:
      return refuse("printing a value that is no text", at);
  }
}

Result<Value> attribute(const Value& object, std::string_view name, std::size_t at) {
  static constexpr std::string_view kMethods[] = {"items",   "keys",   "values",     "get",
                                                  "pop",     "copy",   "setdefault", "clear",
                                                  "popitem", "update", "fromkeys"};
  if (object.kind == ValueKind::undefined || object.kind == ValueKind::none) {
    if (object.kind == ValueKind::none) return Value();
    return refuse(concat("member ", quote(name), " of something undefined"), at);
  }
  if (object.kind != ValueKind::dict) return refuse(concat("member ", quote(name)), at);
  if (std::find(std::begin(kMethods), std::end(kMethods), name) != std::end(kMethods)) {
    return refuse(concat("the method ", quote(name)), at);
  }
  const Value* found = find(*object.dict, name);
  return found != nullptr ? *found : Value();
}

Result<Value> item(const Value& object, const Value& key, std::size_t at) {
  if (object.kind == ValueKind::dict && key.kind == ValueKind::string) {
    const Value* found = find(*object.dict, key.text.bytes);
    return found != nullptr ? *found : Value();
  }
  if (object.kind == ValueKind::list && key.kind == ValueKind::integer) {
    const auto size = static_cast<std::int64_t>(object.list->size());
    const std::int64_t index = key.number < 0 ? key.number + size : key.number;
    if (index < 0 || index >= size) return Value();
    return (*object.list)[static_cast<std::size_t>(index)];
  }
  return refuse("this subscript", at);
}

Result<Value> slice(const Value& object, std::optional<std::int64_t> begin,
                    std::optional<std::int64_t> end, std::int64_t step, std::size_t at) {
  if (object.kind != ValueKind::list || (step != 1 && step != -1)) {
    return refuse("this slice", at);
  }
  const auto size = static_cast<std::int64_t>(object.list->size());
  const std::int64_t lowest = step > 0 ? 0 : -1;
  const auto clamp = [&](std::optional<std::int64_t> bound, std::int64_t otherwise) {
    if (!bound) return otherwise;
    const std::int64_t from_start = *bound < 0 ? *bound + size : *bound;
    return std::clamp(from_start, lowest, size + lowest);
  };
  List out;
  const std::int64_t last = clamp(end, step > 0 ? size : -1);
  for (std::int64_t i = clamp(begin, step > 0 ? 0 : size - 1); step > 0 ? i < last : i > last;
       i += step) {
    out.push_back((*object.list)[static_cast<std::size_t>(i)]);
  }
  return Value::of(std::move(out));
}

Result<Value> apply_operator(std::string_view op, const Value& left, const Value& right,
                             std::size_t at) {
  if (op == "==" || op == "!=") {
    QMLP_ASSIGN(const bool same, equal(left, right, at));
    return Value::boolean(same == (op == "=="));
  }
  if (op == "in") return contains(left, right, at);
  if (op == "<" || op == "<=" || op == ">" || op == ">=") return compare(op, left, right, at);
  if (op == "~") {
    QMLP_ASSIGN(MarkedText text, printed(left, at));
    QMLP_ASSIGN(const MarkedText more, printed(right, at));
    if (text.size() + more.size() > kMaxText) return refuse("text this long", at);
    text.append(more);
    return Value::string(std::move(text));
  }
  if (op == "+" && left.kind == right.kind) {
    if (left.kind == ValueKind::string) {
      if (left.text.size() + right.text.size() > kMaxText) return refuse("text this long", at);
      MarkedText text = left.text;
      text.append(right.text);
      return Value::string(std::move(text));
    }
    if (left.kind == ValueKind::list) {
      if (left.list->size() + right.list->size() > kMaxList) return refuse("a list this long", at);
      List list = *left.list;
      list.insert(list.end(), right.list->begin(), right.list->end());
      return Value::of(std::move(list));
    }
  }
  const auto a = as_integer(left);
  const auto b = as_integer(right);
  if (a && b) return integer_operator(op, *a, *b, at);
  return refuse(concat(quote(op), " of these values"), at);
}

Result<Value> apply_filter(std::string_view name, const List& parts, std::size_t at) {
  const Value& value = parts[0];
  const bool plain = parts.size() == 1;
  if (plain && (name == "length" || name == "count")) {
    QMLP_ASSIGN(const std::int64_t count, length(value, at));
    return Value::integer(count);
  }
  if (name == "default" || name == "d") {
    if (parts.size() != 2) return refuse("this 'default'", at);
    return value.kind == ValueKind::undefined ? parts[1] : value;
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
  const auto number = as_integer(parts[0]);
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
  if (parts.size() == 2 && (name == "equalto" || name == "eq" || name == "in")) {
    return apply_operator(name == "in" ? "in" : "==", parts[0], parts[1], at);
  }
  return refuse(concat("the test ", quote(name)), at);
}

Result<Value> call_method(const Value& object, std::string_view name, const List& arguments,
                          std::size_t at) {
  const bool strings = std::all_of(arguments.begin(), arguments.end(), [](const Value& value) {
    return value.kind == ValueKind::string;
  });
  const std::size_t count = arguments.size();
  if (object.kind == ValueKind::string && strings) {
    const MarkedText& text = object.text;
    if (name.ends_with("strip") && count <= 1) {
      const bool both = name == "strip";
      const bool known = both || name == "lstrip" || name == "rstrip";
      std::optional<std::string> of;
      if (count == 1) of = arguments[0].text.bytes;
      if (known)
        return Value::string(strip(text, both || name[0] == 'l', both || name[0] == 'r', of));
    }
    if (name == "startswith" && count == 1) {
      return Value::boolean(text.bytes.starts_with(arguments[0].text.bytes));
    }
    if (name == "endswith" && count == 1) {
      return Value::boolean(text.bytes.ends_with(arguments[0].text.bytes));
    }
    if (name == "split") return split(text, arguments, at);
    if (name == "replace" && count == 2 && !arguments[0].text.bytes.empty()) {
      return replace(text, arguments[0].text.bytes, arguments[1].text, at);
    }
    if (count == 0 &&
        (name == "upper" || name == "lower" || name == "title" || name == "capitalize")) {
      QMLP_ASSIGN(MarkedText changed, change_case(text, name, at));
      return Value::string(std::move(changed));
    }
  }
  if (object.kind == ValueKind::dict && name == "get" && strings && count >= 1 && count <= 2) {
    const Value* found = find(*object.dict, arguments[0].text.bytes);
    if (found != nullptr) return *found;
    return count == 2 ? arguments[1] : Value::none();
  }
  return refuse(concat("the method ", quote(name)), at);
}

bool is_function(std::string_view name) noexcept {
  static constexpr std::string_view kFunctions[] = {"raise_exception", "strftime_now", "namespace",
                                                    "range",           "dict",         "lipsum",
                                                    "cycler",          "joiner"};
  return std::find(std::begin(kFunctions), std::end(kFunctions), name) != std::end(kFunctions);
}

Value function(std::string_view name) {
  Value value = Value::string(MarkedText::of_template(name));
  value.kind = ValueKind::function;
  return value;
}

Result<Value> call_function(std::string_view name, const List& arguments, Dict named,
                            std::size_t at) {
  if (name == "raise_exception" && arguments.size() == 1 && named.empty()) {
    QMLP_ASSIGN(const MarkedText message, printed(arguments[0], at));
    return Error{Errc::invalid_argument,
                 concat("chat template: it refuses these messages: ", quote(message.bytes))};
  }
  if (name == "namespace" && arguments.empty()) return Value::of(std::move(named));
  return refuse(concat("the function ", quote(name)), at);
}

}  // namespace qmlp::text::jinja
