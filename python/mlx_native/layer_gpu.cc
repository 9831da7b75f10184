#include "layer_gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "primitive.h"

namespace qmlp_mlx {
namespace {

using PrimitivePtr = std::shared_ptr<mx::Primitive>;

// What a layer runs with on one stream: its weights and MLX's own primitives, which are evaluated
// inside ours, so that they share its place in the graph.
struct Parts {
  LayerParts p;
  mx::Dtype type = mx::float32;
  PackedPtr q, k, v, o, gate_up, down;
  PrimitivePtr input_norm, post_norm, q_norm, k_norm, rope;
};
using PartsPtr = std::shared_ptr<const Parts>;

// The primitive of an op that MLX runs as one kernel; null where it is something else.
PrimitivePtr primitive_of(const array& a, const char* name) {
  if (!a.has_primitive() || std::strcmp(a.primitive().name(), name) != 0) return nullptr;
  return a.primitive_ptr();
}

// Arrays of one evaluation that live until its kernels have run.
class Temporaries {
 public:
  explicit Temporaries(const array& out) : out_(out) {}
  ~Temporaries() {
    // An op that failed before it made any may have no encoder to ask, which would throw here.
    if (!arrays_.empty()) gpu::keep_alive(out_.primitive().stream(), arrays_);
  }
  array make(mx::Shape shape, mx::Dtype type) {
    return array(std::move(shape), type, out_.primitive_ptr(), {});
  }
  array evaluated(mx::Primitive& primitive, std::vector<array> inputs, mx::Shape shape,
                  mx::Dtype type) {
    std::vector<array> outputs = {make(std::move(shape), type)};
    primitive.eval_gpu(inputs, outputs);
    arrays_.push_back(outputs[0]);
    return outputs[0];
  }
  void keep(const array& a) { arrays_.push_back(a); }

 private:
  const array& out_;
  std::vector<array> arrays_;
};

// The same elements, seen as another shape.
void view(array& as, const array& of, mx::Strides strides, bool row_contiguous) {
  array::Flags flags = {};
  flags.contiguous = true;
  flags.row_contiguous = row_contiguous;
  flags.col_contiguous = false;
  as.copy_shared_buffer(of, strides, flags, of.data_size());
}

class GpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_cpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error(std::string(name()) + ": runs on GPU streams");
  }
};

void record_linear(array& out, const Packed& packed, const PackedPtr& held, const array& x,
                   std::int64_t K, std::int64_t N, mx::Dtype type, const array* bias,
                   const array* residual) {
  gpu::allocate(out);
  gpu::Recording recording(out);
  const qmlp_dtype dtype = dtype_code(type);
  const qmlp_matrix rows = recording.matrix(x, K, dtype);
  const qmlp_mutable_matrix to = {gpu::pointer(out), rows.rows, N, N, dtype};
  qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
  if (bias != nullptr) epilogue.linear_bias = recording.values(*bias);
  if (residual != nullptr) epilogue.residual = recording.matrix(*residual, N, dtype);
  recording.record(qmlp_plan_workspace_bytes(packed.plan.get(), rows.rows), {held},
                   [&](const qmlp_workspace& workspace, const qmlp_stream& where) {
                     return qmlp_quantized_linear(packed.plan.get(), packed.weight.get(), &rows,
                                                  &to, &workspace, &where, &epilogue);
                   });
}

// x -> q, k, v: [B, heads, L, head_dim], normed and rotated as attention takes them.
class Heads : public GpuPrimitive {
 public:
  Heads(mx::Stream stream, PartsPtr parts) : GpuPrimitive(stream), parts_(std::move(parts)) {}
  const char* name() const override { return "QmlpHeads"; }

  static std::vector<array> inputs(const LayerParts& p, const array& x, const array& position) {
    std::vector<array> all = {x, *p.input_norm};
    if (p.rope_dims != 0) all.push_back(position);
    if (p.rope_periods) all.push_back(*p.rope_periods);
    if (p.q_norm) all.push_back(*p.q_norm);
    if (p.k_norm) all.push_back(*p.k_norm);
    for (const OptionalArray* bias : {&p.q_bias, &p.k_bias, &p.v_bias}) {
      if (*bias) all.push_back(**bias);
    }
    return all;
  }

  void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const LayerParts& p = parts_->p;
    const array& x = inputs[0];
    std::size_t at = 2;
    const array* const position = p.rope_dims != 0 ? &inputs[at++] : nullptr;
    const array* const periods = p.rope_periods ? &inputs[at++] : nullptr;
    const array* const norms[] = {p.q_norm ? &inputs[at++] : nullptr,
                                  p.k_norm ? &inputs[at++] : nullptr, nullptr};
    const array* biases[3] = {};
    for (int i = 0; i < 3; ++i) {
      if (i == 0 ? p.q_bias : i == 1 ? p.k_bias : p.v_bias) biases[i] = &inputs[at++];
    }
    Temporaries temporaries(outputs[0]);
    const int B = x.shape(0), L = x.shape(1), hidden = x.shape(2), D = p.head_dim;
    const array in =
        temporaries.evaluated(*parts_->input_norm, {x, inputs[1]}, x.shape(), parts_->type);
    const PackedPtr* const packed[] = {&parts_->q, &parts_->k, &parts_->v};
    for (int i = 0; i < 3; ++i) {
      const int n = i == 0 ? p.num_heads : p.num_kv_heads;
      array y = temporaries.make({B, L, n, D}, parts_->type);
      record_linear(y, **packed[i], *packed[i], in, hidden, std::int64_t{n} * D, parts_->type,
                    biases[i], nullptr);
      if (norms[i] != nullptr) {
        mx::Primitive& norm = i == 0 ? *parts_->q_norm : *parts_->k_norm;
        temporaries.keep(y);
        y = temporaries.evaluated(norm, {y, *norms[i]}, {B, L, n, D}, parts_->type);
      }
      array turned = temporaries.make({B, n, L, D}, parts_->type);
      view(turned, y, {std::int64_t{L} * n * D, D, std::int64_t{n} * D, 1}, L == 1 || n == 1);
      if (i == 2 || position == nullptr) {
        outputs[static_cast<std::size_t>(i)].copy_shared_buffer(turned);
        continue;
      }
      temporaries.keep(y);
      std::vector<array> rotated = {turned, *position};
      if (periods != nullptr) rotated.push_back(*periods);
      std::vector<array> out = {outputs[static_cast<std::size_t>(i)]};
      parts_->rope->eval_gpu(rotated, out);
    }
  }

 private:
  PartsPtr parts_;
};

// attention [B, heads, L, head_dim] and x -> h = x + o(attention), h + mlp(norm(h)).
class Rest : public GpuPrimitive {
 public:
  Rest(mx::Stream stream, PartsPtr parts) : GpuPrimitive(stream), parts_(std::move(parts)) {}
  const char* name() const override { return "QmlpRestOfLayer"; }

  static std::vector<array> inputs(const LayerParts& p, const array& attention, const array& x) {
    std::vector<array> all = {attention, x, *p.post_norm};
    for (const OptionalArray* bias : {&p.o_bias, &p.gate_bias, &p.up_bias, &p.down_bias}) {
      if (*bias) all.push_back(**bias);
    }
    return all;
  }

  void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const LayerParts& p = parts_->p;
    const array& attention = inputs[0];
    const array& x = inputs[1];
    std::size_t at = 3;
    const array* biases[4] = {};
    for (int i = 0; i < 4; ++i) {
      const OptionalArray& bias = i == 0   ? p.o_bias
                                  : i == 1 ? p.gate_bias
                                  : i == 2 ? p.up_bias
                                           : p.down_bias;
      if (bias) biases[i] = &inputs[at++];
    }
    array& out = outputs[0];
    Temporaries temporaries(out);
    const int B = x.shape(0), L = x.shape(1), hidden = x.shape(2);
    const int n = p.num_heads, D = p.head_dim;
    // [B, L, heads * head_dim] where it lies, or copied.
    array rows = temporaries.make({B, L, n * D}, parts_->type);
    const mx::Strides& s = attention.strides();
    if (s[3] == 1 && (n == 1 || s[1] == D)) {
      view(rows, attention, {s[0], s[2], 1}, false);
    } else {
      array turned = temporaries.make({B, L, n, D}, parts_->type);
      view(turned, attention, {s[0], s[2], s[1], s[3]}, false);
      const array copy =
          temporaries.evaluated(gpu::copy_primitive(), {turned}, {B, L, n, D}, parts_->type);
      view(rows, copy, {std::int64_t{L} * n * D, std::int64_t{n} * D, 1}, true);
    }
    array h = temporaries.make(x.shape(), parts_->type);
    record_linear(h, *parts_->o, parts_->o, rows, std::int64_t{n} * D, hidden, parts_->type,
                  biases[0], &x);
    temporaries.keep(h);
    const array normed =
        temporaries.evaluated(*parts_->post_norm, {h, inputs[2]}, x.shape(), parts_->type);
    gpu::allocate(out);
    gpu::Recording recording(out);
    const qmlp_dtype dtype = dtype_code(parts_->type);
    const qmlp_matrix from = recording.matrix(normed, hidden, dtype);
    const qmlp_mutable_matrix to = {gpu::pointer(out), from.rows, hidden, hidden, dtype};
    qmlp_swiglu_epilogue first = QMLP_SWIGLU_EPILOGUE_INIT;
    qmlp_linear_epilogue second = QMLP_LINEAR_EPILOGUE_INIT;
    if (biases[1] != nullptr) first.gate_bias = recording.values(*biases[1]);
    if (biases[2] != nullptr) first.up_bias = recording.values(*biases[2]);
    if (biases[3] != nullptr) second.linear_bias = recording.values(*biases[3]);
    second.residual = recording.matrix(h, hidden, dtype);
    const Packed& gate_up = *parts_->gate_up;
    const Packed& down = *parts_->down;
    recording.record(qmlp_mlp_workspace_bytes(gate_up.plan.get(), down.plan.get(), from.rows),
                     {parts_->gate_up, parts_->down},
                     [&](const qmlp_workspace& workspace, const qmlp_stream& where) {
                       return qmlp_fused_mlp(gate_up.plan.get(), gate_up.weight.get(),
                                             down.plan.get(), down.weight.get(), &from, &to,
                                             &workspace, &where, &first, &second);
                     });
  }

 private:
  PartsPtr parts_;
};

// The position of a pass, which all layers of the pass share.
array position(int offset) {
  thread_local std::optional<std::pair<int, array>> last;
  if (!last || last->first != offset) last.emplace(offset, array(offset, mx::int32));
  return last->second;
}

// As mlx-lm's KVCache keeps what it was given: `fresh` [B, heads, L, head_dim] at positions
// [offset, offset + L) of an array that grows by steps.
array stored(const array* held, const array& fresh, int offset, const mx::Stream& s) {
  constexpr int kStep = 256;
  const int B = fresh.shape(0), heads = fresh.shape(1), L = fresh.shape(2), width = fresh.shape(3);
  std::optional<array> room;
  if (held != nullptr) room = *held;
  if (!room || offset + L > room->shape(2)) {
    const int steps = (kStep + L - 1) / kStep;
    const array added = mx::zeros({B, heads, steps * kStep, width}, fresh.dtype(), s);
    if (room && offset % kStep != 0) {
      room = mx::slice(*room, {0, 0, 0, 0}, {B, heads, offset, width}, s);
    }
    room = room ? mx::concatenate({*room, added}, 2, s) : added;
  }
  return mx::slice_update(*room, fresh, mx::Shape{0, 0, offset, 0},
                          mx::Shape{B, heads, offset + L, width}, s);
}

array up_to(const array& held, int end, const mx::Stream& s) {
  if (end == held.shape(2)) return held;
  return mx::slice(held, {0, 0, 0, 0}, {held.shape(0), held.shape(1), end, held.shape(3)}, s);
}

// q, k and v by MLX's ops around ours.
std::vector<array> heads_graph(const LayerParts& p, const array& x, int offset,
                               const mx::Stream& s) {
  const int B = x.shape(0), L = x.shape(1);
  const array in = p.input_norm ? mx::fast::rms_norm(x, *p.input_norm, p.input_eps, s) : x;
  const auto heads = [&](const PackedWeightPtr& weight, const OptionalArray& bias, int count,
                         const OptionalArray& norm, float eps, bool rotate) {
    array y =
        mx::reshape(quantized_linear(in, weight, bias, std::nullopt, s), {B, L, count, -1}, s);
    if (norm) y = mx::fast::rms_norm(y, *norm, eps, s);
    y = mx::transpose(y, {0, 2, 1, 3}, s);
    if (!rotate || p.rope_dims == 0) return y;
    return mx::fast::rope(y, p.rope_dims, p.traditional, p.rope_base, p.rope_scale,
                          position(offset), p.rope_periods, s);
  };
  return {heads(p.q, p.q_bias, p.num_heads, p.q_norm, p.q_eps, true),
          heads(p.k, p.k_bias, p.num_kv_heads, p.k_norm, p.k_eps, true),
          heads(p.v, p.v_bias, p.num_kv_heads, std::nullopt, 0.0f, false)};
}

array rest_graph(const LayerParts& p, const array& attention, const array& x, const mx::Stream& s) {
  const array y =
      mx::reshape(mx::transpose(attention, {0, 2, 1, 3}, s), {x.shape(0), x.shape(1), -1}, s);
  if (!p.input_norm) return quantized_linear(y, p.o, p.o_bias, std::nullopt, s);
  const array h = quantized_linear(y, p.o, p.o_bias, x, s);
  return fused_mlp(mx::fast::rms_norm(h, *p.post_norm, p.post_eps, s), p.gate_up, p.down,
                   p.gate_bias, p.up_bias, p.down_bias, h, s);
}

PartsPtr parts_for(const LayerParts& p, mx::Dtype type, const mx::Stream& s) {
  auto made = std::make_shared<Parts>();
  made->p = p;
  made->type = type;
  const auto norm = [&](const OptionalArray& weight, float eps, PrimitivePtr& into) {
    if (!weight) return true;
    const array x = mx::zeros({1, weight->shape(0)}, type, s);
    into = primitive_of(mx::fast::rms_norm(x, *weight, eps, s), "RMSNorm");
    return into != nullptr;
  };
  if (!norm(p.input_norm, p.input_eps, made->input_norm) ||
      !norm(p.post_norm, p.post_eps, made->post_norm) || !norm(p.q_norm, p.q_eps, made->q_norm) ||
      !norm(p.k_norm, p.k_eps, made->k_norm)) {
    return nullptr;
  }
  if (p.rope_dims != 0) {
    const array x = mx::zeros({1, 1, 1, p.head_dim}, type, s);
    made->rope = primitive_of(mx::fast::rope(x, p.rope_dims, p.traditional, p.rope_base,
                                             p.rope_scale, position(0), p.rope_periods, s),
                              "RoPE");
    if (made->rope == nullptr) return nullptr;
  }
  const Place place = place_of(s);
  made->q = p.q->packed(type, place);
  made->k = p.k->packed(type, place);
  made->v = p.v->packed(type, place);
  made->o = p.o->packed(type, place);
  made->gate_up = p.gate_up->packed(type, place);
  made->down = p.down->packed(type, place);
  return made;
}

}  // namespace

// By stream and type.
struct GpuLayer::Known {
  int stream = -1;
  mx::Dtype type = mx::float32;
  PartsPtr parts;  // null: as a graph
};

GpuLayer::GpuLayer() = default;
GpuLayer::~GpuLayer() = default;

LayerResult GpuLayer::run(const LayerParts& p, bool one_type, const array& x, bool cached,
                          const array* keys, const array* values, int offset, const mx::Stream& s) {
  PartsPtr parts;
  // In f32 the single ops are MLX's.
  if (one_type && x.dtype() != mx::float32 && p.input_norm && p.gate_up != nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
      return known.stream == s.index && known.type == x.dtype();
    });
    if (at != known_.end()) {
      parts = at->parts;
    } else {
      if (known_.size() > 8) known_.clear();
      parts = parts_for(p, x.dtype(), s);
      known_.push_back({s.index, x.dtype(), parts});
    }
  }
  const int B = x.shape(0), L = x.shape(1);
  std::vector<array> heads;
  if (parts != nullptr) {
    heads = array::make_arrays({{B, p.num_heads, L, p.head_dim},
                                {B, p.num_kv_heads, L, p.head_dim},
                                {B, p.num_kv_heads, L, p.head_dim}},
                               {x.dtype(), x.dtype(), x.dtype()}, std::make_shared<Heads>(s, parts),
                               Heads::inputs(p, x, position(offset)));
  } else {
    heads = heads_graph(p, x, offset, s);
  }
  LayerResult result = {x, std::nullopt, std::nullopt, nullptr};
  if (cached) {
    result.keys = stored(keys, heads[1], offset, s);
    result.values = stored(values, heads[2], offset, s);
    heads[1] = up_to(*result.keys, offset + L, s);
    heads[2] = up_to(*result.values, offset + L, s);
  }
  const array attention = mx::fast::scaled_dot_product_attention(
      heads[0], heads[1], heads[2], p.scale, L > 1 ? "causal" : "", std::nullopt, std::nullopt,
      false, s);
  result.out = parts != nullptr ? array(x.shape(), x.dtype(), std::make_shared<Rest>(s, parts),
                                        Rest::inputs(p, attention, x))
                                : rest_graph(p, attention, x, s);
  return result;
}

}  // namespace qmlp_mlx
