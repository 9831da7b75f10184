#include "small_ops.h"

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "primitive.h"
#include "small_rows.h"

namespace qmlp_mlx {

std::shared_ptr<const Angles> angles_of(const float* frequencies, std::size_t half, float scale,
                                        int offset, std::int64_t T) {
  static std::mutex mutex;
  static std::shared_ptr<const Angles> last;
  const std::vector<float> wanted(frequencies, frequencies + half);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (last != nullptr && last->offset == offset && last->T == T && last->scale == scale &&
        last->frequencies == wanted) {
      return last;
    }
  }
  auto made = std::make_shared<Angles>();
  made->frequencies = wanted;
  made->scale = scale;
  made->offset = offset;
  made->T = T;
  for (std::int64_t t = 0; t < T; ++t) {
    const float position = (static_cast<float>(t) + static_cast<float>(offset)) * scale;
    for (const float frequency : wanted) {
      made->cos.push_back(std::cos(position * frequency));
      made->sin.push_back(std::sin(position * frequency));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  last = made;
  return made;
}

namespace {

using Function = std::function<std::vector<array>(const std::vector<array>&)>;

// A primitive whose derivatives and vmap are those of MLX's own op.
class MlxTwin : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  virtual array twin(const std::vector<array>& inputs) = 0;

  std::vector<array> vjp(const std::vector<array>& primals, const std::vector<array>& cotangents,
                         const std::vector<int>& argnums, const std::vector<array>&) override {
    const std::vector<array> all = mx::vjp(function(), primals, cotangents).second;
    std::vector<array> wanted;
    for (const int arg : argnums) wanted.push_back(all[static_cast<std::size_t>(arg)]);
    return wanted;
  }
  std::vector<array> jvp(const std::vector<array>& primals, const std::vector<array>& tangents,
                         const std::vector<int>& argnums) override {
    std::vector<array> all;
    for (const array& primal : primals) all.push_back(mx::zeros_like(primal, stream()));
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      all[static_cast<std::size_t>(argnums[i])] = tangents[i];
    }
    return mx::jvp(function(), primals, all).second;
  }
  std::pair<std::vector<array>, std::vector<int>> vmap(const std::vector<array>& inputs,
                                                       const std::vector<int>& axes) override {
    return {mx::vmap(function(), axes, {0})(inputs), {0}};
  }
  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    return {inputs[0].shape()};
  }

 private:
  Function function() {
    return [this](const std::vector<array>& inputs) { return std::vector<array>{twin(inputs)}; };
  }
};

class RmsNorm : public MlxTwin {
 public:
  RmsNorm(mx::Stream stream, float eps) : MlxTwin(stream), eps_(eps) {}
  const char* name() const override { return "QmlpRmsNorm"; }
  array twin(const std::vector<array>& inputs) override {
    return mx::fast::rms_norm(inputs[0], inputs[1], eps_, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return eps_ == static_cast<const RmsNorm&>(other).eps_;
  }

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    array& out = outputs[0];
    allocate(out);
    if (out.size() == 0) return;
    const std::int64_t width = out.shape(-1);
    const std::int64_t rows = static_cast<std::int64_t>(out.size()) / width;
    for_type(out.dtype(), [&](auto tag) {
      using T = decltype(tag);
      const T* x = inputs[0].data<T>();
      const T* w = inputs[1].data<T>();
      T* y = out.data<T>();
      mx::cpu::get_command_encoder(stream()).dispatch(
          [x, w, y, rows, width, eps = eps_] { rms_rows(x, w, y, rows, width, eps); });
    });
  }

 private:
  float eps_;
};

class Rope : public MlxTwin {
 public:
  Rope(mx::Stream stream, int dims, bool traditional, float base, float scale, int offset)
      : MlxTwin(stream),
        dims_(dims),
        traditional_(traditional),
        base_(base),
        scale_(scale),
        offset_(offset) {}
  const char* name() const override { return "QmlpRope"; }
  array twin(const std::vector<array>& inputs) override {
    return mx::fast::rope(inputs[0], dims_, traditional_, base_, scale_, offset_, std::nullopt,
                          stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Rope&>(other);
    return dims_ == o.dims_ && traditional_ == o.traditional_ && base_ == o.base_ &&
           scale_ == o.scale_ && offset_ == o.offset_;
  }

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    array& out = outputs[0];
    allocate(out);
    if (out.size() == 0) return;
    const array& in = inputs[0];
    const Pass pass{in.shape(0),   in.shape(1),   in.shape(2),   in.shape(3), in.strides(0),
                    in.strides(1), in.strides(2), in.strides(3), dims_ / 2,   traditional_};
    const float* frequencies = inputs[1].data<float>();
    for_type(out.dtype(), [&](auto tag) {
      using T = decltype(tag);
      const T* x = in.data<T>();
      T* y = out.data<T>();
      mx::cpu::get_command_encoder(stream()).dispatch(
          [x, y, pass, frequencies, scale = scale_, offset = offset_] {
            const auto angles =
                angles_of(frequencies, static_cast<std::size_t>(pass.half), scale, offset, pass.T);
            rotate(x, y, pass, *angles);
          });
    });
  }

 private:
  struct Pass {
    std::int64_t B, heads, T, D;
    std::int64_t stride_b, stride_h, stride_t, stride_d;
    int half;
    bool traditional;
  };

  template <class T>
  static void rotate(const T* x, T* y, const Pass& p, const Angles& angles) {
    for (std::int64_t b = 0; b < p.B; ++b) {
      for (std::int64_t h = 0; h < p.heads; ++h) {
        for (std::int64_t t = 0; t < p.T; ++t, y += p.D) {
          const T* from = x + b * p.stride_b + h * p.stride_h + t * p.stride_t;
          const float* cos = angles.cos.data() + t * p.half;
          const float* sin = angles.sin.data() + t * p.half;
          rotate_head(from, p.stride_d, y, cos, sin, p.half, p.traditional);
          for (std::int64_t d = 2 * p.half; d < p.D; ++d) y[d] = from[d * p.stride_d];
        }
      }
    }
  }

  int dims_;
  bool traditional_;
  float base_, scale_;
  int offset_;
};

class DequantizeRows : public MlxTwin {
 public:
  DequantizeRows(mx::Stream stream, int bits, int group_size)
      : MlxTwin(stream), bits_(bits), group_size_(group_size) {}
  const char* name() const override { return "QmlpDequantizeRows"; }
  array twin(const std::vector<array>& inputs) override {
    return mx::dequantize(inputs[0], inputs[1], inputs[2], group_size_, bits_, "affine",
                          std::nullopt, std::nullopt, stream());
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const DequantizeRows&>(other);
    return bits_ == o.bits_ && group_size_ == o.group_size_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    return {with_last(inputs[1].shape(), std::int64_t{inputs[1].shape(-1)} * group_size_)};
  }

  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    array& out = outputs[0];
    allocate(out);
    if (out.size() == 0) return;
    const auto groups = static_cast<std::int64_t>(inputs[1].size());
    for_type(out.dtype(), [&](auto tag) {
      using T = decltype(tag);
      const auto* codes = inputs[0].data<std::uint32_t>();
      const T* scales = inputs[1].data<T>();
      const T* biases = inputs[2].data<T>();
      T* y = out.data<T>();
      mx::cpu::get_command_encoder(stream()).dispatch(
          [codes, scales, biases, y, groups, bits = bits_, group_size = group_size_] {
            // A group is whole words: 32 codes are `bits` of them.
            const std::int64_t words = std::int64_t{group_size} * bits / 32;
            for (std::int64_t g = 0; g < groups; ++g) {
              decode_group(codes + g * words, wide(scales[g]), wide(biases[g]), bits, group_size,
                           y + g * group_size);
            }
          });
    });
  }

 private:
  template <class T>
  static void decode_group(const std::uint32_t* words, float scale, float bias, int bits, int count,
                           T* out) {
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    std::uint64_t held = 0;
    int left = 0;  // bits held
    for (int i = 0; i < count; ++i) {
      if (left < bits) {
        held |= std::uint64_t{*words++} << left;
        left += 32;
      }
      const auto code = static_cast<float>(held & mask);
      held >>= bits;
      left -= bits;
      out[i] = rounded<T>(wide(rounded<T>(code * scale)) + bias);
    }
  }

  int bits_;
  int group_size_;
};

bool is_ours(mx::Dtype type) {
  return type == mx::float32 || type == mx::float16 || type == mx::bfloat16;
}

}  // namespace

array rms_norm(const array& x, const array& weight, float eps, StreamOrDevice where) {
  const mx::Stream s = mx::to_stream(where);
  if (!is_ours(x.dtype()) || weight.dtype() != x.dtype() || x.ndim() < 1 || weight.ndim() != 1 ||
      weight.shape(0) != x.shape(-1) || s.device != mx::Device::cpu) {
    return mx::fast::rms_norm(x, weight, eps, s);
  }
  return array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(s, eps),
               {mx::contiguous(x, false, s), mx::contiguous(weight, false, s)});
}

array rope(const array& x, const array& inv_freqs, int dims, bool traditional, float base,
           float scale, int offset, StreamOrDevice where) {
  const mx::Stream s = mx::to_stream(where);
  if (!is_ours(x.dtype()) || x.ndim() != 4 || dims < 2 || dims % 2 != 0 || dims > x.shape(-1) ||
      inv_freqs.dtype() != mx::float32 || inv_freqs.ndim() != 1 || inv_freqs.shape(0) != dims / 2 ||
      s.device != mx::Device::cpu) {
    return mx::fast::rope(x, dims, traditional, base, scale, offset, std::nullopt, s);
  }
  return array(x.shape(), x.dtype(),
               std::make_shared<Rope>(s, dims, traditional, base, scale, offset),
               {x, mx::contiguous(inv_freqs, false, s)});
}

array dequantize_rows(const array& codes, const array& scales, const array& biases, int bits,
                      int group_size, StreamOrDevice where) {
  const mx::Stream s = mx::to_stream(where);
  const bool fits =
      is_ours(scales.dtype()) && biases.dtype() == scales.dtype() && codes.dtype() == mx::uint32 &&
      scales.ndim() >= 1 && scales.shape() == biases.shape() && codes.ndim() == scales.ndim() &&
      std::int64_t{scales.shape(-1)} * group_size * bits == std::int64_t{codes.shape(-1)} * 32 &&
      s.device == mx::Device::cpu;
  if (!fits) {
    return mx::dequantize(codes, scales, biases, group_size, bits, "affine", std::nullopt,
                          std::nullopt, s);
  }
  return array(with_last(scales.shape(), std::int64_t{scales.shape(-1)} * group_size),
               scales.dtype(), std::make_shared<DequantizeRows>(s, bits, group_size),
               {mx::contiguous(codes, false, s), mx::contiguous(scales, false, s),
                mx::contiguous(biases, false, s)});
}

}  // namespace qmlp_mlx
