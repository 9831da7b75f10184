#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu.h"
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

inline bool is_gpu(const mx::StreamOrDevice& where) {
  if (const auto* device = std::get_if<mx::Device>(&where)) return *device == mx::Device::gpu;
  const auto* type = std::get_if<mx::Device::DeviceType>(&where);
  return type != nullptr && *type == mx::Device::gpu;
}

// The stream of an op; throws when it is a GPU's and ops cannot run there.
inline mx::Stream stream_for(const char* op, const mx::StreamOrDevice& where) {
  const auto check_gpu = [op](bool gpu) {
    if (gpu && !gpu::refusal().empty()) {
      throw std::runtime_error(std::string(op) + ": " + gpu::refusal() +
                               "; give stream=mx.cpu or mx.set_default_device(mx.cpu)");
    }
  };
  check_gpu(is_gpu(where));  // a build of MLX without GPUs has no stream for one
  const mx::Stream s = mx::to_stream(where);
  check_gpu(s.device == mx::Device::gpu);
  return s;
}

// One evaluation of an op: its operands where they lie, on either device, and the handing over of
// its call.
class Run {
 public:
  // `donor`: an input whose memory the output takes over if nobody else needs it; or null.
  Run(const mx::Stream& stream, array& out, const array* donor)
      : stream_(stream), gpu_(stream.device == mx::Device::gpu), out_(out) {
    if (donor != nullptr && donor->is_donatable() && donor->nbytes() == out.nbytes() &&
        donor->flags().row_contiguous) {
      out.copy_shared_buffer(*donor);
    } else if (gpu_) {
      gpu::allocate(out);
    } else {
      allocate(out);
    }
    if (gpu_ && out.size() != 0) recording_.emplace(out);
  }

  qmlp_matrix matrix(const array& a, std::int64_t cols, qmlp_dtype dtype) {
    return gpu_ ? recording_->matrix(a, cols, dtype) : matrix_of(a, cols, dtype);
  }
  const void* values(const array& a) {
    return gpu_ ? recording_->values(a) : static_cast<const void*>(a.data<char>());
  }
  qmlp_mutable_matrix output(std::int64_t cols, qmlp_dtype dtype) {
    if (!gpu_) return output_of(out_, cols, dtype);
    return {gpu::pointer(out_), static_cast<std::int64_t>(out_.size()) / cols, cols, cols, dtype};
  }
  // `call(workspace, stream)` is of the C interface; `weights` is what it reads.
  template <class Call>
  void hand_over(std::size_t workspace_bytes, std::vector<PackedPtr> weights, Call call) {
    if (gpu_) {
      for (PackedPtr& weight : weights) recording_->keep(std::move(weight));
      recording_->record(out_, workspace_bytes, call);
    } else {
      dispatch(stream_, workspace_bytes,
               [weights = std::move(weights), call = std::move(call)](
                   const qmlp_workspace& workspace, const qmlp_stream& cpu) {
                 return call(workspace, cpu);
               });
    }
  }

 private:
  const mx::Stream& stream_;
  bool gpu_;
  array& out_;
  std::optional<gpu::Recording> recording_;
};

// A primitive with one way of running on both devices.
class OpPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  virtual void run(const std::vector<array>& inputs, array& out) = 0;
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    run(inputs, outputs[0]);
  }
  void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    run(inputs, outputs[0]);
  }
};

// A primitive that is built for CPU streams alone.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error(std::string(name()) + ": runs on CPU streams");
  }
};

// Batched operands with their batch first.
inline array batch_first(const array& a, int axis, const mx::Stream& s) {
  return axis > 0 ? mx::moveaxis(a, axis, 0, s) : a;
}
inline void check_parts(const char* op, const char* name, const PackedWeightPtr& weight,
                        int parts) {
  if (weight == nullptr || weight->num_parts() != parts) {
    refuse(std::string(op) + ": " + name + " holds " +
           std::to_string(weight == nullptr ? 0 : weight->num_parts()) + " arrays, needs " +
           std::to_string(parts));
  }
}

}  // namespace qmlp_mlx
