#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
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

// Holds the memory of arrays until what is recorded on a stream so far has run.
void keep_alive(const mlx::core::Stream& stream, const std::vector<mlx::core::array>& arrays);
// MLX's copy to a contiguous array, to be evaluated inside an op's evaluation.
mlx::core::Primitive& copy_primitive();

// One op on a GPU stream: its kernels go into MLX's graph, ordered by the arrays they touch.
class Recording {
 public:
  // `out` has memory already; its primitive names the stream.
  explicit Recording(mlx::core::array& out) : out_(out) {}

  // The rows of an array [..., cols] where they lie, or of a copy when they lie otherwise.
  qmlp_matrix matrix(const mlx::core::array& a, std::int64_t cols, qmlp_dtype dtype);
  // The values of a contiguous array, or of a copy.
  const void* values(const mlx::core::array& a);

  // Records what `call(workspace, stream)` launches; keeps `weights` until that has run.
  template <class Call>
  void record(std::size_t workspace_bytes, std::vector<PackedPtr> weights, const Call& call) {
    const qmlp_workspace workspace = make_workspace(workspace_bytes);
    keep(std::move(weights));
    Sink sink(*this);
    const qmlp_stream stream = sink.stream();
    sink.finish(call(workspace, stream));
  }

 private:
  // Gets the kernels of one call.
  class Sink {
   public:
    explicit Sink(Recording& recording);
    qmlp_stream stream();
    void finish(qmlp_status status);  // throws what went wrong

   private:
    static qmlp_status launch(void* context, const qmlp_cuda_launch* launch);
    Recording& recording_;
    qmlp_cuda_recorder recorder_;
    void* encoder_;
    bool first_ = true;
    std::exception_ptr error_;
  };

  mlx::core::array contiguous(const mlx::core::array& a);
  qmlp_workspace make_workspace(std::size_t bytes);
  void keep(std::vector<PackedPtr> weights);
  const mlx::core::Stream& mlx_stream() const;

  mlx::core::array& out_;
  std::vector<mlx::core::array> inputs_;
  std::optional<mlx::core::array> workspace_;
};

}  // namespace qmlp_mlx::gpu
