#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../native/runtime.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "qmlp/c_api.h"

namespace qmlp_mlx {

// The package's runtime: its thread pool and scratch. Set once, when the module is imported.
const qmlp_python::Runtime& runtime();
void set_runtime(const qmlp_python::Runtime* runtime);

[[noreturn]] void throw_last_error(qmlp_status status);
void check(qmlp_status status);

qmlp_dtype dtype_code(mlx::core::Dtype dtype);  // throws std::invalid_argument for another type
std::string name_of(mlx::core::Dtype dtype);    // "bfloat16"
std::string name_of(mlx::core::Device device);  // "cpu", "cuda:0"
mlx::core::Dtype mlx_dtype(qmlp_dtype dtype);

// Where an op runs and its weights lie: the CPU, or a GPU of MLX's.
using Place = mlx::core::Device;
inline Place place_of(const mlx::core::Stream& s) { return s.device; }

// A plan and the weight it packed, for one activation type and place.
struct Packed {
  std::shared_ptr<qmlp_plan> plan;
  std::shared_ptr<qmlp_weight> weight;
};
using PackedPtr = std::shared_ptr<const Packed>;

// One source matrix as MLX holds it: codes, scales, biases; a dense one has its floats in `codes`.
struct Source {
  mlx::core::array codes;
  std::vector<mlx::core::array> scales_biases;  // empty or two
};

// Weights for an op, packed for the activation type and the place that they meet, and again if that
// changes. The packed form holds the source's own bits, so the arrays it came from need not be
// kept.
class PackedWeight : public std::enable_shared_from_this<PackedWeight> {
 public:
  // Evaluates the sources and packs them for `activation` at `place`. One source is a linear layer,
  // two are gate and up. segments: of sums on a GPU, 0 for the plan's choice.
  static std::shared_ptr<PackedWeight> make(std::vector<Source> sources, int bits[2],
                                            int group_sizes[2], mlx::core::Dtype activation,
                                            Place place, int segments);

  std::int64_t N() const { return N_; }
  std::int64_t K() const { return K_; }
  int num_parts() const { return static_cast<int>(specs_.size()); }
  const qmlp_quant_spec& spec(int part = 0) const { return specs_[static_cast<std::size_t>(part)]; }
  bool is_dense() const { return specs_[0].group_size == 0; }
  // MLX's promotion of x with the scales: the type of the computation and of its result.
  mlx::core::Dtype compute_type(mlx::core::Dtype x) const;
  std::size_t nbytes() const;  // of all packed forms and kept arrays

  PackedPtr packed(mlx::core::Dtype activation, Place place) const;
  // Half of gate and up as a linear weight that shares the memory.
  std::shared_ptr<PackedWeight> part(int index);
  // Where the form lies that gives the source's bits back.
  Place place() const;
  // Rows as MLX holds them: into buffers of exactly the right size, in host memory or, where
  // place() is a GPU, in that of a GPU.
  void unpack_rows(std::int64_t row_begin, std::int64_t row_count, void* codes, void* scales,
                   void* biases) const;
  // The source arrays, where they had to be kept.
  std::vector<mlx::core::array> kept_arrays() const;

 private:
  PackedWeight() = default;
  struct Form {
    mlx::core::Dtype activation;
    Place place;
    PackedPtr packed;
  };
  std::shared_ptr<qmlp_plan> make_plan(mlx::core::Dtype activation, Place place) const;
  PackedPtr pack(mlx::core::Dtype activation, Place place) const;
  PackedPtr pack_part(const PackedPtr& from, mlx::core::Dtype activation, Place place) const;
  bool gives_back(const Packed& packed) const;  // the source's bits

  std::int64_t N_ = 0;
  std::int64_t K_ = 0;
  std::vector<qmlp_quant_spec> specs_;
  int segments_ = 0;                     // of sums on a GPU
  std::shared_ptr<PackedWeight> whole_;  // of a part
  int index_ = 0;

  mutable std::mutex mutex_;
  mutable PackedPtr part_of_;  // the whole's form that packed_ is a part of
  // The first gives the source's bits back, or the source is kept.
  mutable std::vector<Form> packed_;
  mutable std::vector<Source> kept_;
};
using PackedWeightPtr = std::shared_ptr<PackedWeight>;

}  // namespace qmlp_mlx
