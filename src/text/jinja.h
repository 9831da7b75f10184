#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qmlp/status.h"
#include "text/marked_text.h"

// The part of the Jinja template language that chat templates are written in. What is outside it is
// refused by name, when parsed or when reached, so that a prompt is exact or not made at all.
namespace qmlp::text::jinja {

enum class ExprKind : std::uint8_t {
  none,
  boolean,      // number
  integer,      // number
  string,       // text
  name,         // text
  list,         // parts; a tuple is one too
  dict,         // parts: keys and values in turn
  attribute,    // parts[0].text
  item,         // parts[0][parts[1]]
  slice,        // parts[0][parts[1]:parts[2]:parts[3]], null where left out
  call,         // parts[0](parts[1..], named)
  filter,       // parts[0] | text(parts[1..], named)
  test,         // parts[0] is text(parts[1..])
  negate,       // not parts[0]
  minus,        // -parts[0]
  binary,       // parts[0] text parts[1]: + - * // % ~ == != < <= > >= in and or
  conditional,  // parts[0] if parts[1] else parts[2], null without else
};

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct Expr {
  ExprKind kind;
  std::size_t at = 0;  // byte of the template, for messages
  std::string text;
  std::int64_t number = 0;
  std::vector<ExprPtr> parts;
  std::vector<std::pair<std::string, ExprPtr>> named;
};

enum class StatementKind : std::uint8_t {
  text,       // text
  output,     // value
  condition,  // if value: body, else: otherwise (an elif is an if in there)
  loop,       // for target, or for more targets, in value if filter: body, else: otherwise
  assign,     // set target = value, or set target.member = value; without value: what body prints
  leave,      // break
  next,       // continue
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  StatementKind kind = StatementKind::text;
  std::size_t at = 0;
  std::string text;
  std::string target;
  std::string member;
  std::vector<std::string> more_targets;  // of a loop that takes its elements apart
  ExprPtr value;
  ExprPtr filter;
  Block body;
  Block otherwise;
};

// White space around tags is treated as Hugging Face does: trim_blocks and lstrip_blocks are on.
Result<Block> parse(std::string_view source);

struct Value;
using List = std::vector<Value>;
using Dict = std::vector<std::pair<std::string, Value>>;

enum class ValueKind : std::uint8_t {
  undefined,
  none,
  boolean,
  integer,
  string,
  list,
  dict,
  function
};

struct Value {
  ValueKind kind = ValueKind::undefined;
  std::int64_t number = 0;     // boolean, integer
  MarkedText text;             // string; the name of a function
  std::shared_ptr<List> list;  // shared as in Python
  std::shared_ptr<Dict> dict;

  static Value none() { return Value{ValueKind::none, 0, {}, nullptr, nullptr}; }
  static Value boolean(bool value) {
    return Value{ValueKind::boolean, value, {}, nullptr, nullptr};
  }
  static Value integer(std::int64_t value) {
    return Value{ValueKind::integer, value, {}, nullptr, nullptr};
  }
  static Value string(MarkedText text) {
    return Value{ValueKind::string, 0, std::move(text), nullptr, nullptr};
  }
  static Value of(List list) {
    return Value{ValueKind::list, 0, {}, std::make_shared<List>(std::move(list)), nullptr};
  }
  static Value of(Dict dict) {
    return Value{ValueKind::dict, 0, {}, nullptr, std::make_shared<Dict>(std::move(dict))};
  }
};

// What the template prints with these variables.
Result<MarkedText> render(const Block& block, Dict variables);

}  // namespace qmlp::text::jinja
