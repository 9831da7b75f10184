#include "weights.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "gpu.h"
#include "mlx/mlx.h"

namespace qmlp_mlx {

namespace mx = mlx::core;

namespace {

// Plans take calls of any length; workspaces follow the call.
constexpr std::int64_t kAnyM = std::int64_t{1} << 31;

const qmlp_python::Runtime* the_runtime = nullptr;

qmlp_tensor view_of(const Source& source, std::int64_t N, std::int64_t K,
                    const qmlp_quant_spec& spec, Place place) {
  const auto address = [&](const mx::array& a) -> const void* {
    return place == mx::Device::gpu ? gpu::pointer(a) : a.data<char>();
  };
  qmlp_tensor view = {};
  view.codes = address(source.codes);
  view.codes_bytes = source.codes.nbytes();
  if (!source.scales_biases.empty()) {
    view.scales = address(source.scales_biases[0]);
    view.scales_bytes = source.scales_biases[0].nbytes();
    view.biases = address(source.scales_biases[1]);
    view.biases_bytes = source.scales_biases[1].nbytes();
  }
  view.N = N;
  view.K = K;
  view.spec = spec;
  return view;
}

std::string shape_text(const mx::Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace

const qmlp_python::Runtime& runtime() { return *the_runtime; }
void set_runtime(const qmlp_python::Runtime* runtime) { the_runtime = runtime; }

void throw_last_error(qmlp_status status) {
  const std::string message = qmlp_last_error();
  if (status == QMLP_INVALID_ARGUMENT || status == QMLP_UNSUPPORTED) {
    throw std::invalid_argument(message);
  }
  if (status == QMLP_OUT_OF_MEMORY) throw std::bad_alloc();
  throw std::runtime_error(message);
}
void check(qmlp_status status) {
  if (status != QMLP_OK) throw_last_error(status);
}

qmlp_dtype dtype_code(mx::Dtype dtype) {
  if (dtype == mx::float32) return QMLP_F32;
  if (dtype == mx::float16) return QMLP_F16;
  if (dtype == mx::bfloat16) return QMLP_BF16;
  throw std::invalid_argument("dtype is " + name_of(dtype) +
                              ", needs float32, float16 or bfloat16");
}
std::string name_of(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}
std::string name_of(Place place) {
  return place == mx::Device::gpu ? "cuda:" + std::to_string(place.index) : "cpu";
}
mx::Dtype mlx_dtype(qmlp_dtype dtype) {
  switch (dtype) {
    case QMLP_F16:
      return mx::float16;
    case QMLP_BF16:
      return mx::bfloat16;
    default:
      return mx::float32;
  }
}

PackedWeightPtr PackedWeight::make(std::vector<Source> sources, int bits[2], int group_sizes[2],
                                   mx::Dtype activation, Place place, int segments) {
  PackedWeightPtr made(new PackedWeight);
  made->segments_ = segments;
  std::vector<mx::array> wanted;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    Source& source = sources[i];
    const char* name = sources.size() == 1 ? "weight" : i == 0 ? "gate" : "up";
    const bool dense = source.scales_biases.empty();
    if (source.codes.ndim() != 2) {
      throw std::invalid_argument(std::string(name) + " is " + shape_text(source.codes.shape()) +
                                  ", needs two axes");
    }
    const std::int64_t N = source.codes.shape(0);
    std::int64_t K = source.codes.shape(1);
    qmlp_quant_spec spec = {};
    if (dense) {
      spec.scale_dtype = dtype_code(source.codes.dtype());
      spec.bits = spec.scale_dtype == QMLP_F32 ? 32 : 16;
    } else {
      const mx::array& scales = source.scales_biases[0];
      const mx::array& biases = source.scales_biases[1];
      if (source.codes.dtype() != mx::uint32) {
        throw std::invalid_argument(std::string(name) + " codes are " +
                                    name_of(source.codes.dtype()) + ", needs uint32");
      }
      if (scales.dtype() != biases.dtype()) {
        throw std::invalid_argument(std::string(name) + " scales and biases have two types, " +
                                    "need one");
      }
      spec = {bits[i], group_sizes[i], dtype_code(scales.dtype())};
      if (scales.shape() != biases.shape() || scales.ndim() != 2 || scales.shape(0) != N ||
          std::int64_t{scales.shape(1)} * spec.group_size * spec.bits != K * 32) {
        throw std::invalid_argument(
            std::string(name) + " codes are " + shape_text(source.codes.shape()) + ", scales " +
            shape_text(scales.shape()) + ", biases " + shape_text(biases.shape()) +
            ": do not fit " + std::to_string(spec.bits) + " bits, group " +
            std::to_string(spec.group_size));
      }
      K = std::int64_t{scales.shape(1)} * spec.group_size;
    }
    if (i > 0 && (N != made->N_ || K != made->K_)) {
      throw std::invalid_argument("gate is [" + std::to_string(made->N_) + ", " +
                                  std::to_string(made->K_) + "], up is [" + std::to_string(N) +
                                  ", " + std::to_string(K) + "]: need one shape");
    }
    made->N_ = N;
    made->K_ = K;
    made->specs_.push_back(spec);
    source.codes = mx::contiguous(source.codes, false, place);
    wanted.push_back(source.codes);
    for (mx::array& part : source.scales_biases) {
      part = mx::contiguous(part, false, place);
      wanted.push_back(part);
    }
  }
  mx::eval(wanted);
  wanted.clear();
  made->kept_ = std::move(sources);
  made->packed(activation, place);
  return made;
}

mx::Dtype PackedWeight::compute_type(mx::Dtype x) const {
  mx::Dtype type = x;
  for (const qmlp_quant_spec& spec : specs_) {
    type = mx::promote_types(type, mlx_dtype(spec.scale_dtype));
  }
  return type;
}

std::size_t PackedWeight::nbytes() const {
  if (whole_ != nullptr) return 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t bytes = 0;
  for (const Form& form : packed_) bytes += qmlp_weight_bytes(form.packed->weight.get());
  for (const Source& source : kept_) {
    bytes += source.codes.nbytes();
    for (const mx::array& part : source.scales_biases) bytes += part.nbytes();
  }
  return bytes;
}

PackedPtr PackedWeight::packed(mx::Dtype activation, Place place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (whole_ != nullptr) {
    // A part follows its whole.
    PackedPtr from = whole_->packed(activation, place);
    if (part_of_ != from) {
      packed_.assign(1, {activation, place, pack_part(from, activation, place)});
      part_of_ = std::move(from);
    }
    return packed_.front().packed;
  }
  for (const Form& form : packed_) {
    if (form.activation == activation && form.place == place) return form.packed;
  }
  PackedPtr made = pack(activation, place);
  const bool whole_source = gives_back(*made);
  // One form at a time: a model computes in one type, and its weights should not be there twice.
  // But the source's bits must be somewhere.
  if (whole_source || !kept_.empty()) {
    packed_.clear();
  } else {
    packed_.erase(packed_.begin() + 1, packed_.end());
  }
  packed_.push_back({activation, place, made});
  if (whole_source) kept_.clear();
  return made;
}

bool PackedWeight::gives_back(const Packed& packed) const {
  if (qmlp_weight_exact_blocks(packed.weight.get()) != 0) return false;
  // Dense floats are not among the exact blocks, whatever type they became.
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].group_size != 0) continue;
    std::vector<char> row(static_cast<std::size_t>(K_) * static_cast<std::size_t>(specs_[i].bits) /
                          8);
    const qmlp_status status = qmlp_weight_unpack_rows(packed.weight.get(), static_cast<int>(i), 0,
                                                       1, row.data(), nullptr, nullptr);
    if (status == QMLP_UNSUPPORTED) return false;
    check(status);
  }
  return true;
}

Place PackedWeight::place() const {
  const PackedWeight& owner = whole_ == nullptr ? *this : *whole_;
  const std::lock_guard<std::mutex> lock(owner.mutex_);
  return owner.packed_.front().place;
}

std::shared_ptr<qmlp_plan> PackedWeight::make_plan(mx::Dtype activation, Place place) const {
  const std::string device = name_of(place);
  const qmlp_dtype code = dtype_code(activation);
  const int segments = place == mx::Device::gpu ? segments_ : 0;
  qmlp_plan* plan = nullptr;
  if (specs_.size() == 1) {
    qmlp_linear_problem problem = QMLP_LINEAR_PROBLEM_INIT;
    problem.M_max = kAnyM;
    problem.N = N_;
    problem.K = K_;
    problem.weight = specs_[0];
    problem.activation = code;
    problem.segments = segments;
    check(qmlp_plan_linear(&problem, device.c_str(), nullptr, &plan));
  } else {
    qmlp_swiglu_problem problem = QMLP_SWIGLU_PROBLEM_INIT;
    problem.M_max = kAnyM;
    problem.hidden = K_;
    problem.intermediate = N_;
    problem.gate = specs_[0];
    problem.up = specs_[1];
    problem.activation = code;
    problem.segments = segments;
    check(qmlp_plan_swiglu(&problem, device.c_str(), nullptr, &plan));
  }
  return std::shared_ptr<qmlp_plan>(plan, qmlp_plan_free);
}

PackedPtr PackedWeight::pack_part(const PackedPtr& from, mx::Dtype activation, Place place) const {
  qmlp_weight* weight = nullptr;
  check(qmlp_weight_part(from->weight.get(), index_, &weight));
  auto made = std::make_shared<Packed>();
  made->weight = std::shared_ptr<qmlp_weight>(weight, qmlp_weight_free);
  made->plan = make_plan(activation, place);
  return made;
}

// The lock is held.
PackedPtr PackedWeight::pack(mx::Dtype activation, Place place) const {
  auto made = std::make_shared<Packed>();
  made->plan = make_plan(activation, place);
  const qmlp_plan* plan = made->plan.get();
  qmlp_weight* weight = nullptr;

  std::vector<std::vector<char>> buffers;  // what an earlier packed form gives back
  std::vector<qmlp_tensor> views;
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (!kept_.empty()) {
      views.push_back(view_of(kept_[i], N_, K_, specs_[i], place));
      continue;
    }
    qmlp_tensor view = {};
    std::size_t codes_bytes = 0, scales_bytes = 0;
    check(qmlp_quant_sizes(N_, K_, &specs_[i], &codes_bytes, &scales_bytes));
    const std::size_t sizes[] = {codes_bytes, scales_bytes, scales_bytes};
    char* data[3] = {};
    for (int j = 0; j < 3; ++j) data[j] = buffers.emplace_back(sizes[j]).data();
    check(qmlp_weight_unpack_rows(packed_.front().packed->weight.get(), static_cast<int>(i), 0, N_,
                                  data[0], data[1], data[2]));
    view.codes = data[0];
    view.codes_bytes = codes_bytes;
    view.scales = data[1];
    view.biases = data[2];
    view.scales_bytes = view.biases_bytes = scales_bytes;
    view.N = N_;
    view.K = K_;
    view.spec = specs_[i];
    views.push_back(view);
  }
  const auto pack_on = [&](const qmlp_stream& stream) {
    return views.size() == 1 ? qmlp_pack_linear(plan, &views[0], &stream, &weight)
                             : qmlp_pack_swiglu(plan, &views[0], &views[1], &stream, &weight);
  };
  if (place == mx::Device::gpu) {
    const qmlp_stream stream = {QMLP_CUDA, place.index, nullptr};
    qmlp_status status = pack_on(stream);
    if (status == QMLP_OUT_OF_MEMORY) {
      mx::clear_cache();  // MLX keeps what it frees
      status = pack_on(stream);
    }
    check(status);
  } else {
    const qmlp_python::PoolHold pool(runtime());
    if (pool.pool() == nullptr) throw_last_error(QMLP_DEVICE);
    check(pack_on({QMLP_CPU, 0, pool.pool()}));
  }
  made->weight = std::shared_ptr<qmlp_weight>(weight, qmlp_weight_free);
  return made;
}

PackedWeightPtr PackedWeight::part(int index) {
  if (index < 0 || index >= num_parts()) {
    throw std::invalid_argument("part: index is " + std::to_string(index) + ", needs 0 to " +
                                std::to_string(num_parts() - 1));
  }
  if (num_parts() == 1) return shared_from_this();
  PackedWeightPtr half(new PackedWeight);
  half->N_ = N_;
  half->K_ = K_;
  half->specs_ = {specs_[static_cast<std::size_t>(index)]};
  half->segments_ = segments_;
  half->whole_ = shared_from_this();
  half->index_ = index;
  return half;
}

void PackedWeight::unpack_rows(std::int64_t row_begin, std::int64_t row_count, void* codes,
                               void* scales, void* biases) const {
  const PackedWeight& owner = whole_ == nullptr ? *this : *whole_;
  PackedPtr from;
  std::vector<Source> kept;
  {
    const std::lock_guard<std::mutex> lock(owner.mutex_);
    kept = owner.kept_;
    from = owner.packed_.front().packed;
  }
  if (kept.empty()) {
    check(qmlp_weight_unpack_rows(from->weight.get(), index_, row_begin, row_count, codes, scales,
                                  biases));
    return;
  }
  const auto copy = [&](const mx::array& source, void* to) {
    const std::size_t row = source.nbytes() / static_cast<std::size_t>(N_);
    std::memcpy(to, source.data<char>() + static_cast<std::size_t>(row_begin) * row,
                static_cast<std::size_t>(row_count) * row);
  };
  const Source& source = kept[static_cast<std::size_t>(index_)];
  copy(source.codes, codes);
  if (source.scales_biases.empty()) return;
  copy(source.scales_biases[0], scales);
  copy(source.scales_biases[1], biases);
}

std::vector<mx::array> PackedWeight::kept_arrays() const {
  const PackedWeight& owner = whole_ == nullptr ? *this : *whole_;
  const std::lock_guard<std::mutex> lock(owner.mutex_);
  if (owner.kept_.empty()) return {};
  const Source& source = owner.kept_[static_cast<std::size_t>(index_)];
  std::vector<mx::array> arrays = {source.codes};
  arrays.insert(arrays.end(), source.scales_biases.begin(), source.scales_biases.end());
  return arrays;
}

}  // namespace qmlp_mlx
