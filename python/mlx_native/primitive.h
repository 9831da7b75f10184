#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "ops.h"

// What the primitives share: running a call of the C interface on an MLX stream, and shapes.
namespace qmlp_mlx {

namespace mx = mlx::core;

[[noreturn]] inline void refuse(const std::string& message) {
  throw std::invalid_argument(message);
}

inline std::string text_of(const mx::Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

inline mx::Shape with_last(mx::Shape shape, std::int64_t last) {
  shape.back() = static_cast<mx::ShapeElem>(last);
  return shape;
}

inline void allocate(array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

inline qmlp_matrix matrix_of(const array& a, std::int64_t cols, qmlp_dtype dtype) {
  return {a.data<char>(), static_cast<std::int64_t>(a.size()) / cols, cols, cols, dtype};
}
inline qmlp_mutable_matrix output_of(array& a, std::int64_t cols, qmlp_dtype dtype) {
  return {a.data<char>(), static_cast<std::int64_t>(a.size()) / cols, cols, cols, dtype};
}

// Hands `call(workspace, stream)` to the stream's thread. MLX keeps the arrays of an op alive until
// its task is done; a task that throws fails the evaluation.
template <class Call>
void dispatch(const mx::Stream& stream, std::size_t workspace_bytes, Call call) {
  mx::cpu::get_command_encoder(stream).dispatch([workspace_bytes, call = std::move(call)] {
    const qmlp_python::PoolHold pool(runtime());
    if (pool.pool() == nullptr) throw_last_error(QMLP_DEVICE);
    qmlp_workspace workspace = {nullptr, workspace_bytes};
    if (workspace_bytes != 0) {
      workspace.data = runtime().scratch(workspace_bytes);
      if (workspace.data == nullptr) throw std::bad_alloc();
    }
    const qmlp_stream cpu = {QMLP_CPU, 0, pool.pool()};
    check(call(workspace, cpu));
  });
}

class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error(std::string(name()) +
                             ": this build of qmlp.mlx runs on the CPU; give stream=mx.cpu or "
                             "mx.set_default_device(mx.cpu)");
  }
};

// Batched operands with their batch first.
inline array batch_first(const array& a, int axis, const mx::Stream& s) {
  return axis > 0 ? mx::moveaxis(a, axis, 0, s) : a;
}
inline void check_parts(const char* op, const PackedWeightPtr& weight, int parts) {
  if (weight == nullptr || weight->num_parts() != parts) {
    refuse(std::string(op) + ": weight holds " +
           std::to_string(weight == nullptr ? 0 : weight->num_parts()) + " arrays, needs " +
           std::to_string(parts));
  }
}

}  // namespace qmlp_mlx
