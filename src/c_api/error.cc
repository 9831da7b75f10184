#include <array>
#include <cstring>

#include "c_api/guard.h"
#include "qmlp/version.h"

namespace qmlp::c_api {
namespace {

// A fixed buffer, so that even "out of memory" can be said.
thread_local std::array<char, 1024> last_error{};

constexpr qmlp_status status_of(Errc code) noexcept { return static_cast<qmlp_status>(code) + 1; }
static_assert(status_of(Errc::invalid_argument) == QMLP_INVALID_ARGUMENT);
static_assert(status_of(Errc::unsupported) == QMLP_UNSUPPORTED);
static_assert(status_of(Errc::corrupt_file) == QMLP_CORRUPT_FILE);
static_assert(status_of(Errc::io) == QMLP_IO);
static_assert(status_of(Errc::out_of_memory) == QMLP_OUT_OF_MEMORY);
static_assert(status_of(Errc::device) == QMLP_DEVICE);
static_assert(status_of(Errc::interrupted) == QMLP_INTERRUPTED);
static_assert(status_of(Errc::internal) == QMLP_INTERNAL);

}  // namespace

qmlp_status fail(Errc code, const char* message) noexcept {
  const std::size_t length = strnlen(message, last_error.size() - 1);
  std::memcpy(last_error.data(), message, length);
  last_error[length] = '\0';
  return status_of(code);
}

}  // namespace qmlp::c_api

extern "C" {

const char* qmlp_version(void) { return qmlp::version(); }
int32_t qmlp_c_api_version(void) { return QMLP_C_API_VERSION; }
const char* qmlp_last_error(void) { return qmlp::c_api::last_error.data(); }
const char* qmlp_status_name(qmlp_status status) {
  if (status == QMLP_OK) return "ok";
  if (status < QMLP_OK || status > QMLP_INTERNAL) return "unknown";
  return qmlp::to_string(static_cast<qmlp::Errc>(status - 1));
}

}  // extern "C"
