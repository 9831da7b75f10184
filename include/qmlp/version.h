#pragma once

#define QMLP_VERSION_MAJOR 0
#define QMLP_VERSION_MINOR 1
#define QMLP_VERSION_PATCH 0

namespace qmlp {

const char* version() noexcept;  // "0.1.0"

}  // namespace qmlp
