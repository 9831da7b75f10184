#pragma once

// QMLP_TRY(status) returns the error of a failed Status or Result from the enclosing function.
// QMLP_ASSIGN(auto value, result) also binds the value of a good Result.
#define QMLP_CONCAT_(a, b) a##b
#define QMLP_CONCAT(a, b) QMLP_CONCAT_(a, b)
#define QMLP_TRY(expression)                               \
  do {                                                     \
    if (auto qmlp_status_ = (expression); !qmlp_status_) { \
      return qmlp_status_.error();                         \
    }                                                      \
  } while (false)
#define QMLP_ASSIGN_(temporary, declaration, expression) \
  auto temporary = (expression);                         \
  if (!temporary) return temporary.error();              \
  declaration = *std::move(temporary)
#define QMLP_ASSIGN(declaration, expression) \
  QMLP_ASSIGN_(QMLP_CONCAT(qmlp_result_, __LINE__), declaration, expression)
