#pragma once

#include <string>

#include "qmlp/c_api.h"

namespace qmlp_python {

// A failed call of the library, on its way to becoming one of qmlp's Python exceptions.
struct CallError {
  qmlp_status status;
  std::string message;
};

[[noreturn]] inline void throw_last_error(qmlp_status status) {
  throw CallError{status, qmlp_last_error()};
}
inline void check(qmlp_status status) {
  if (status != QMLP_OK) throw_last_error(status);
}

}  // namespace qmlp_python
