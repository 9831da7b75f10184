#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "qmlp/c_api.h"
#include "weights.h"

// MLX's CUDA backend as far as the ops need it. Its functions are looked up in the libmlx that is
// loaded, so one module serves the CPU and the CUDA wheels of a version of MLX.
namespace qmlp_mlx::gpu {

// Empty when ops can run on GPU streams; otherwise one sentence that says why they cannot.
const std::string& refusal();
// Empty when libmlx has either no CUDA backend or one whose functions are all as expected.
const std::string& mismatch();

// Gives the array memory of its stream's device; the array's primitive says which stream.
void allocate(mlx::core::array& out);
void* pointer(const mlx::core::array& a);
// The ordinal of the device whose memory an evaluated array is in; -1: managed memory.
int device_of(const mlx::core::array& a);
// Waits until all work of a stream is done, what was recorded and not started included.
void synchronize(const mlx::core::Stream& stream);

// One evaluation of an op on a GPU stream: kernels of ours and ops of MLX's go into MLX's graph,
// ordered by the arrays they touch. What it was told to keep lives until all of them have run, and
// so does everything else that they touch if the op fails half recorded, since MLX then holds
// nothing.
class Recording {
 public:
  // `like` is an output; its primitive names the stream.
  explicit Recording(const mlx::core::array& like);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void keep(std::shared_ptr<const void> held) { held_.push_back(std::move(held)); }
  void keep(const mlx::core::array& a) { keep(a.data_shared_ptr()); }

  // An array of the op's own; the second has memory, kept.
  mlx::core::array make(mlx::core::Shape shape, mlx::core::Dtype type) const {
    return mlx::core::array(std::move(shape), type, primitive_, {});
  }
  mlx::core::array allocated(mlx::core::Shape shape, mlx::core::Dtype type);
  // What an op of MLX's makes of its inputs; kept.
  mlx::core::array evaluated(mlx::core::Primitive& primitive,
                             const std::vector<mlx::core::array>& inputs, mlx::core::Shape shape,
                             mlx::core::Dtype type);
  mlx::core::array contiguous(const mlx::core::array& a);

  // What the next kernels read: the rows of an array [..., cols] where they lie, or of a copy when
  // they lie otherwise; the values of a contiguous array, or of a copy.
  qmlp_matrix matrix(const mlx::core::array& a, std::int64_t cols, qmlp_dtype dtype);
  const void* values(const mlx::core::array& a);
  void reads(const mlx::core::array& a);

  // Records what `call(workspace, stream)` launches to make `out`, which has memory.
  template <class Call>
  void record(const mlx::core::array& out, std::size_t workspace_bytes, const Call& call) {
    std::optional<mlx::core::array> workspace;
    if (workspace_bytes != 0) workspace = make_workspace(workspace_bytes);
    Sink sink(*this, out, workspace ? &*workspace : nullptr);
    const qmlp_stream stream = sink.stream();
    sink.finish(
        call(qmlp_workspace{workspace ? pointer(*workspace) : nullptr, workspace_bytes}, stream));
  }
  // Records one kernel.
  void record(std::initializer_list<const mlx::core::array*> writes,
              const qmlp_cuda_launch& launch);

 private:
  // Gets the kernels of one call.
  class Sink {
   public:
    Sink(Recording& recording, const mlx::core::array& out, const mlx::core::array* workspace)
        : recording_(recording), out_(out), workspace_(workspace), recorder_{launch, this} {}
    qmlp_stream stream();
    void finish(qmlp_status status);  // throws what went wrong

   private:
    static qmlp_status launch(void* context, const qmlp_cuda_launch* launch);
    Recording& recording_;
    const mlx::core::array& out_;
    const mlx::core::array* workspace_;
    qmlp_cuda_recorder recorder_;
    std::exception_ptr error_;
  };

  mlx::core::array make_workspace(std::size_t bytes);
  void set_inputs();

  std::shared_ptr<mlx::core::Primitive> primitive_;
  void* encoder_;
  std::vector<mlx::core::array> inputs_;  // of the next kernel
  std::vector<std::shared_ptr<const void>> held_, touched_;
  int exceptions_;  // in flight when this was made
};

}  // namespace qmlp_mlx::gpu
