#pragma once

#include <cstdint>
#include <memory>

#include "qmlp/ops.h"
#include "qmlp/types.h"

namespace qmlp {

class PackedWeight {
 public:
  Device device;
  DType activation = DType::bf16;
  std::int64_t N = 0;
  std::int64_t K = 0;
  int num_parts = 1;  // 2: gate and up
  QuantSpec spec[2];
  // The backend's own form of each part. One that packs gate and up together uses the first alone.
  std::shared_ptr<const void> parts[2];
};

}  // namespace qmlp
