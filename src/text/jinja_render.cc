#include <algorithm>
#include <optional>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/jinja.h"
#include "text/jinja_builtins.h"
#include "text/jinja_lexer.h"
#include "text/quote.h"

namespace qmlp::text::jinja {
namespace {

constexpr int kMaxDepth = 250;                 // of an expression's evaluation
constexpr std::int64_t kMaxSteps = 2'000'000;  // statements and expressions evaluated
constexpr std::size_t kMaxOutput = std::size_t{64} << 20;

class Renderer {
 public:
  explicit Renderer(Dict variables) {
    scopes_.push_back(std::move(variables));
    scopes_.emplace_back();
  }

  Status run(const Block& block) {
    for (const Statement& statement : block) {
      QMLP_TRY(count(statement.at));
      switch (statement.kind) {
        case StatementKind::text:
          out_.append(MarkedText::of_template(statement.text));
          break;
        case StatementKind::output:
          QMLP_TRY(output(statement));
          break;
        case StatementKind::condition: {
          QMLP_ASSIGN(const Value test, evaluate(*statement.value));
          QMLP_TRY(run(is_true(test) ? statement.body : statement.otherwise));
          break;
        }
        case StatementKind::loop:
          QMLP_TRY(loop(statement));
          break;
        case StatementKind::assign:
          QMLP_TRY(assign(statement));
          break;
        case StatementKind::leave:
          flow_ = Flow::leave;
          break;
        case StatementKind::next:
          flow_ = Flow::next;
          break;
      }
      if (flow_ != Flow::on) return {};
      if (out_.size() > kMaxOutput) return refuse("output this long", statement.at);
    }
    return {};
  }

  MarkedText take() { return std::move(out_); }

 private:
  Status count(std::size_t at) {
    if (++steps_ > kMaxSteps) return refuse("a template that runs this long", at);
    return {};
  }

  Status output(const Statement& statement) {
    QMLP_ASSIGN(const Value value, evaluate(*statement.value));
    QMLP_ASSIGN(const MarkedText text, printed(value, statement.at));
    out_.append(text);
    return {};
  }

  Status assign(const Statement& statement) {
    Value value;
    if (statement.value != nullptr) {
      QMLP_ASSIGN(value, evaluate(*statement.value));
    } else {
      MarkedText outside = std::exchange(out_, MarkedText());
      scopes_.emplace_back();
      const Status status = run(statement.body);
      scopes_.pop_back();
      value = Value::string(std::exchange(out_, std::move(outside)));
      if (!status) return status;
    }
    if (statement.member.empty()) {
      set(scopes_.back(), statement.target, std::move(value));
      return {};
    }
    const Value object = look_up(statement.target);
    if (object.kind != ValueKind::dict) {
      return refuse(concat("setting a member of ", quote(statement.target)), statement.at);
    }
    if (holds(value, *object.dict)) return refuse("a value within itself", statement.at);
    set(*object.dict, statement.member, std::move(value));
    return {};
  }

  // The loop's variables for one element.
  static Result<Dict> take_apart(const Statement& statement, const Value& element) {
    if (statement.more_targets.empty()) return Dict{{statement.target, element}};
    const std::size_t count = 1 + statement.more_targets.size();
    if (element.kind != ValueKind::list || element.list->size() != count) {
      return refuse(concat("a loop that takes this apart into ", count), statement.at);
    }
    Dict out = {{statement.target, (*element.list)[0]}};
    for (std::size_t i = 1; i < count; ++i) {
      out.emplace_back(statement.more_targets[i - 1], (*element.list)[i]);
    }
    return out;
  }

  // Each turn has a scope of its own, as in Jinja: what it sets is gone after it.
  Status loop(const Statement& statement) {
    QMLP_ASSIGN(Value sequence, evaluate(*statement.value));
    List elements;
    if (sequence.kind == ValueKind::list) {
      elements = *sequence.list;
    } else if (sequence.kind == ValueKind::dict) {
      QMLP_ASSIGN(const Value keys, call_method(sequence, "keys", {}, statement.at));
      elements = *keys.list;
    } else if (sequence.kind != ValueKind::undefined) {
      return refuse("a loop over something that is no list", statement.at);
    }
    if (statement.filter != nullptr) {
      List kept;
      for (Value& element : elements) {
        QMLP_ASSIGN(Dict targets, take_apart(statement, element));
        scopes_.push_back(std::move(targets));
        Result<Value> keep = evaluate(*statement.filter);
        scopes_.pop_back();
        if (!keep) return keep.error();
        if (is_true(*keep)) kept.push_back(std::move(element));
      }
      elements = std::move(kept);
    }
    const auto count = static_cast<std::int64_t>(elements.size());
    for (std::int64_t i = 0; i < count; ++i) {
      const auto index = static_cast<std::size_t>(i);
      Dict facts = {
          {"index", Value::integer(i + 1)},        {"index0", Value::integer(i)},
          {"revindex", Value::integer(count - i)}, {"revindex0", Value::integer(count - i - 1)},
          {"first", Value::boolean(i == 0)},       {"last", Value::boolean(i + 1 == count)},
          {"length", Value::integer(count)}};
      if (i > 0) facts.emplace_back("previtem", elements[index - 1]);
      if (i + 1 < count) facts.emplace_back("nextitem", elements[index + 1]);
      QMLP_ASSIGN(Dict scope, take_apart(statement, elements[index]));
      scope.emplace_back("loop", Value::of(std::move(facts)));
      scopes_.push_back(std::move(scope));
      const Status status = run(statement.body);
      scopes_.pop_back();
      if (!status) return status;
      const Flow flow = std::exchange(flow_, Flow::on);
      if (flow == Flow::leave) break;
    }
    return count == 0 ? run(statement.otherwise) : Status();
  }

  Value look_up(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const Value* found = find(*scope, name)) return *found;
    }
    return is_function(name) ? function(name) : Value();
  }

  Result<Value> evaluate(const Expr& expr) {
    if (++depth_ > kMaxDepth) return refuse("an expression nested so deep", expr.at);
    Result<Value> value = evaluate_here(expr);
    --depth_;
    return value;
  }

  Result<Value> evaluate_here(const Expr& expr) {
    QMLP_TRY(count(expr.at));
    switch (expr.kind) {
      case ExprKind::none:
        return Value::none();
      case ExprKind::boolean:
        return Value::boolean(expr.number != 0);
      case ExprKind::integer:
        return Value::integer(expr.number);
      case ExprKind::string:
        return Value::string(MarkedText::of_template(expr.text));
      case ExprKind::name:
        return look_up(expr.text);
      case ExprKind::list: {
        QMLP_ASSIGN(List list, evaluate_parts(expr, 0));
        return Value::of(std::move(list));
      }
      case ExprKind::dict: {
        QMLP_ASSIGN(const List parts, evaluate_parts(expr, 0));
        Dict dict;
        for (std::size_t i = 0; i + 1 < parts.size(); i += 2) {
          if (parts[i].kind != ValueKind::string) return refuse("a key that is no text", expr.at);
          set(dict, parts[i].text.bytes, parts[i + 1]);
        }
        return Value::of(std::move(dict));
      }
      case ExprKind::attribute: {
        QMLP_ASSIGN(const Value object, evaluate(*expr.parts[0]));
        return attribute(object, expr.text, expr.at);
      }
      case ExprKind::item: {
        QMLP_ASSIGN(const Value object, evaluate(*expr.parts[0]));
        QMLP_ASSIGN(const Value key, evaluate(*expr.parts[1]));
        return item(object, key, expr.at);
      }
      case ExprKind::slice:
        return evaluate_slice(expr);
      case ExprKind::call:
        return evaluate_call(expr);
      case ExprKind::filter: {
        QMLP_ASSIGN(const List parts, evaluate_parts(expr, 0));
        QMLP_ASSIGN(const Dict named, evaluate_named(expr));
        return apply_filter(expr.text, parts, named, expr.at);
      }
      case ExprKind::test: {
        QMLP_ASSIGN(const List parts, evaluate_parts(expr, 0));
        if (!expr.named.empty()) return refuse(concat("the test ", quote(expr.text)), expr.at);
        return apply_test(expr.text, parts, expr.at);
      }
      case ExprKind::negate: {
        QMLP_ASSIGN(const Value value, evaluate(*expr.parts[0]));
        return Value::boolean(!is_true(value));
      }
      case ExprKind::minus: {
        QMLP_ASSIGN(const Value value, evaluate(*expr.parts[0]));
        if (value.kind != ValueKind::integer) return refuse("'-' before no integer", expr.at);
        return Value::integer(-value.number);
      }
      case ExprKind::binary:
        return evaluate_binary(expr);
      case ExprKind::conditional: {
        QMLP_ASSIGN(const Value test, evaluate(*expr.parts[1]));
        const ExprPtr& chosen = is_true(test) ? expr.parts[0] : expr.parts[2];
        return chosen != nullptr ? evaluate(*chosen) : Result<Value>(Value());
      }
    }
    return refuse("an expression", expr.at);
  }

  Result<List> evaluate_parts(const Expr& expr, std::size_t first) {
    List values;
    for (std::size_t i = first; i < expr.parts.size(); ++i) {
      QMLP_ASSIGN(Value value, evaluate(*expr.parts[i]));
      values.push_back(std::move(value));
    }
    return values;
  }

  Result<Dict> evaluate_named(const Expr& expr) {
    Dict named;
    for (const auto& [name, part] : expr.named) {
      QMLP_ASSIGN(Value value, evaluate(*part));
      named.emplace_back(name, std::move(value));
    }
    return named;
  }

  Result<Value> evaluate_slice(const Expr& expr) {
    QMLP_ASSIGN(const Value object, evaluate(*expr.parts[0]));
    std::optional<std::int64_t> bounds[3];
    for (std::size_t i = 0; i < 3; ++i) {
      if (expr.parts[i + 1] == nullptr) continue;
      QMLP_ASSIGN(const Value bound, evaluate(*expr.parts[i + 1]));
      if (bound.kind == ValueKind::none) continue;
      if (bound.kind != ValueKind::integer) return refuse("a slice by no integer", expr.at);
      bounds[i] = bound.number;
    }
    return slice(object, bounds[0], bounds[1], bounds[2].value_or(1), expr.at);
  }

  Result<Value> evaluate_call(const Expr& expr) {
    const Expr& callee = *expr.parts[0];
    QMLP_ASSIGN(const List arguments, evaluate_parts(expr, 1));
    QMLP_ASSIGN(Dict named, evaluate_named(expr));
    if (callee.kind == ExprKind::attribute) {
      QMLP_ASSIGN(const Value object, evaluate(*callee.parts[0]));
      if (!named.empty()) return refuse(concat("the method ", quote(callee.text)), expr.at);
      return call_method(object, callee.text, arguments, expr.at);
    }
    QMLP_ASSIGN(const Value value, evaluate(callee));
    if (value.kind != ValueKind::function) return refuse("a call", expr.at);
    return call_function(value.text.bytes, arguments, std::move(named), expr.at);
  }

  Result<Value> evaluate_binary(const Expr& expr) {
    QMLP_ASSIGN(Value left, evaluate(*expr.parts[0]));
    if (expr.text == "and") return is_true(left) ? evaluate(*expr.parts[1]) : Result<Value>(left);
    if (expr.text == "or") return is_true(left) ? Result<Value>(left) : evaluate(*expr.parts[1]);
    QMLP_ASSIGN(const Value right, evaluate(*expr.parts[1]));
    return apply_operator(expr.text, left, right, expr.at);
  }

  enum class Flow : std::uint8_t { on, leave, next };

  std::vector<Dict> scopes_;
  MarkedText out_;
  Flow flow_ = Flow::on;
  std::int64_t steps_ = 0;
  int depth_ = 0;
};

}  // namespace

Result<MarkedText> render(const Block& block, Dict variables) {
  Renderer renderer(std::move(variables));
  QMLP_TRY(renderer.run(block));
  return renderer.take();
}

}  // namespace qmlp::text::jinja
