#pragma once

#include <cstdint>
#include <memory>

#include "cpu/pack.h"
#include "qmlp/ops.h"
#include "qmlp/types.h"

namespace qmlp {

class PackedWeight {
 public:
  DeviceKind device = DeviceKind::cpu;
  DType activation = DType::bf16;
  int num_parts = 1;  // 2: gate and up
  std::shared_ptr<const cpu::PackedMatrix> parts[2];
};

}  // namespace qmlp
