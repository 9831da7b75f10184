#include "qmlp/plan.h"
#include "qmlp/status.h"
#include "qmlp/types.h"
#include "qmlp/version.h"

// Names of the public enumerations, as messages, JSON and options spell them.
namespace qmlp {

const char* to_string(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument:
      return "invalid_argument";
    case Errc::unsupported:
      return "unsupported";
    case Errc::corrupt_file:
      return "corrupt_file";
    case Errc::io:
      return "io";
    case Errc::out_of_memory:
      return "out_of_memory";
    case Errc::device:
      return "device";
    case Errc::interrupted:
      return "interrupted";
    case Errc::internal:
      return "internal";
  }
  return "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "unknown";
}

const char* to_string(Precision precision) noexcept {
  return precision == Precision::match ? "match" : "wide";
}

const char* to_string(Accumulation accumulation) noexcept {
  return accumulation == Accumulation::f32 ? "f32" : "tensor";
}

const char* to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::neon:
      return "neon";
    case Isa::sm80:
      return "sm80";
    case Isa::sm90a:
      return "sm90a";
  }
  return "unknown";
}

const char* to_string(Reason reason) noexcept {
  switch (reason) {
    case Reason::ok:
      return "ok";
    case Reason::no_device:
      return "no_device";
    case Reason::no_isa:
      return "no_isa";
    case Reason::dtype:
      return "dtype";
    case Reason::bits:
      return "bits";
    case Reason::group_size:
      return "group_size";
    case Reason::shape:
      return "shape";
    case Reason::accumulation:
      return "accumulation";
  }
  return "unknown";
}

#define QMLP_STRING_(x) #x
#define QMLP_STRING(x) QMLP_STRING_(x)
const char* version() noexcept {
  return QMLP_STRING(QMLP_VERSION_MAJOR) "." QMLP_STRING(QMLP_VERSION_MINOR) "." QMLP_STRING(
      QMLP_VERSION_PATCH);
}

}  // namespace qmlp
