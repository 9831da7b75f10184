#include <algorithm>
#include <initializer_list>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "text/jinja.h"
#include "text/jinja_lexer.h"
#include "text/quote.h"

namespace qmlp::text::jinja {
namespace {

// Bounds the recursion here and in the renderer.
constexpr int kMaxDepth = 64;
constexpr int kMaxChain = 100;  // operators of one kind in a row

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Result<Block> run() {
    QMLP_ASSIGN(Block block, parse_block({}));
    if (!is(TokenKind::end)) return refuse(concat("'", tokens_[at_ + 1].text, "'"), here());
    return block;
  }

 private:
  using Parsed = Result<ExprPtr>;

  // Counts one level of nesting for as long as it lives.
  class Level {
   public:
    explicit Level(int& depth) : depth_(depth) { ++depth_; }
    ~Level() { --depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;
    bool too_deep() const { return depth_ > kMaxDepth; }

   private:
    int& depth_;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& peek() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  std::size_t here() const { return now().at; }
  bool is(TokenKind kind) const { return now().kind == kind; }
  bool is_symbol(std::string_view text) const {
    return is(TokenKind::symbol) && now().text == text;
  }
  bool is_name(std::string_view text) const { return is(TokenKind::name) && now().text == text; }
  bool take_symbol(std::string_view text) { return is_symbol(text) && advance(); }
  bool take_name(std::string_view text) { return is_name(text) && advance(); }
  bool advance() {
    if (at_ + 1 < tokens_.size()) ++at_;
    return true;
  }
  Error unexpected() const {
    switch (now().kind) {
      case TokenKind::end:
        return refuse("the end of the template", here());
      case TokenKind::statement_end:
      case TokenKind::output_end:
        return refuse("the end of a tag", here());
      default:
        return refuse(quote(now().text), here());
    }
  }
  Error too_long() const { return refuse("an expression this long", here()); }
  Status expect_symbol(std::string_view text) {
    if (take_symbol(text)) return {};
    return unexpected();
  }
  Status expect_end_of_tag(TokenKind kind) {
    if (!is(kind)) return unexpected();
    advance();
    return {};
  }
  Result<std::string> expect_name() {
    if (!is(TokenKind::name)) return unexpected();
    std::string name = now().text;
    advance();
    return name;
  }

  // Statements up to the end or to a statement that starts with one of `ends`; that is not taken.
  Result<Block> parse_block(std::initializer_list<std::string_view> ends) {
    const Level level(depth_);
    if (level.too_deep()) return refuse("a statement nested so deep", here());
    Block block;
    while (!is(TokenKind::end)) {
      if (is(TokenKind::text)) {
        Statement statement;
        statement.kind = StatementKind::text;
        statement.text = now().text;
        advance();
        block.push_back(std::move(statement));
        continue;
      }
      if (is(TokenKind::output_begin)) {
        Statement statement;
        statement.kind = StatementKind::output;
        statement.at = here();
        advance();
        QMLP_ASSIGN(statement.value, expression());
        QMLP_TRY(expect_end_of_tag(TokenKind::output_end));
        block.push_back(std::move(statement));
        continue;
      }
      const std::string& keyword = peek().text;
      if (peek().kind != TokenKind::name) {
        advance();
        return unexpected();
      }
      if (std::find(ends.begin(), ends.end(), keyword) != ends.end()) break;
      if (ends.size() == 0 && (keyword.starts_with("end") || keyword.starts_with("el"))) break;
      QMLP_TRY(statement(block));
    }
    return block;
  }

  // Takes "{% keyword", and for take_end also "%}".
  std::string take_keyword() {
    advance();
    std::string keyword = now().text;
    advance();
    return keyword;
  }

  Status statement(Block& block) {
    const std::size_t at = here();
    const std::string keyword = take_keyword();
    Statement out;
    out.at = at;
    if (keyword == "if") {
      QMLP_TRY(condition(out));
    } else if (keyword == "for") {
      QMLP_TRY(loop(out));
    } else if (keyword == "set") {
      QMLP_TRY(assignment(out));
    } else if (keyword == "break" || keyword == "continue") {
      if (loops_ == 0) return refuse(concat(quote(keyword), " outside a loop"), at);
      out.kind = keyword == "break" ? StatementKind::leave : StatementKind::next;
      QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
    } else if (keyword == "generation") {
      // Marks the assistant's words for training; prints its body.
      QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
      QMLP_ASSIGN(Block body, parse_block({"endgeneration"}));
      if (is(TokenKind::end)) return unexpected();
      take_keyword();
      QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
      for (Statement& statement : body) block.push_back(std::move(statement));
      return {};
    } else {
      return refuse(concat("the statement ", quote(keyword)), at);
    }
    block.push_back(std::move(out));
    return {};
  }

  // After "if" or "elif".
  Status condition(Statement& out) {
    const Level level(depth_);
    if (level.too_deep()) return refuse("a condition nested so deep", here());
    out.kind = StatementKind::condition;
    QMLP_ASSIGN(out.value, expression());
    QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
    QMLP_ASSIGN(out.body, parse_block({"elif", "else", "endif"}));
    if (is(TokenKind::end)) return unexpected();
    const std::size_t at = here();
    const std::string keyword = take_keyword();
    if (keyword == "elif") {
      Statement nested;
      nested.at = at;
      QMLP_TRY(condition(nested));
      out.otherwise.push_back(std::move(nested));
      return {};
    }
    QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
    if (keyword == "endif") return {};
    QMLP_ASSIGN(out.otherwise, parse_block({"endif"}));
    if (is(TokenKind::end)) return unexpected();
    take_keyword();
    return expect_end_of_tag(TokenKind::statement_end);
  }

  Status loop(Statement& out) {
    out.kind = StatementKind::loop;
    const bool enclosed = take_symbol("(");
    QMLP_ASSIGN(out.target, expect_name());
    while (take_symbol(",")) {
      QMLP_ASSIGN(std::string target, expect_name());
      out.more_targets.push_back(std::move(target));
    }
    if (enclosed) QMLP_TRY(expect_symbol(")"));
    if (!take_name("in")) return unexpected();
    QMLP_ASSIGN(out.value, either());
    if (take_name("if")) {
      QMLP_ASSIGN(out.filter, expression());
    }
    QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
    ++loops_;
    QMLP_ASSIGN(out.body, parse_block({"else", "endfor"}));
    --loops_;
    if (is(TokenKind::end)) return unexpected();
    const std::string keyword = take_keyword();
    QMLP_TRY(expect_end_of_tag(TokenKind::statement_end));
    if (keyword == "endfor") return {};
    QMLP_ASSIGN(out.otherwise, parse_block({"endfor"}));
    if (is(TokenKind::end)) return unexpected();
    take_keyword();
    return expect_end_of_tag(TokenKind::statement_end);
  }

  Status assignment(Statement& out) {
    out.kind = StatementKind::assign;
    QMLP_ASSIGN(out.target, expect_name());
    if (take_symbol(".")) {
      QMLP_ASSIGN(out.member, expect_name());
    }
    if (is(TokenKind::statement_end) && out.member.empty()) {
      advance();
      QMLP_ASSIGN(out.body, parse_block({"endset"}));
      if (is(TokenKind::end)) return unexpected();
      take_keyword();
      return expect_end_of_tag(TokenKind::statement_end);
    }
    QMLP_TRY(expect_symbol("="));
    QMLP_ASSIGN(out.value, expression());
    return expect_end_of_tag(TokenKind::statement_end);
  }

  static std::unique_ptr<Expr> make(ExprKind kind, std::size_t at, std::string text = {}) {
    auto expr = std::make_unique<Expr>();
    expr->kind = kind;
    expr->at = at;
    expr->text = std::move(text);
    return expr;
  }
  static ExprPtr binary(std::string op, std::size_t at, ExprPtr left, ExprPtr right) {
    auto expr = make(ExprKind::binary, at, std::move(op));
    expr->parts.push_back(std::move(left));
    expr->parts.push_back(std::move(right));
    return expr;
  }

  // The grammar of Jinja, loosest binding first.
  Parsed expression() {
    const Level level(depth_);
    if (level.too_deep()) return refuse("an expression nested so deep", here());
    QMLP_ASSIGN(ExprPtr value, either());
    for (int links = 0; is_name("if"); ++links) {
      if (links == kMaxChain) return too_long();
      auto expr = make(ExprKind::conditional, here());
      advance();
      QMLP_ASSIGN(ExprPtr test, either());
      ExprPtr otherwise;
      if (take_name("else")) {
        QMLP_ASSIGN(otherwise, expression());
      }
      expr->parts.push_back(std::move(value));
      expr->parts.push_back(std::move(test));
      expr->parts.push_back(std::move(otherwise));
      value = std::move(expr);
    }
    return value;
  }

  Parsed either() {
    QMLP_ASSIGN(ExprPtr left, both());
    for (int links = 0; is_name("or"); ++links) {
      const std::size_t at = here();
      if (links == kMaxChain) return too_long();
      advance();
      QMLP_ASSIGN(ExprPtr right, both());
      left = binary("or", at, std::move(left), std::move(right));
    }
    return left;
  }

  Parsed both() {
    QMLP_ASSIGN(ExprPtr left, negation());
    for (int links = 0; is_name("and"); ++links) {
      const std::size_t at = here();
      if (links == kMaxChain) return too_long();
      advance();
      QMLP_ASSIGN(ExprPtr right, negation());
      left = binary("and", at, std::move(left), std::move(right));
    }
    return left;
  }

  Parsed negation() {
    if (!is_name("not")) return comparison();
    const Level level(depth_);
    if (level.too_deep()) return refuse("an expression nested so deep", here());
    auto expr = make(ExprKind::negate, here());
    advance();
    QMLP_ASSIGN(ExprPtr value, negation());
    expr->parts.push_back(std::move(value));
    return ExprPtr(std::move(expr));
  }

  Parsed comparison() {
    QMLP_ASSIGN(ExprPtr left, operators(0));
    bool compared = false;
    for (;;) {
      const std::size_t at = here();
      std::string op;
      for (const std::string_view known : {"==", "!=", "<", "<=", ">", ">="}) {
        if (is_symbol(known)) op = known;
      }
      const bool not_in = is_name("not") && peek().kind == TokenKind::name && peek().text == "in";
      if (is_name("in") || not_in) op = "in";
      if (op.empty()) return left;
      if (compared) return refuse("a chain of comparisons", at);
      compared = true;
      if (not_in) advance();
      advance();
      QMLP_ASSIGN(ExprPtr right, operators(0));
      left = binary(std::move(op), at, std::move(left), std::move(right));
      if (not_in) {
        auto expr = make(ExprKind::negate, at);
        expr->parts.push_back(std::move(left));
        left = std::move(expr);
      }
    }
  }

  // Jinja binds ~ tighter than + and looser than *.
  Parsed operators(int tightness) {
    // Of each tightness, the loosest first.
    static constexpr std::string_view kOperators[3][4] = {{"+", "-"}, {"~"}, {"*", "/", "//", "%"}};
    if (tightness == 3) return unary(true);
    QMLP_ASSIGN(ExprPtr left, operators(tightness + 1));
    for (int links = 0;; ++links) {
      std::string op;
      for (const std::string_view known : kOperators[tightness]) {
        if (!known.empty() && is_symbol(known)) op = known;
      }
      if (op.empty()) return left;
      const std::size_t at = here();
      if (links == kMaxChain) return too_long();
      if (op == "/") return refuse("'/'", at);
      advance();
      QMLP_ASSIGN(ExprPtr right, operators(tightness + 1));
      left = binary(std::move(op), at, std::move(left), std::move(right));
    }
  }

  Parsed unary(bool with_filter) {
    ExprPtr value;
    if (is_symbol("-")) {
      const Level level(depth_);
      if (level.too_deep()) return refuse("an expression nested so deep", here());
      auto expr = make(ExprKind::minus, here());
      advance();
      QMLP_ASSIGN(ExprPtr operand, unary(false));
      expr->parts.push_back(std::move(operand));
      value = std::move(expr);
    } else {
      QMLP_ASSIGN(value, primary());
    }
    return postfix(std::move(value), with_filter);
  }

  Parsed primary() {
    const std::size_t at = here();
    switch (now().kind) {
      case TokenKind::name:
        return name();
      case TokenKind::string: {
        auto expr = make(ExprKind::string, at);
        for (; is(TokenKind::string); advance()) expr->text += now().text;
        return ExprPtr(std::move(expr));
      }
      case TokenKind::integer: {
        auto expr = make(ExprKind::integer, at);
        for (const char digit : now().text) expr->number = expr->number * 10 + (digit - '0');
        advance();
        return ExprPtr(std::move(expr));
      }
      default:
        break;
    }
    if (take_symbol("(")) {
      QMLP_ASSIGN(ExprPtr inside, expression());
      if (take_symbol(")")) return inside;
      auto expr = make(ExprKind::list, at);
      expr->parts.push_back(std::move(inside));
      while (take_symbol(",") && !is_symbol(")")) {
        QMLP_ASSIGN(ExprPtr element, expression());
        expr->parts.push_back(std::move(element));
      }
      QMLP_TRY(expect_symbol(")"));
      return ExprPtr(std::move(expr));
    }
    if (take_symbol("{")) {
      auto expr = make(ExprKind::dict, at);
      while (!is_symbol("}")) {
        QMLP_ASSIGN(ExprPtr key, expression());
        QMLP_TRY(expect_symbol(":"));
        QMLP_ASSIGN(ExprPtr value, expression());
        expr->parts.push_back(std::move(key));
        expr->parts.push_back(std::move(value));
        if (!take_symbol(",")) break;
      }
      QMLP_TRY(expect_symbol("}"));
      return ExprPtr(std::move(expr));
    }
    if (take_symbol("[")) {
      auto expr = make(ExprKind::list, at);
      while (!is_symbol("]")) {
        QMLP_ASSIGN(ExprPtr element, expression());
        expr->parts.push_back(std::move(element));
        if (!take_symbol(",")) break;
      }
      QMLP_TRY(expect_symbol("]"));
      return ExprPtr(std::move(expr));
    }
    return unexpected();
  }

  Parsed name() {
    static constexpr std::string_view kReserved[] = {"if", "else", "and", "or", "not", "in", "is"};
    const std::string text = now().text;
    const std::size_t at = here();
    if (std::find(std::begin(kReserved), std::end(kReserved), text) != std::end(kReserved)) {
      return unexpected();
    }
    advance();
    if (text == "none" || text == "None") return ExprPtr(make(ExprKind::none, at));
    const bool is_true = text == "true" || text == "True";
    if (is_true || text == "false" || text == "False") {
      auto expr = make(ExprKind::boolean, at);
      expr->number = is_true ? 1 : 0;
      return ExprPtr(std::move(expr));
    }
    return ExprPtr(make(ExprKind::name, at, text));
  }

  // Attributes, items and calls; filters and tests with `with_filter`.
  Parsed postfix(ExprPtr value, bool with_filter) {
    for (int links = 0;; ++links) {
      if (links == kMaxChain) return too_long();
      const std::size_t at = here();
      if (take_symbol(".")) {
        QMLP_ASSIGN(std::string attribute, expect_name());
        auto expr = make(ExprKind::attribute, at, std::move(attribute));
        expr->parts.push_back(std::move(value));
        value = std::move(expr);
      } else if (take_symbol("[")) {
        QMLP_ASSIGN(value, subscript(std::move(value), at));
      } else if (is_symbol("(")) {
        auto expr = make(ExprKind::call, at);
        expr->parts.push_back(std::move(value));
        QMLP_TRY(arguments(*expr));
        value = std::move(expr);
      } else if (with_filter && take_symbol("|")) {
        QMLP_ASSIGN(std::string filter, expect_name());
        auto expr = make(ExprKind::filter, at, std::move(filter));
        expr->parts.push_back(std::move(value));
        if (is_symbol("(")) QMLP_TRY(arguments(*expr));
        value = std::move(expr);
      } else if (with_filter && take_name("is")) {
        QMLP_ASSIGN(value, test(std::move(value), at));
      } else {
        return value;
      }
    }
  }

  Parsed subscript(ExprPtr value, std::size_t at) {
    auto expr = make(ExprKind::item, at);
    expr->parts.push_back(std::move(value));
    for (;;) {
      ExprPtr part;
      if (!is_symbol(":") && !is_symbol("]")) {
        QMLP_ASSIGN(part, expression());
      }
      expr->parts.push_back(std::move(part));
      if (!take_symbol(":")) break;
      expr->kind = ExprKind::slice;
    }
    QMLP_TRY(expect_symbol("]"));
    if (expr->kind == ExprKind::item && expr->parts[1] == nullptr) {
      return refuse("an empty subscript", at);
    }
    if (expr->parts.size() > 4) return refuse("this slice", at);
    if (expr->kind == ExprKind::slice) expr->parts.resize(4);
    return ExprPtr(std::move(expr));
  }

  Status arguments(Expr& out) {
    QMLP_TRY(expect_symbol("("));
    while (!is_symbol(")")) {
      const bool named =
          is(TokenKind::name) && peek().kind == TokenKind::symbol && peek().text == "=";
      std::string name;
      if (named) {
        name = now().text;
        advance();
        advance();
      }
      QMLP_ASSIGN(ExprPtr value, expression());
      if (named) {
        out.named.emplace_back(std::move(name), std::move(value));
      } else if (!out.named.empty()) {
        return unexpected();
      } else {
        out.parts.push_back(std::move(value));
      }
      if (!take_symbol(",")) break;
    }
    return expect_symbol(")");
  }

  // After "is". An argument may follow without brackets.
  Parsed test(ExprPtr value, std::size_t at) {
    const bool negated = take_name("not");
    QMLP_ASSIGN(std::string name, expect_name());
    auto expr = make(ExprKind::test, at, std::move(name));
    expr->parts.push_back(std::move(value));
    const bool word = is(TokenKind::name) && !is_name("else") && !is_name("or") &&
                      !is_name("and") && !is_name("if") && !is_name("is") && !is_name("in") &&
                      !is_name("not");
    if (is_symbol("(")) {
      QMLP_TRY(arguments(*expr));
    } else if (word || is(TokenKind::string) || is(TokenKind::integer) || is_symbol("[")) {
      QMLP_ASSIGN(ExprPtr argument, primary());
      QMLP_ASSIGN(argument, postfix(std::move(argument), false));
      expr->parts.push_back(std::move(argument));
    }
    if (!negated) return ExprPtr(std::move(expr));
    auto negation = make(ExprKind::negate, at);
    negation->parts.push_back(std::move(expr));
    return ExprPtr(std::move(negation));
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;  // around what is parsed
};

}  // namespace

Result<Block> parse(std::string_view source) {
  QMLP_ASSIGN(std::vector<Token> tokens, tokenize(source));
  return Parser(std::move(tokens)).run();
}

}  // namespace qmlp::text::jinja
