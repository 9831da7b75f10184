#include "ops.h"

#include <string>

#include "primitive.h"

namespace qmlp_mlx {

namespace mx = mlx::core;

namespace {

// ---- pieces of gradients ----

std::vector<array> weight_arrays(const PackedWeightPtr& weight, const mx::Stream& s) {
  return unpack(weight, std::nullopt, s);
}

array decoded(const std::vector<array>& w, const PackedWeight& weight, mx::Dtype type,
              const mx::Stream& s) {
  if (weight.is_dense()) return mx::astype(w[0], type, s);
  return mx::astype(mx::dequantize(w[0], w[1], w[2], weight.spec().group_size, weight.spec().bits,
                                   "affine", std::nullopt, std::nullopt, s),
                    type, s);
}

// No kernel of ours computes in f32 on GPUs. What the op would be without this module, then.
bool left_to_mlx(mx::Dtype type, const mx::Stream& s) {
  return s.device == mx::Device::gpu && type == mx::float32;
}
array linear_by_mlx(const array& x, const PackedWeightPtr& weight, const OptionalArray& linear_bias,
                    const mx::Stream& s) {
  const std::vector<array> w = weight_arrays(weight, s);
  array y = weight->is_dense()
                ? mx::matmul(x, mx::transpose(w[0], s), s)
                : mx::quantized_matmul(x, w[0], w[1], w[2], /*transpose=*/true,
                                       weight->spec().group_size, weight->spec().bits, "affine", s);
  if (linear_bias) y = mx::add(y, *linear_bias, s);
  return y;
}

// cotangent [..., N] times w [N, K], as quantized_matmul's own vjp.
array times_weight(const array& cotangent, const PackedWeightPtr& weight, const mx::Stream& s) {
  const std::vector<array> w = weight_arrays(weight, s);
  if (weight->is_dense()) return mx::matmul(cotangent, w[0], s);
  if (s.device == mx::Device::gpu) {
    // MLX's product with a weight that is not transposed is compiled at its first use, which takes
    // tens of seconds; for the many rows of a gradient the dense product is as fast.
    return mx::matmul(cotangent, decoded(w, *weight, cotangent.dtype(), s), s);
  }
  return mx::quantized_matmul(cotangent, w[0], w[1], w[2], /*transpose=*/false,
                              weight->spec().group_size, weight->spec().bits, "affine", s);
}

array sum_to_last(const array& a, const mx::Stream& s) {
  if (a.ndim() == 1) return a;
  return mx::sum(mx::reshape(a, {-1, a.shape(-1)}, s), 0, false, s);
}

// A batched bias [B, N] beside rows [B, ..., N].
array bias_beside(const array& bias, int axis, int ndim, const mx::Stream& s) {
  if (axis < 0) return bias;
  array b = batch_first(bias, axis, s);
  std::vector<int> axes;
  for (int i = 1; i < ndim - 1; ++i) axes.push_back(i);
  return axes.empty() ? b : mx::expand_dims(b, axes, s);
}

// fused_mlp of operands that fit each other, but that a residual may have axes that x lacks.
array mlp_of(const array& x, const PackedWeightPtr& gate_up, const PackedWeightPtr& down,
             const OptionalArray& gate_bias, const OptionalArray& up_bias,
             const OptionalArray& down_bias, const OptionalArray& residual, const mx::Stream& s);

// ---- primitives ----

class Linear : public OpPrimitive {
 public:
  Linear(mx::Stream stream, PackedWeightPtr weight, PackedPtr packed, mx::Dtype type, bool bias,
         bool residual)
      : OpPrimitive(stream),
        weight_(std::move(weight)),
        packed_(std::move(packed)),
        type_(type),
        bias_(bias),
        residual_(residual) {}

  const char* name() const override { return "QmlpQuantizedLinear"; }

  void run(const std::vector<array>& inputs, array& out) override {
    const array* const residual = residual_ ? &inputs[bias_ ? 2 : 1] : nullptr;
    Run on(stream(), out, residual);
    if (out.size() == 0) return;
    const qmlp_dtype dtype = dtype_code(type_);
    const qmlp_matrix x = on.matrix(inputs[0], weight_->K(), dtype);
    const qmlp_mutable_matrix to = on.output(weight_->N(), dtype);
    qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
    if (bias_) epilogue.linear_bias = on.values(inputs[1]);
    if (residual_) epilogue.residual = on.matrix(*residual, weight_->N(), dtype);
    const Packed* const packed = packed_.get();
    on.hand_over(
        qmlp_plan_workspace_bytes(packed->plan.get(), x.rows), {packed_},
        [packed, x, to, epilogue](const qmlp_workspace& workspace, const qmlp_stream& where) {
          return qmlp_quantized_linear(packed->plan.get(), packed->weight.get(), &x, &to,
                                       &workspace, &where, &epilogue);
        });
  }

  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    return {with_last(inputs[0].shape(), weight_->N())};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Linear&>(other);
    return weight_ == o.weight_ && type_ == o.type_ && bias_ == o.bias_ && residual_ == o.residual_;
  }

  std::vector<array> vjp(const std::vector<array>&, const std::vector<array>& cotangents,
                         const std::vector<int>& argnums, const std::vector<array>&) override {
    std::vector<array> gradients;
    for (const int arg : argnums) {
      if (arg == 0) {
        gradients.push_back(times_weight(cotangents[0], weight_, stream()));
      } else if (arg == 1 && bias_) {
        gradients.push_back(sum_to_last(cotangents[0], stream()));
      } else {
        gradients.push_back(cotangents[0]);
      }
    }
    return gradients;
  }

  std::vector<array> jvp(const std::vector<array>& primals, const std::vector<array>& tangents,
                         const std::vector<int>& argnums) override {
    const mx::Shape shape = with_last(primals[0].shape(), weight_->N());
    std::optional<array> sum;
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      array term = argnums[i] == 0 ? quantized_linear(tangents[i], weight_, std::nullopt,
                                                      std::nullopt, stream())
                                   : mx::broadcast_to(tangents[i], shape, stream());
      sum = sum ? mx::add(*sum, term, stream()) : term;
    }
    return {*sum};
  }

  std::pair<std::vector<array>, std::vector<int>> vmap(const std::vector<array>& inputs,
                                                       const std::vector<int>& axes) override {
    const mx::Stream& s = stream();
    const std::size_t at = bias_ ? 2 : 1;
    array y = quantized_linear(batch_first(inputs[0], axes[0], s), weight_, std::nullopt,
                               std::nullopt, s);
    const int ndim = static_cast<int>(inputs[0].ndim()) + (axes[0] < 0 ? 1 : 0);
    if (bias_) y = mx::add(y, bias_beside(inputs[1], axes[1], ndim, s), s);
    if (residual_) y = mx::add(batch_first(inputs[at], axes[at], s), y, s);
    return {{y}, {0}};
  }

 private:
  PackedWeightPtr weight_;
  PackedPtr packed_;
  mx::Dtype type_;
  bool bias_;
  bool residual_;
};

class Swiglu : public OpPrimitive {
 public:
  Swiglu(mx::Stream stream, PackedWeightPtr weight, PackedPtr packed, mx::Dtype type,
         bool gate_bias, bool up_bias)
      : OpPrimitive(stream),
        weight_(std::move(weight)),
        packed_(std::move(packed)),
        type_(type),
        gate_bias_(gate_bias),
        up_bias_(up_bias) {}

  const char* name() const override { return "QmlpFusedSwiglu"; }

  void run(const std::vector<array>& inputs, array& out) override {
    Run on(stream(), out, nullptr);
    if (out.size() == 0) return;
    const qmlp_dtype dtype = dtype_code(type_);
    const qmlp_matrix x = on.matrix(inputs[0], weight_->K(), dtype);
    const qmlp_mutable_matrix to = on.output(weight_->N(), dtype);
    qmlp_swiglu_epilogue epilogue = QMLP_SWIGLU_EPILOGUE_INIT;
    if (gate_bias_) epilogue.gate_bias = on.values(inputs[1]);
    if (up_bias_) epilogue.up_bias = on.values(inputs[gate_bias_ ? 2 : 1]);
    const Packed* const packed = packed_.get();
    on.hand_over(
        qmlp_plan_workspace_bytes(packed->plan.get(), x.rows), {packed_},
        [packed, x, to, epilogue](const qmlp_workspace& workspace, const qmlp_stream& where) {
          return qmlp_fused_swiglu(packed->plan.get(), packed->weight.get(), &x, &to, &workspace,
                                   &where, &epilogue);
        });
  }

  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    return {with_last(inputs[0].shape(), weight_->N())};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Swiglu&>(other);
    return weight_ == o.weight_ && type_ == o.type_ && gate_bias_ == o.gate_bias_ &&
           up_bias_ == o.up_bias_;
  }

  // Gate and up are computed again, each by its half of the weight.
  std::vector<array> vjp(const std::vector<array>& primals, const std::vector<array>& cotangents,
                         const std::vector<int>& argnums, const std::vector<array>&) override {
    const mx::Stream& s = stream();
    const Halves h = halves(primals);
    const array& c = cotangents[0];
    const array sigma = mx::sigmoid(h.g, s);
    const array silu = mx::multiply(h.g, sigma, s);
    const array dg = mx::multiply(mx::multiply(c, h.u, s), silu_slope(h.g, sigma), s);
    const array du = mx::multiply(c, silu, s);
    std::vector<array> gradients;
    for (const int arg : argnums) {
      if (arg == 0) {
        gradients.push_back(mx::add(times_weight(dg, weight_->part(0), s),
                                    times_weight(du, weight_->part(1), s), s));
      } else {
        gradients.push_back(sum_to_last(arg == 1 && gate_bias_ ? dg : du, s));
      }
    }
    return gradients;
  }

  std::vector<array> jvp(const std::vector<array>& primals, const std::vector<array>& tangents,
                         const std::vector<int>& argnums) override {
    const mx::Stream& s = stream();
    const Halves h = halves(primals);
    const array sigma = mx::sigmoid(h.g, s);
    std::optional<array> dg, du;
    const auto add_to = [&](std::optional<array>& sum, const array& term) {
      sum = sum ? mx::add(*sum, term, s) : term;
    };
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] == 0) {
        add_to(dg, linear(tangents[i], 0));
        add_to(du, linear(tangents[i], 1));
      } else {
        add_to(argnums[i] == 1 && gate_bias_ ? dg : du,
               mx::broadcast_to(tangents[i], h.g.shape(), s));
      }
    }
    std::optional<array> sum;
    if (dg) add_to(sum, mx::multiply(mx::multiply(*dg, silu_slope(h.g, sigma), s), h.u, s));
    if (du) add_to(sum, mx::multiply(mx::multiply(h.g, sigma, s), *du, s));
    return {*sum};
  }

  std::pair<std::vector<array>, std::vector<int>> vmap(const std::vector<array>& inputs,
                                                       const std::vector<int>& axes) override {
    for (std::size_t i = 1; i < axes.size(); ++i) {
      if (axes[i] >= 0) refuse("fused_swiglu: vmap over a linear bias is not defined");
    }
    std::vector<array> moved = inputs;
    moved[0] = batch_first(inputs[0], axes[0], stream());
    const OptionalArray gate_bias = gate_bias_ ? OptionalArray(moved[1]) : std::nullopt;
    const OptionalArray up_bias =
        up_bias_ ? OptionalArray(moved[gate_bias_ ? 2 : 1]) : std::nullopt;
    return {{fused_swiglu(moved[0], weight_, gate_bias, up_bias, stream())}, {0}};
  }

 private:
  struct Halves {
    array g, u;
  };
  array linear(const array& x, int part) {
    return quantized_linear(x, weight_->part(part), std::nullopt, std::nullopt, stream());
  }
  Halves halves(const std::vector<array>& primals) {
    array g = linear(primals[0], 0);
    array u = linear(primals[0], 1);
    if (gate_bias_) g = mx::add(g, primals[1], stream());
    if (up_bias_) u = mx::add(u, primals[gate_bias_ ? 2 : 1], stream());
    return {g, u};
  }
  // d silu / dg = sigma (1 + g (1 - sigma))
  array silu_slope(const array& g, const array& sigma) {
    const mx::Stream& s = stream();
    const array one(1.0f, g.dtype());
    return mx::multiply(sigma, mx::add(one, mx::multiply(g, mx::subtract(one, sigma, s), s), s), s);
  }

  PackedWeightPtr weight_;
  PackedPtr packed_;
  mx::Dtype type_;
  bool gate_bias_;
  bool up_bias_;
};

class Mlp : public OpPrimitive {
 public:
  struct Parts {
    bool gate_bias, up_bias, down_bias, residual;
    bool operator==(const Parts& o) const {
      return gate_bias == o.gate_bias && up_bias == o.up_bias && down_bias == o.down_bias &&
             residual == o.residual;
    }
  };
  Mlp(mx::Stream stream, PackedWeightPtr gate_up, PackedWeightPtr down, PackedPtr packed_gate_up,
      PackedPtr packed_down, mx::Dtype type, Parts parts)
      : OpPrimitive(stream),
        gate_up_(std::move(gate_up)),
        down_(std::move(down)),
        packed_gate_up_(std::move(packed_gate_up)),
        packed_down_(std::move(packed_down)),
        type_(type),
        parts_(parts) {}

  const char* name() const override { return "QmlpFusedMlp"; }

  void run(const std::vector<array>& inputs, array& out) override {
    const Inputs in = read(inputs);
    Run on(stream(), out, in.residual);
    if (out.size() == 0) return;
    const qmlp_dtype dtype = dtype_code(type_);
    const qmlp_matrix x = on.matrix(inputs[0], gate_up_->K(), dtype);
    const qmlp_mutable_matrix to = on.output(down_->N(), dtype);
    qmlp_swiglu_epilogue first = QMLP_SWIGLU_EPILOGUE_INIT;
    qmlp_linear_epilogue second = QMLP_LINEAR_EPILOGUE_INIT;
    if (in.gate_bias != nullptr) first.gate_bias = on.values(*in.gate_bias);
    if (in.up_bias != nullptr) first.up_bias = on.values(*in.up_bias);
    if (in.down_bias != nullptr) second.linear_bias = on.values(*in.down_bias);
    if (in.residual != nullptr) second.residual = on.matrix(*in.residual, down_->N(), dtype);
    const Packed* const gate_up = packed_gate_up_.get();
    const Packed* const down = packed_down_.get();
    on.hand_over(qmlp_mlp_workspace_bytes(gate_up->plan.get(), down->plan.get(), x.rows),
                 {packed_gate_up_, packed_down_},
                 [gate_up, down, x, to, first, second](const qmlp_workspace& workspace,
                                                       const qmlp_stream& where) {
                   return qmlp_fused_mlp(gate_up->plan.get(), gate_up->weight.get(),
                                         down->plan.get(), down->weight.get(), &x, &to, &workspace,
                                         &where, &first, &second);
                 });
  }

  std::vector<mx::Shape> output_shapes(const std::vector<array>& inputs) override {
    return {with_last(inputs[0].shape(), down_->N())};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Mlp&>(other);
    return gate_up_ == o.gate_up_ && down_ == o.down_ && type_ == o.type_ && parts_ == o.parts_;
  }

  // Through the hidden rows, computed again.
  std::vector<array> vjp(const std::vector<array>& primals, const std::vector<array>& cotangents,
                         const std::vector<int>& argnums, const std::vector<array>&) override {
    const mx::Stream& s = stream();
    const array hidden = hidden_rows(primals);
    const int num_first = first_inputs();
    std::vector<int> first;
    for (const int arg : argnums) {
      if (arg < num_first) first.push_back(arg);
    }
    std::vector<array> of_first;
    if (!first.empty()) {
      const array dh = times_weight(cotangents[0], down_, s);
      of_first = hidden.primitive().vjp(hidden.inputs(), {dh}, first, {hidden});
    }
    std::vector<array> gradients;
    std::size_t at = 0;
    for (const int arg : argnums) {
      if (arg < num_first) {
        gradients.push_back(of_first[at++]);
      } else if (parts_.down_bias && arg == num_first) {
        gradients.push_back(sum_to_last(cotangents[0], s));
      } else {
        gradients.push_back(cotangents[0]);
      }
    }
    return gradients;
  }

  std::vector<array> jvp(const std::vector<array>& primals, const std::vector<array>& tangents,
                         const std::vector<int>& argnums) override {
    const mx::Stream& s = stream();
    const int num_first = first_inputs();
    std::vector<int> first;
    std::vector<array> first_tangents;
    std::optional<array> sum;
    const auto add_term = [&](const array& term) { sum = sum ? mx::add(*sum, term, s) : term; };
    for (std::size_t i = 0; i < argnums.size(); ++i) {
      if (argnums[i] < num_first) {
        first.push_back(argnums[i]);
        first_tangents.push_back(tangents[i]);
      } else {
        add_term(mx::broadcast_to(tangents[i], with_last(primals[0].shape(), down_->N()), s));
      }
    }
    if (!first.empty()) {
      const array hidden = hidden_rows(primals);
      const array dh = hidden.primitive().jvp(hidden.inputs(), first_tangents, first)[0];
      add_term(quantized_linear(dh, down_, std::nullopt, std::nullopt, s));
    }
    return {*sum};
  }

  std::pair<std::vector<array>, std::vector<int>> vmap(const std::vector<array>& inputs,
                                                       const std::vector<int>& axes) override {
    const mx::Stream& s = stream();
    const std::size_t last = inputs.size() - 1;
    for (std::size_t i = 1; i < axes.size(); ++i) {
      if (axes[i] >= 0 && !(parts_.residual && i == last)) {
        refuse("fused_mlp: vmap over a linear bias is not defined");
      }
    }
    std::vector<array> moved = inputs;
    moved[0] = batch_first(inputs[0], axes[0], s);
    if (parts_.residual) moved[last] = batch_first(inputs[last], axes[last], s);
    const Inputs in = read(moved);
    return {{mlp_of(moved[0], gate_up_, down_, copy(in.gate_bias), copy(in.up_bias),
                    copy(in.down_bias), copy(in.residual), s)},
            {0}};
  }

 private:
  struct Inputs {
    const array* gate_bias = nullptr;
    const array* up_bias = nullptr;
    const array* down_bias = nullptr;
    const array* residual = nullptr;
  };
  Inputs read(const std::vector<array>& inputs) const {
    Inputs in;
    std::size_t at = 1;
    if (parts_.gate_bias) in.gate_bias = &inputs[at++];
    if (parts_.up_bias) in.up_bias = &inputs[at++];
    if (parts_.down_bias) in.down_bias = &inputs[at++];
    if (parts_.residual) in.residual = &inputs[at++];
    return in;
  }
  static OptionalArray copy(const array* a) {
    return a == nullptr ? OptionalArray() : OptionalArray(*a);
  }
  int first_inputs() const { return 1 + int{parts_.gate_bias} + int{parts_.up_bias}; }
  array hidden_rows(const std::vector<array>& inputs) {
    const Inputs in = read(inputs);
    return fused_swiglu(inputs[0], gate_up_, copy(in.gate_bias), copy(in.up_bias), stream());
  }

  PackedWeightPtr gate_up_;
  PackedWeightPtr down_;
  PackedPtr packed_gate_up_;
  PackedPtr packed_down_;
  mx::Dtype type_;
  Parts parts_;
};

constexpr const char* kMlp = "fused_mlp";

// ---- building ops ----

// On CPU streams an operand is made contiguous by an op of its own; on GPU streams most are, which
// shows when they are evaluated, and the rest are copied then.
array laid_out(const array& a, const mx::Stream& s) {
  return s.device == mx::Device::gpu ? a : mx::contiguous(a, false, s);
}

array checked_x(const char* op, const array& x, const PackedWeight& weight, mx::Dtype& type,
                const mx::Stream& s) {
  if (!mx::issubdtype(x.dtype(), mx::floating)) {
    refuse(std::string(op) + ": x is " + name_of(x.dtype()) + ", needs a floating type");
  }
  if (x.ndim() < 1 || x.shape(-1) != weight.K()) {
    refuse(std::string(op) + ": x is " + text_of(x.shape()) + ", needs [..., " +
           std::to_string(weight.K()) + "]");
  }
  type = weight.compute_type(x.dtype());
  if (type != mx::float32 && type != mx::float16 && type != mx::bfloat16) {
    refuse(std::string(op) + ": x is " + name_of(x.dtype()) +
           ", needs float32, float16 or bfloat16");
  }
  return laid_out(mx::astype(x, type, s), s);
}

// A bias as the op takes it; false when it is wider than the op's type.
bool fits(mx::Dtype type, const array& a) { return mx::promote_types(type, a.dtype()) == type; }

array operand(const array& a, mx::Dtype type, const mx::Stream& s) {
  return laid_out(mx::astype(a, type, s), s);
}

array gated(const array& g, const array& u, const mx::Stream& s) {
  return mx::multiply(mx::multiply(g, mx::sigmoid(g, s), s), u, s);
}

void check_bias(const char* op, const char* name, const OptionalArray& bias, std::int64_t N) {
  if (bias && (bias->ndim() != 1 || bias->shape(0) != N)) {
    refuse(std::string(op) + ": " + name + " is " + text_of(bias->shape()) + ", needs [" +
           std::to_string(N) + "]");
  }
}

// A residual may be broadcast to the result, but not the result to it.
void check_residual(const char* op, const OptionalArray& residual, const array& x, std::int64_t N) {
  if (!residual) return;
  const mx::Shape shape = with_last(x.shape(), N);
  bool fit = residual->ndim() <= x.ndim();
  for (std::size_t i = 0; fit && i < residual->ndim(); ++i) {
    const mx::ShapeElem have = residual->shape()[residual->ndim() - 1 - i];
    fit = have == 1 || have == shape[x.ndim() - 1 - i];
  }
  if (!fit) {
    refuse(std::string(op) + ": residual is " + text_of(residual->shape()) + ", needs " +
           text_of(shape));
  }
}

}  // namespace

array quantized_linear(const array& x, const PackedWeightPtr& weight,
                       const OptionalArray& linear_bias, const OptionalArray& residual,
                       StreamOrDevice where) {
  constexpr const char* kOp = "quantized_linear";
  const mx::Stream s = stream_for(kOp, where);
  check_parts(kOp, "weight", weight, 1);
  mx::Dtype type = mx::float32;
  std::vector<array> inputs = {checked_x(kOp, x, *weight, type, s)};
  check_bias(kOp, "linear_bias", linear_bias, weight->N());
  check_residual(kOp, residual, x, weight->N());
  if (left_to_mlx(type, s)) {
    const array y = linear_by_mlx(inputs[0], weight, linear_bias, s);
    return residual ? mx::add(*residual, y, s) : y;
  }
  const mx::Shape shape = with_last(x.shape(), weight->N());
  const bool bias_inside = linear_bias && fits(type, *linear_bias);
  if (bias_inside) inputs.push_back(operand(*linear_bias, type, s));
  const bool residual_inside = residual && (!linear_bias || bias_inside) && fits(type, *residual) &&
                               residual->shape() == shape;
  if (residual_inside) inputs.push_back(operand(*residual, type, s));
  array y(shape, type,
          std::make_shared<Linear>(s, weight, weight->packed(type, place_of(s)), type, bias_inside,
                                   residual_inside),
          std::move(inputs));
  if (linear_bias && !bias_inside) y = mx::add(y, *linear_bias, s);
  if (residual && !residual_inside) y = mx::add(*residual, y, s);
  return y;
}

array fused_swiglu(const array& x, const PackedWeightPtr& gate_up, const OptionalArray& gate_bias,
                   const OptionalArray& up_bias, StreamOrDevice where) {
  constexpr const char* kOp = "fused_swiglu";
  const mx::Stream s = stream_for(kOp, where);
  check_parts(kOp, "gate_up", gate_up, 2);
  mx::Dtype type = mx::float32;
  std::vector<array> inputs = {checked_x(kOp, x, *gate_up, type, s)};
  check_bias(kOp, "gate_bias", gate_bias, gate_up->N());
  check_bias(kOp, "up_bias", up_bias, gate_up->N());
  if (left_to_mlx(type, s)) {
    return gated(linear_by_mlx(inputs[0], gate_up->part(0), gate_bias, s),
                 linear_by_mlx(inputs[0], gate_up->part(1), up_bias, s), s);
  }
  if ((gate_bias && !fits(type, *gate_bias)) || (up_bias && !fits(type, *up_bias))) {
    return gated(quantized_linear(x, gate_up->part(0), gate_bias, std::nullopt, s),
                 quantized_linear(x, gate_up->part(1), up_bias, std::nullopt, s), s);
  }
  if (gate_bias) inputs.push_back(operand(*gate_bias, type, s));
  if (up_bias) inputs.push_back(operand(*up_bias, type, s));
  return array(with_last(x.shape(), gate_up->N()), type,
               std::make_shared<Swiglu>(s, gate_up, gate_up->packed(type, place_of(s)), type,
                                        gate_bias.has_value(), up_bias.has_value()),
               std::move(inputs));
}

array fused_mlp(const array& x, const PackedWeightPtr& gate_up, const PackedWeightPtr& down,
                const OptionalArray& gate_bias, const OptionalArray& up_bias,
                const OptionalArray& down_bias, const OptionalArray& residual,
                StreamOrDevice where) {
  const mx::Stream s = stream_for(kMlp, where);
  check_parts(kMlp, "gate_up", gate_up, 2);
  check_parts(kMlp, "down", down, 1);
  if (down->K() != gate_up->N()) {
    refuse(std::string(kMlp) + ": down takes " + std::to_string(down->K()) +
           " features, gate and up give " + std::to_string(gate_up->N()));
  }
  check_bias(kMlp, "gate_bias", gate_bias, gate_up->N());
  check_bias(kMlp, "up_bias", up_bias, gate_up->N());
  check_bias(kMlp, "down_bias", down_bias, down->N());
  if (x.ndim() > 0) check_residual(kMlp, residual, x, down->N());
  return mlp_of(x, gate_up, down, gate_bias, up_bias, down_bias, residual, s);
}

namespace {

array mlp_of(const array& x, const PackedWeightPtr& gate_up, const PackedWeightPtr& down,
             const OptionalArray& gate_bias, const OptionalArray& up_bias,
             const OptionalArray& down_bias, const OptionalArray& residual, const mx::Stream& s) {
  mx::Dtype type = mx::float32;
  std::vector<array> inputs = {checked_x(kMlp, x, *gate_up, type, s)};
  const mx::Shape shape = with_last(x.shape(), down->N());
  // One op only where nothing is promoted on the way.
  const bool one = !left_to_mlx(type, s) && down->compute_type(type) == type &&
                   (!gate_bias || fits(type, *gate_bias)) && (!up_bias || fits(type, *up_bias)) &&
                   (!down_bias || fits(type, *down_bias)) &&
                   (!residual || (fits(type, *residual) && residual->shape() == shape));
  if (!one) {
    const array hidden = fused_swiglu(x, gate_up, gate_bias, up_bias, s);
    if (residual && residual->shape() == shape) {
      return quantized_linear(hidden, down, down_bias, residual, s);
    }
    const array y = quantized_linear(hidden, down, down_bias, std::nullopt, s);
    return residual ? mx::add(*residual, y, s) : y;
  }
  if (gate_bias) inputs.push_back(operand(*gate_bias, type, s));
  if (up_bias) inputs.push_back(operand(*up_bias, type, s));
  if (down_bias) inputs.push_back(operand(*down_bias, type, s));
  if (residual) inputs.push_back(operand(*residual, type, s));
  return array(shape, type,
               std::make_shared<Mlp>(s, gate_up, down, gate_up->packed(type, place_of(s)),
                                     down->packed(type, place_of(s)), type,
                                     Mlp::Parts{gate_bias.has_value(), up_bias.has_value(),
                                                down_bias.has_value(), residual.has_value()}),
               std::move(inputs));
}

}  // namespace

}  // namespace qmlp_mlx
