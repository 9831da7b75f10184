#include "gpu.h"

#include <dlfcn.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace qmlp_mlx::gpu {

namespace mx = mlx::core;

namespace {

// The CUDA toolkit's dim3 and mlx::core::cu::CommandEncoder, as much as crosses the calls below.
// The headers of MLX's backend need those of the toolkit and of fmt; the class itself is only
// passed along.
struct Dim3 {
  unsigned x, y, z;
};
struct Encoder;

// Exported members, called with the object first, as the ABI passes it.
struct Functions {
  Encoder& (*get_command_encoder)(mx::Stream) = nullptr;
  void (*set_input_array)(Encoder*, const mx::array&) = nullptr;
  void (*set_output_array)(Encoder*, const mx::array&) = nullptr;
  void (*add_kernel_node_raw)(Encoder*, void* function, Dim3 grid, Dim3 block, Dim3 cluster,
                              std::uint32_t shared_bytes, void** params) = nullptr;
  void (*add_completed_handler)(Encoder*, std::function<void()>) = nullptr;
  void (*synchronize)(Encoder*) = nullptr;
  bool present = false;  // libmlx has a CUDA backend
  std::string mismatch;
};

const Functions& functions() {
  static const Functions found = [] {
    Functions f;
    Dl_info info = {};
    void* library = nullptr;
    if (dladdr(reinterpret_cast<const void*>(&mx::clear_cache), &info) != 0) {
      library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    if (library == nullptr) return f;
    const auto find = [&](auto& function, const char* symbol) {
      void* address = dlsym(library, symbol);
      function = reinterpret_cast<std::decay_t<decltype(function)>>(address);
      return address != nullptr;
    };
    f.present = find(f.get_command_encoder, "_ZN3mlx4core2cu19get_command_encoderENS0_6StreamE");
    if (!f.present) return f;
    const char* const missing =
        !find(f.set_input_array, "_ZN3mlx4core2cu14CommandEncoder15set_input_arrayERKNS0_5arrayE")
            ? "set_input_array"
        : !find(f.set_output_array,
                "_ZN3mlx4core2cu14CommandEncoder16set_output_arrayERKNS0_5arrayE")
            ? "set_output_array"
        : !find(f.add_kernel_node_raw,
                "_ZN3mlx4core2cu14CommandEncoder19add_kernel_node_rawEP9CUfunc_st4dim3S5_S5_jPPv")
            ? "add_kernel_node_raw"
        : !find(f.add_completed_handler,
                "_ZN3mlx4core2cu14CommandEncoder21add_completed_handlerESt8functionIFvvEE")
            ? "add_completed_handler"
        : !find(f.synchronize, "_ZN3mlx4core2cu14CommandEncoder11synchronizeEv") ? "synchronize"
                                                                                 : nullptr;
    if (missing != nullptr) {
      f.mismatch = std::string(
                       "this mlx has a CUDA backend without "
                       "mlx::core::cu::CommandEncoder::") +
                   missing + ", which GPU streams need";
    }
    return f;
  }();
  return found;
}

// MLX's own buffers: what an array's allocator::Buffer points to.
struct CudaBuffer {
  void* data;
  std::size_t size;
  int device;
};

// A primitive of MLX's that does nothing for empty input but give its output memory. MLX exports
// no other way to device memory: allocator::malloc gives managed memory, and moves device buffers
// of its cache there, waiting for the device.
mx::Primitive& memory_primitive() {
  // These live as long as the process: MLX's own state may be gone before a static of this module.
  static const auto* const primitive = new std::shared_ptr<mx::Primitive>(
      mx::square(mx::array(0.0f), mx::Device::gpu).primitive_ptr());
  return **primitive;
}
const std::vector<mx::array>& empty_input() {
  static const auto* const inputs = [] {
    mx::array empty({0}, mx::float32, nullptr, {});
    mx::array::Flags flags = {};  // not contiguous, so that the output's own size counts
    empty.set_data(mx::allocator::malloc(0), 0, {1}, flags);
    return new std::vector<mx::array>{empty};
  }();
  return *inputs;
}

bool has_memory(const mx::array& a) {
  return a.data_shared_ptr() != nullptr && a.buffer().ptr() != nullptr && pointer(a) != nullptr &&
         static_cast<CudaBuffer*>(a.buffer().ptr())->size >= a.nbytes();
}

void add_kernel(Encoder* encoder, const qmlp_cuda_launch& launch) {
  functions().add_kernel_node_raw(encoder, launch.function,
                                  {launch.grid[0], launch.grid[1], launch.grid[2]},
                                  {launch.block[0], launch.block[1], launch.block[2]}, {1, 1, 1},
                                  launch.shared_bytes, launch.params);
}

// Rows [..., cols] that lie a fixed step apart, each without gaps.
bool row_step(const mx::array& a, std::int64_t cols, std::int64_t& step) {
  const int ndim = static_cast<int>(a.ndim());
  if (a.strides(ndim - 1) != 1 && cols != 1) return false;
  step = cols;
  std::int64_t rows = 1;
  for (int i = ndim - 2; i >= 0; --i) {
    if (a.shape(i) == 1) continue;
    if (rows == 1) {
      step = a.strides(i);
      if (step < cols) return false;
    } else if (a.strides(i) != step * rows) {
      return false;
    }
    rows *= a.shape(i);
  }
  return true;
}

}  // namespace

const std::string& mismatch() { return functions().mismatch; }

const std::string& refusal() {
  static const std::string reason = [] {
    const Functions& f = functions();
    if (!f.present) return std::string("this mlx has no CUDA backend");
    if (!f.mismatch.empty()) return f.mismatch;
    qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
    problem.N = problem.K = 64;
    qmlp_support support = {};
    if (qmlp_supports_linear(&problem, "cuda", &support) != QMLP_OK) {
      return std::string(qmlp_last_error());
    }
    return support.supported != 0 ? std::string() : std::string(support.sentence);
  }();
  return reason;
}

void allocate(mx::array& out) {
  if (out.nbytes() != 0 && out.has_primitive()) {
    std::vector<mx::array> outputs = {out};
    memory_primitive().eval_gpu(empty_input(), outputs);
    if (has_memory(out)) return;
  }
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

int device_of(const mx::array& a) { return static_cast<CudaBuffer*>(a.buffer().ptr())->device; }

void* pointer(const mx::array& a) {
  return static_cast<char*>(static_cast<CudaBuffer*>(a.buffer().ptr())->data) + a.offset();
}

namespace {

// MLX's copy to a contiguous array.
mx::Primitive& copy_primitive() {
  static const auto* const primitive = new std::shared_ptr<mx::Primitive>(
      mx::contiguous(mx::array(0.0f), false, mx::Device::gpu).primitive_ptr());
  return **primitive;
}

}  // namespace

void synchronize(const mx::Stream& stream) {
  const Functions& f = functions();
  f.synchronize(&f.get_command_encoder(stream));
}

Recording::Recording(const mx::array& like)
    : primitive_(like.primitive_ptr()),
      encoder_(&functions().get_command_encoder(primitive_->stream())),
      exceptions_(std::uncaught_exceptions()) {}

Recording::~Recording() {
  if (std::uncaught_exceptions() > exceptions_) {
    held_.insert(held_.end(), touched_.begin(), touched_.end());
  }
  if (held_.empty()) return;
  functions().add_completed_handler(static_cast<Encoder*>(encoder_), [held = std::move(held_)] {});
}

mx::array Recording::allocated(mx::Shape shape, mx::Dtype type) {
  mx::array made = make(std::move(shape), type);
  allocate(made);
  keep(made);
  return made;
}

mx::array Recording::evaluated(mx::Primitive& primitive, const std::vector<mx::array>& inputs,
                               mx::Shape shape, mx::Dtype type) {
  std::vector<mx::array> outputs = {make(std::move(shape), type)};
  primitive.eval_gpu(inputs, outputs);
  keep(outputs[0]);
  return std::move(outputs[0]);
}

mx::array Recording::contiguous(const mx::array& a) {
  return evaluated(copy_primitive(), {a}, a.shape(), a.dtype());
}

void Recording::reads(const mx::array& a) {
  inputs_.push_back(a);
  touched_.push_back(a.data_shared_ptr());
}

qmlp_matrix Recording::matrix(const mx::array& a, std::int64_t cols, qmlp_dtype dtype) {
  std::int64_t step = cols;
  const bool direct = row_step(a, cols, step);
  if (direct) {
    reads(a);
  } else {
    step = cols;
    inputs_.push_back(contiguous(a));
  }
  return {pointer(inputs_.back()), static_cast<std::int64_t>(a.size()) / cols, cols, step, dtype};
}

const void* Recording::values(const mx::array& a) {
  if (a.flags().row_contiguous) {
    reads(a);
  } else {
    inputs_.push_back(contiguous(a));
  }
  return pointer(inputs_.back());
}

mx::array Recording::make_workspace(std::size_t bytes) {
  // In words, so that more than 2^31 bytes fit a shape.
  constexpr std::size_t kWord = QMLP_WORKSPACE_ALIGNMENT;
  const auto words = static_cast<mx::ShapeElem>((bytes + kWord - 1) / kWord);
  return allocated({words, static_cast<mx::ShapeElem>(kWord)}, mx::uint8);
}

void Recording::set_inputs() {
  for (const mx::array& a : inputs_) {
    functions().set_input_array(static_cast<Encoder*>(encoder_), a);
  }
  inputs_.clear();
}

void Recording::record(std::initializer_list<const mx::array*> writes,
                       const qmlp_cuda_launch& launch) {
  auto* const encoder = static_cast<Encoder*>(encoder_);
  set_inputs();
  for (const mx::array* a : writes) {
    touched_.push_back(a->data_shared_ptr());
    functions().set_output_array(encoder, *a);
  }
  add_kernel(encoder, launch);
}

qmlp_stream Recording::Sink::stream() {
  recording_.touched_.push_back(out_.data_shared_ptr());
  return {QMLP_CUDA_RECORDER, recording_.primitive_->stream().device.index, &recorder_};
}

// Every kernel writes, as far as MLX knows, the output and the workspace: so each is placed after
// the one before it.
qmlp_status Recording::Sink::launch(void* context, const qmlp_cuda_launch* launch) {
  auto& self = *static_cast<Sink*>(context);
  const Functions& f = functions();
  auto* const encoder = static_cast<Encoder*>(self.recording_.encoder_);
  try {
    self.recording_.set_inputs();
    f.set_output_array(encoder, self.out_);
    if (self.workspace_ != nullptr) f.set_output_array(encoder, *self.workspace_);
    add_kernel(encoder, *launch);
  } catch (...) {
    self.error_ = std::current_exception();
    return QMLP_DEVICE;
  }
  return QMLP_OK;
}

void Recording::Sink::finish(qmlp_status status) {
  if (status == QMLP_OK) return;
  if (error_) std::rethrow_exception(error_);
  throw_last_error(status);
}

}  // namespace qmlp_mlx::gpu
