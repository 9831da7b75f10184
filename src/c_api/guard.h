#pragma once

#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "qmlp/c_api.h"
#include "qmlp/status.h"

namespace qmlp::c_api {

// Records the calling thread's error and gives its code. Never throws.
qmlp_status fail(Errc code, const char* message) noexcept;

inline Error null_error(const char* function, const char* argument) {
  return Error{Errc::invalid_argument,
               std::string(function) + ": " + argument + " is null, needs a value"};
}

// Runs a body that returns a Status, and keeps every exception on this side. These files are built
// with exceptions: the standard library throws when memory or threads run out, and the caller is C.
template <class Body>
qmlp_status guarded(Body&& body) noexcept {
  try {
    const Status status = std::forward<Body>(body)();
    if (status) return QMLP_OK;
    return fail(status.error().code, status.error().message.c_str());
  } catch (const std::bad_alloc&) {
    return fail(Errc::out_of_memory, "out of memory");
  } catch (const std::length_error&) {
    return fail(Errc::out_of_memory, "out of memory: a size is past what a container can hold");
  } catch (const std::system_error& error) {
    return fail(Errc::device, error.what());
  } catch (const std::exception& error) {
    return fail(Errc::internal, error.what());
  } catch (...) {
    return fail(Errc::internal, "unknown exception");
  }
}

}  // namespace qmlp::c_api

// Refuses a null argument by its name, inside a guarded body of the named function.
#define QMLP_NOT_NULL(function, argument) \
  if ((argument) == nullptr) return ::qmlp::c_api::null_error(function, #argument)
