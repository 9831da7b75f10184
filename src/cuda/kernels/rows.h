#pragma once

#include <algorithm>

#include "cuda/device/args.h"

namespace qmlp::cuda {

inline const void* rows_from(const void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<const std::uint16_t*>(rows) + elements;
}
inline void* rows_from(void* rows, std::int64_t elements) {
  return rows == nullptr ? nullptr : static_cast<std::uint16_t*>(rows) + elements;
}

// The same product of rows `first` .. + `count` of x alone, or as many as there are.
inline MatmulArgs rows_of(const MatmulArgs& args, std::int64_t first, std::int64_t count) {
  MatmulArgs part = args;
  part.x = rows_from(args.x, first * args.x_stride);
  part.epilogue.out = rows_from(args.epilogue.out, first * args.epilogue.out_stride);
  part.epilogue.residual = rows_from(args.epilogue.residual, first * args.epilogue.residual_stride);
  part.epilogue.gate_tap = rows_from(args.epilogue.gate_tap, first * args.epilogue.gate_tap_stride);
  part.M = std::min(args.M - first, count);
  return part;
}

}  // namespace qmlp::cuda
