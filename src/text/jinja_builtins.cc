#include "text/jinja_builtins.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <initializer_list>
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

constexpr int kMaxNesting = 64;                 // of values that are compared
constexpr std::int64_t kMaxVisits = 1'000'000;  // of values within them

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

std::size_t last_character_length(std::string_view text) {
  std::size_t length = 1;
  while (length < text.size() && (text[text.size() - length] & 0xC0) == 0x80) ++length;
  return length;
}

std::optional<std::int64_t> as_integer(const Value& value) {
  if (value.kind != ValueKind::integer && value.kind != ValueKind::boolean) return std::nullopt;
  return value.number;
}

Result<bool> equal_nested(const Value& left, const Value& right, int depth, std::int64_t& visits,
                          std::size_t at) {
  if (depth > kMaxNesting || ++visits > kMaxVisits) {
    return refuse("a comparison of values nested so deep", at);
  }
  if (const auto a = as_integer(left), b = as_integer(right); a && b) return *a == *b;
  if (left.kind != right.kind) return false;
  switch (left.kind) {
    case ValueKind::undefined:
    case ValueKind::none:
      return true;
    case ValueKind::string:
      return left.text.bytes == right.text.bytes;
    case ValueKind::list: {
      if (left.list->size() != right.list->size()) return false;
      for (std::size_t i = 0; i < left.list->size(); ++i) {
        QMLP_ASSIGN(const bool same,
                    equal_nested((*left.list)[i], (*right.list)[i], depth + 1, visits, at));
        if (!same) return false;
      }
      return true;
    }
    case ValueKind::dict: {
      if (left.dict->size() != right.dict->size()) return false;
      for (const auto& [key, value] : *left.dict) {
        const Value* other = find(*right.dict, key);
        if (other == nullptr) return false;
        QMLP_ASSIGN(const bool same, equal_nested(value, *other, depth + 1, visits, at));
        if (!same) return false;
      }
      return true;
    }
    default:
      return refuse("a comparison of these values", at);
  }
}

// Whether a value holds this dictionary; true also where that takes too long to see.
bool holds_nested(const Value& value, const Dict& wanted, int depth, std::int64_t& visits) {
  if (depth > kMaxNesting || ++visits > kMaxVisits) return true;
  if (value.kind == ValueKind::dict) {
    if (value.dict.get() == &wanted) return true;
    return std::any_of(value.dict->begin(), value.dict->end(), [&](const auto& entry) {
      return holds_nested(entry.second, wanted, depth + 1, visits);
    });
  }
  return value.kind == ValueKind::list &&
         std::any_of(value.list->begin(), value.list->end(), [&](const Value& element) {
           return holds_nested(element, wanted, depth + 1, visits);
         });
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

// At runs of white space.
List split_words(const MarkedText& text) {
  List parts;
  std::size_t begin = 0;
  std::size_t at = 0;
  const auto end_word = [&] {
    if (begin < at) parts.push_back(Value::string(text.substr(begin, at)));
  };
  for (std::string_view rest = text.bytes; !rest.empty();) {
    const Utf8Unit unit = first_utf8_unit(rest);
    if (python_space(unit.code)) {
      end_word();
      begin = at + unit.length;
    }
    at += unit.length;
    rest.remove_prefix(unit.length);
  }
  end_word();
  return parts;
}

Result<Value> split(const MarkedText& text, const List& arguments, std::size_t at) {
  if (arguments.empty() || (arguments.size() == 1 && arguments[0].kind == ValueKind::none)) {
    return Value::of(split_words(text));
  }
  const bool limited = arguments.size() == 2 && arguments[1].kind == ValueKind::integer;
  if ((arguments.size() != 1 && !limited) || arguments[0].kind != ValueKind::string ||
      arguments[0].text.bytes.empty()) {
    return refuse("this 'split'", at);
  }
  const std::string& separator = arguments[0].text.bytes;
  const std::int64_t most = limited ? arguments[1].number : -1;
  List parts;
  std::size_t begin = 0;
  for (;;) {
    const bool full = most >= 0 && static_cast<std::int64_t>(parts.size()) == most;
    const std::size_t end = full ? std::string::npos : text.bytes.find(separator, begin);
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

// Characters [begin, end) of a text, from the end where negative.
Result<Value> slice_text(const MarkedText& text, std::optional<std::int64_t> begin,
                         std::optional<std::int64_t> end, std::size_t at) {
  QMLP_ASSIGN(const std::int64_t size, length(Value::string(text), at));
  const auto clamp = [size](std::int64_t bound) {
    return std::clamp<std::int64_t>(bound < 0 ? bound + size : bound, 0, size);
  };
  const std::int64_t first = clamp(begin.value_or(0));
  const std::int64_t last = std::max(first, clamp(end.value_or(size)));
  std::size_t from = text.size();
  std::size_t to = text.size();
  std::int64_t index = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((text.bytes[i] & 0xC0) == 0x80) continue;
    if (index == first) from = i;
    if (index == last) to = i;
    ++index;
  }
  return Value::string(from < to ? text.substr(from, to) : MarkedText());
}

Result<Value> range(const List& arguments, std::size_t at) {
  std::int64_t bounds[3] = {0, 0, 1};
  if (arguments.empty() || arguments.size() > 3) return refuse("this 'range'", at);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind != ValueKind::integer) return refuse("this 'range'", at);
    bounds[arguments.size() == 1 ? 1 : i] = arguments[i].number;
  }
  const auto [first, end, step] = bounds;
  if (step == 0) return refuse("this 'range'", at);
  List out;
  for (std::int64_t i = first; step > 0 ? i < end : i > end; i += step) {
    if (out.size() == kMaxList) return refuse("a list this long", at);
    out.push_back(Value::integer(i));
    if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) break;
  }
  return Value::of(std::move(out));
}

// The local time as Python's strftime writes it in its default locale.
Result<Value> format_now(std::string_view format, std::size_t at) {
  static constexpr std::string_view kDays[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                               "Thursday", "Friday", "Saturday"};
  static constexpr std::string_view kMonths[] = {"January",   "February", "March",    "April",
                                                 "May",       "June",     "July",     "August",
                                                 "September", "October",  "November", "December"};
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  if (localtime_r(&now, &parts) == nullptr) return refuse("the local time", at);
  std::string out;
  const auto number = [&out](int value, int digits) {
    char text[16];
    std::snprintf(text, sizeof text, "%0*d", digits, value);
    out += text;
  };
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    const std::string_view month = kMonths[static_cast<std::size_t>(parts.tm_mon)];
    const std::string_view day = kDays[static_cast<std::size_t>(parts.tm_wday)];
    switch (++i < format.size() ? format[i] : '\0') {
      case 'd':
        number(parts.tm_mday, 2);
        break;
      case 'm':
        number(parts.tm_mon + 1, 2);
        break;
      case 'Y':
        number(parts.tm_year + 1900, 1);
        break;
      case 'y':
        number(parts.tm_year % 100, 2);
        break;
      case 'H':
        number(parts.tm_hour, 2);
        break;
      case 'M':
        number(parts.tm_min, 2);
        break;
      case 'S':
        number(parts.tm_sec, 2);
        break;
      case 'j':
        number(parts.tm_yday + 1, 3);
        break;
      case 'B':
        out += month;
        break;
      case 'b':
        out += month.substr(0, 3);
        break;
      case 'A':
        out += day;
        break;
      case 'a':
        out += day.substr(0, 3);
        break;
      case '%':
        out += '%';
        break;
      default:
        return refuse(concat("the time format ", quote(format)), at);
    }
  }
  return Value::string(MarkedText::of_template(out));
}

}  // namespace

bool python_space(char32_t c) noexcept { return is_space(c) || (c >= 0x1C && c <= 0x1F); }

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

Result<bool> equal(const Value& left, const Value& right, std::size_t at) {
  std::int64_t visits = 0;
  return equal_nested(left, right, 0, visits, at);
}

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

bool holds(const Value& value, const Dict& wanted) {
  std::int64_t visits = 0;
  return holds_nested(value, wanted, 0, visits);
}

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
  const auto known = [name](std::initializer_list<std::string_view> names) {
    return name.starts_with('_') || std::find(names.begin(), names.end(), name) != names.end();
  };
  // What Python's own attributes would give is a method, of no use but in a call.
  bool is_method = false;
  switch (object.kind) {
    case ValueKind::none:
      return Value();
    case ValueKind::dict:
      is_method = known({"clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem",
                         "setdefault", "update", "values"});
      break;
    case ValueKind::list:
      is_method = known({"append", "clear", "copy", "count", "extend", "index", "insert", "pop",
                         "remove", "reverse", "sort"});
      break;
    case ValueKind::string:
      is_method = known(
          {"capitalize",   "casefold",    "center",    "count",      "encode",       "endswith",
           "expandtabs",   "find",        "format",    "format_map", "index",        "isalnum",
           "isalpha",      "isascii",     "isdecimal", "isdigit",    "isidentifier", "islower",
           "isnumeric",    "isprintable", "isspace",   "istitle",    "isupper",      "join",
           "ljust",        "lower",       "lstrip",    "maketrans",  "partition",    "removeprefix",
           "removesuffix", "replace",     "rfind",     "rindex",     "rjust",        "rpartition",
           "rsplit",       "rstrip",      "split",     "splitlines", "startswith",   "strip",
           "swapcase",     "title",       "translate", "upper",      "zfill"});
      break;
    default:
      return refuse(
          concat("member ", quote(name),
                 object.kind == ValueKind::undefined ? std::string_view(" of something undefined")
                                                     : std::string_view()),
          at);
  }
  if (is_method) return refuse(concat("the method ", quote(name)), at);
  if (object.kind != ValueKind::dict) return Value();
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
  if (object.kind == ValueKind::string && key.kind == ValueKind::integer) {
    if (key.number == INT64_MAX) return Value();
    const std::int64_t end = key.number + 1;
    QMLP_ASSIGN(Value found,
                slice(object, key.number, end == 0 ? std::optional<std::int64_t>() : end, 1, at));
    return found.text.bytes.empty() ? Value() : found;
  }
  if (object.kind == ValueKind::undefined) {
    return refuse("a subscript of something undefined", at);
  }
  return refuse("this subscript", at);
}

Result<Value> slice(const Value& object, std::optional<std::int64_t> begin,
                    std::optional<std::int64_t> end, std::int64_t step, std::size_t at) {
  if (object.kind == ValueKind::string && step == 1) {
    return slice_text(object.text, begin, end, at);
  }
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

Result<Value> call_method(const Value& object, std::string_view name, const List& arguments,
                          std::size_t at) {
  const bool strings = std::all_of(arguments.begin(), arguments.end(), [](const Value& value) {
    return value.kind == ValueKind::string;
  });
  const std::size_t count = arguments.size();
  if (object.kind == ValueKind::string && name == "split") return split(object.text, arguments, at);
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
  if (object.kind == ValueKind::string && name == "join" && count == 1 &&
      arguments[0].kind == ValueKind::list) {
    return join(*arguments[0].list, object.text, at);
  }
  if (object.kind == ValueKind::dict && count == 0 &&
      (name == "items" || name == "keys" || name == "values")) {
    List out;
    for (const auto& [key, value] : *object.dict) {
      // Keys of what a caller gave are the caller's text, and a template's own never hurt.
      Value key_text = Value::string(MarkedText::of_message(key));
      if (name == "items") {
        out.push_back(Value::of(List{std::move(key_text), value}));
      } else {
        out.push_back(name == "keys" ? key_text : value);
      }
    }
    return Value::of(std::move(out));
  }
  return refuse(concat("the method ", quote(name)), at);
}

Result<Value> join(const List& values, const MarkedText& separator, std::size_t at) {
  MarkedText out;
  for (std::size_t i = 0; i < values.size(); ++i) {
    QMLP_ASSIGN(const MarkedText text, printed(values[i], at));
    if (out.size() + separator.size() + text.size() > kMaxText) return refuse("text this long", at);
    if (i > 0) out.append(separator);
    out.append(text);
  }
  return Value::string(std::move(out));
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
  if (name == "dict" && arguments.empty()) return Value::of(std::move(named));
  if (name == "range" && named.empty()) return range(arguments, at);
  if (name == "strftime_now" && arguments.size() == 1 && named.empty() &&
      arguments[0].kind == ValueKind::string) {
    return format_now(arguments[0].text.bytes, at);
  }
  return refuse(concat("the function ", quote(name)), at);
}

}  // namespace qmlp::text::jinja
