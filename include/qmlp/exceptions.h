#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "qmlp/status.h"

namespace qmlp {

// An Error as an exception, for callers who prefer them. The library itself never throws.
class Exception : public std::runtime_error {
 public:
  explicit Exception(Error error) : std::runtime_error(error.message), error_(std::move(error)) {}
  Errc code() const noexcept { return error_.code; }

 private:
  Error error_;
};

template <class T>
T value_or_throw(Result<T> result) {
  if (!result) throw Exception(result.error());
  return *std::move(result);
}
inline void value_or_throw(const Status& status) {
  if (!status) throw Exception(status.error());
}

}  // namespace qmlp
