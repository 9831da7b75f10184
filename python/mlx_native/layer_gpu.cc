#include "layer_gpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "heads.h"
#include "kv_room.h"
#include "primitive.h"

namespace qmlp_mlx {
namespace {

using PrimitivePtr = std::shared_ptr<mx::Primitive>;

// What a layer runs with on one stream: its weights, its small arrays, evaluated, and MLX's own
// primitives, which are evaluated inside ours, so that they share its place in the graph.
struct Parts {
  LayerParts p;
  mx::Dtype type = mx::float32;
  PackedPtr q, k, v, o, gate_up, down;
  PrimitivePtr input_norm, post_norm, q_norm, k_norm;
  PrimitivePtr attention, causal_attention;  // of one token, of several
  float log2_of_base = 0.0f;
};
using PartsPtr = std::shared_ptr<const Parts>;

// The primitive of an op that MLX runs as one kernel; null where it is something else.
PrimitivePtr primitive_of(const array& a, const char* name) {
  if (!a.has_primitive() || !a.siblings().empty() || std::strcmp(a.primitive().name(), name) != 0) {
    return nullptr;
  }
  return a.primitive_ptr();
}

// The same elements, seen as another shape. MLX's attention asks whether its inputs are evaluated.
array view(array as, const array& of, mx::Strides strides, bool row_contiguous) {
  array::Flags flags = {};
  flags.contiguous = true;
  flags.row_contiguous = row_contiguous;
  flags.col_contiguous = false;
  as.copy_shared_buffer(of, strides, flags, of.data_size());
  as.set_status(array::Status::evaluated);
  return as;
}
array as_evaluated(array as, const array& of) {
  as.copy_shared_buffer(of);
  as.set_status(array::Status::evaluated);
  return as;
}

// A whole layer: x -> out and, with a cache, its keys and values. Inputs: x and what the cache
// held.
class GpuLayerOp : public mx::Primitive {
 public:
  GpuLayerOp(mx::Stream stream, PartsPtr parts, bool cached, int offset)
      : mx::Primitive(stream), parts_(std::move(parts)), cached_(cached), offset_(offset) {}
  const char* name() const override { return "QmlpLayer"; }

  void eval_cpu(const std::vector<array>&, std::vector<array>&) override {
    throw std::runtime_error(std::string(name()) + ": runs on GPU streams");
  }

  void eval_gpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const LayerParts& p = parts_->p;
    const array& x = inputs[0];
    gpu::Recording on(outputs[0]);
    on.keep(parts_);
    const int B = x.shape(0), L = x.shape(1);
    const array normed =
        on.evaluated(*parts_->input_norm, {x, *p.input_norm}, x.shape(), parts_->type);
    array q = heads(on, parts_->q, normed, p.q_bias, p.num_heads);
    array k = heads(on, parts_->k, normed, p.k_bias, p.num_kv_heads);
    const array v = heads(on, parts_->v, normed, p.v_bias, p.num_kv_heads);
    if (p.q_norm) {
      q = on.evaluated(*parts_->q_norm, {q, *p.q_norm}, q.shape(), parts_->type);
      k = on.evaluated(*parts_->k_norm, {k, *p.k_norm}, k.shape(), parts_->type);
    }
    // As MLX's RoPE leaves them: its attention gives other bits for another order.
    const auto room_for_rotated = [&](const array& y) {
      if (p.rope_dims == 0 || L == 1) return by_heads(on, y);
      return on.allocated({B, y.shape(2), L, y.shape(3)}, y.dtype());
    };
    std::vector<array> all = {room_for_rotated(q)};
    if (cached_) {
      place_in_rooms(on, inputs.size() > 1 ? &inputs[1] : nullptr,
                     static_cast<long>(outputs.size()), offset_, &outputs[1]);
      for (int i : {1, 2}) {
        all.push_back(as_evaluated(on.make(outputs[i].shape(), parts_->type), outputs[i]));
      }
    } else {
      all.insert(all.end(), {room_for_rotated(k), by_heads(on, v)});
    }
    rotate_and_store(on, q, k, v, all);
    mx::Primitive& attention = L == 1 ? *parts_->attention : *parts_->causal_attention;
    const array attended =
        on.evaluated(attention, all, {B, p.num_heads, L, p.head_dim}, parts_->type);
    finish(on, attended, x, outputs[0]);
  }

 private:
  // [B, L, count, head_dim]
  array heads(gpu::Recording& on, const PackedPtr& packed, const array& x,
              const OptionalArray& bias, int count) const {
    const int width = parts_->p.head_dim;
    array y = on.allocated({x.shape(0), x.shape(1), count, width}, parts_->type);
    linear(on, *packed, x, bias, nullptr, std::int64_t{count} * width, y);
    return y;
  }

  void linear(gpu::Recording& on, const Packed& packed, const array& x, const OptionalArray& bias,
              const array* residual, std::int64_t N, const array& out) const {
    const qmlp_dtype dtype = dtype_code(parts_->type);
    const std::int64_t rows = std::int64_t{x.shape(0)} * x.shape(1);
    const qmlp_matrix from = on.matrix(x, static_cast<std::int64_t>(x.size()) / rows, dtype);
    const qmlp_mutable_matrix to = {gpu::pointer(out), rows, N, N, dtype};
    qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
    if (bias) epilogue.linear_bias = on.values(*bias);
    if (residual != nullptr) epilogue.residual = on.matrix(*residual, N, dtype);
    on.record(out, qmlp_plan_workspace_bytes(packed.plan.get(), rows),
              [&](const qmlp_workspace& workspace, const qmlp_stream& where) {
                return qmlp_quantized_linear(packed.plan.get(), packed.weight.get(), &from, &to,
                                             &workspace, &where, &epilogue);
              });
  }

  // y [B, L, heads, head_dim] as attention takes it.
  static array by_heads(const gpu::Recording& on, const array& y) {
    const int L = y.shape(1), n = y.shape(2), D = y.shape(3);
    return view(on.make({y.shape(0), n, L, D}, y.dtype()), y,
                {std::int64_t{L} * n * D, D, std::int64_t{n} * D, 1}, L == 1 || n == 1);
  }

  // q, k and v to where queries, keys and values have their rows.
  void rotate_and_store(gpu::Recording& on, const array& q, const array& k, const array& v,
                        const std::vector<array>& to) const {
    const array &queries = to[0], &keys = to[1], &values = to[2];
    const LayerParts& p = parts_->p;
    if (p.rope_dims == 0 && !cached_) return;
    HeadsArgs args = {};
    args.q = gpu::pointer(q);
    args.k = gpu::pointer(k);
    args.v = gpu::pointer(v);
    args.queries = gpu::pointer(queries);
    args.keys = gpu::pointer(keys);
    args.values = cached_ ? gpu::pointer(values) : nullptr;
    for (int axis = 0; axis < 3; ++axis) {
      args.query_strides[axis] = queries.strides(axis);
      args.key_strides[axis] = keys.strides(axis);
      args.value_strides[axis] = values.strides(axis);
    }
    if (p.rope_periods) {
      args.periods = static_cast<const float*>(gpu::pointer(*p.rope_periods));
      args.period_stride = p.rope_periods->strides(0);
    }
    args.scale = p.rope_scale;
    args.base_log2 = parts_->log2_of_base;
    const int rows = q.shape(0) * q.shape(1);
    args.length = q.shape(1);
    args.num_heads = p.num_heads;
    args.num_kv_heads = p.num_kv_heads;
    args.head_dim = p.head_dim;
    args.rotated = p.rope_dims;
    args.traditional = p.traditional ? 1 : 0;
    args.offset = offset_;
    args.first_head = p.rope_dims == 0 ? p.num_heads : 0;
    const int count = p.num_heads + p.num_kv_heads * (cached_ ? 2 : 1) - args.first_head;
    // Many rows fill the GPU with fewer threads, which then share an angle.
    args.heads_each = rows >= 64 ? 4 : 1;
    const int threads = (count + args.heads_each - 1) / args.heads_each * (p.head_dim / 2);
    void* const function = heads_function(parts_->type == mx::bfloat16);
    if (function == nullptr) throw std::runtime_error("QmlpLayer: no kernel for this GPU");
    on.reads(q);
    on.reads(k);
    on.reads(v);
    void* params[] = {&args};
    on.record({&queries, &keys, &values},
              {function,
               {static_cast<std::uint32_t>(rows),
                (static_cast<std::uint32_t>(threads) + kHeadsBlock - 1) / kHeadsBlock, 1},
               {kHeadsBlock, 1, 1},
               0,
               params});
  }

  // attention [B, heads, L, head_dim] -> h = x + o(attention), h + mlp(norm(h)).
  void finish(gpu::Recording& on, const array& attention, const array& x, array& out) const {
    const LayerParts& p = parts_->p;
    const int B = x.shape(0), L = x.shape(1), hidden = x.shape(2);
    const int n = p.num_heads, D = p.head_dim;
    // [B, L, heads * head_dim] where it lies, or copied.
    array rows = on.make({B, L, n * D}, parts_->type);
    const mx::Strides& s = attention.strides();
    if (s[3] == 1 && (n == 1 || s[1] == D)) {
      rows = view(std::move(rows), attention, {s[0], s[2], 1}, false);
    } else {
      const array turned =
          view(on.make({B, L, n, D}, parts_->type), attention, {s[0], s[2], s[1], s[3]}, false);
      rows = view(std::move(rows), on.contiguous(turned),
                  {std::int64_t{L} * n * D, std::int64_t{n} * D, 1}, true);
    }
    const array h = on.allocated(x.shape(), parts_->type);
    linear(on, *parts_->o, rows, p.o_bias, &x, hidden, h);
    const array normed =
        on.evaluated(*parts_->post_norm, {h, *p.post_norm}, x.shape(), parts_->type);
    gpu::allocate(out);
    const qmlp_dtype dtype = dtype_code(parts_->type);
    const qmlp_matrix from = on.matrix(normed, hidden, dtype);
    const qmlp_mutable_matrix to = {gpu::pointer(out), from.rows, hidden, hidden, dtype};
    qmlp_swiglu_epilogue first = QMLP_SWIGLU_EPILOGUE_INIT;
    qmlp_linear_epilogue second = QMLP_LINEAR_EPILOGUE_INIT;
    if (p.gate_bias) first.gate_bias = on.values(*p.gate_bias);
    if (p.up_bias) first.up_bias = on.values(*p.up_bias);
    if (p.down_bias) second.linear_bias = on.values(*p.down_bias);
    second.residual = on.matrix(h, hidden, dtype);
    const Packed& gate_up = *parts_->gate_up;
    const Packed& down = *parts_->down;
    on.record(out, qmlp_mlp_workspace_bytes(gate_up.plan.get(), down.plan.get(), from.rows),
              [&](const qmlp_workspace& workspace, const qmlp_stream& where) {
                return qmlp_fused_mlp(gate_up.plan.get(), gate_up.weight.get(), down.plan.get(),
                                      down.weight.get(), &from, &to, &workspace, &where, &first,
                                      &second);
              });
  }

  PartsPtr parts_;
  bool cached_;
  int offset_;  // positions of the cache before x
};

// The position of a pass, which all layers of the pass share.
array position(int offset) {
  thread_local std::optional<std::pair<int, array>> last;
  if (!last || last->first != offset) last.emplace(offset, array(offset, mx::int32));
  return last->second;
}

array up_to(const array& held, int end, const mx::Stream& s) {
  if (end == held.shape(2)) return held;
  return mx::slice(held, {0, 0, 0, 0}, {held.shape(0), held.shape(1), end, held.shape(3)}, s);
}

// As mlx-lm's KVCache keeps what it was given: `fresh` [B, heads, L, head_dim] at positions
// [offset, offset + L) of an array that grows to whole steps.
array stored(const array* held, const array& fresh, int offset, const mx::Stream& s) {
  const int B = fresh.shape(0), heads = fresh.shape(1), L = fresh.shape(2), width = fresh.shape(3);
  std::optional<array> room;
  if (held != nullptr) room = *held;
  if (!room || offset + L > room->shape(2)) {
    const int more = whole_steps(offset + L) - offset;
    const array added = mx::zeros({B, heads, more, width}, fresh.dtype(), s);
    room = room && offset > 0 ? mx::concatenate({up_to(*room, offset, s), added}, 2, s) : added;
  }
  return mx::slice_update(*room, fresh, mx::Shape{0, 0, offset, 0},
                          mx::Shape{B, heads, offset + L, width}, s);
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

// Null where the layer cannot be one op; `known` tells whether that will be so at other calls.
PartsPtr parts_for(const LayerParts& p, mx::Dtype type, const mx::Stream& s, bool& known) {
  known = true;
  // In f32 the single ops are MLX's.
  if (type == mx::float32 || !belong_together(p, type) || !p.input_norm || p.gate_up == nullptr ||
      p.head_dim % 8 != 0 || p.rope_dims % 2 != 0 || p.rope_dims > p.head_dim ||
      (p.rope_periods && (p.rope_periods->dtype() != mx::float32 || p.rope_periods->ndim() != 1 ||
                          p.rope_periods->shape(0) < p.rope_dims / 2))) {
    return nullptr;
  }
  auto made = std::make_shared<Parts>();
  made->p = p;
  made->type = type;
  made->log2_of_base = std::log2(p.rope_base.value_or(1.0f));
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
  // MLX has kernels for one token and for many by the shape of heads alone.
  const auto attention = [&](int length, const char* mask) -> PrimitivePtr {
    const array x = mx::zeros({1, p.num_heads, length, p.head_dim}, type, s);
    const array kv = mx::zeros({1, p.num_kv_heads, length, p.head_dim}, type, s);
    const auto attend = [&](bool by_one_kernel) {
      return mx::fast::scaled_dot_product_attention(x, kv, kv, p.scale, mask, std::nullopt,
                                                    std::nullopt, by_one_kernel, s);
    };
    try {
      attend(true);
    } catch (const std::invalid_argument&) {
      return nullptr;
    }
    const array y = attend(false);
    PrimitivePtr found = primitive_of(y, "ScaledDotProductAttention");
    // While a gradient is traced it may have a mask and a second result.
    if (found == nullptr || y.inputs().size() != 3) {
      known = false;
      return nullptr;
    }
    return found;
  };
  made->attention = attention(1, "");
  made->causal_attention = attention(64, "causal");
  if (made->attention == nullptr || made->causal_attention == nullptr) return nullptr;
  std::vector<array> small;
  LayerParts& own = made->p;
  for (OptionalArray* a : {&own.q_bias, &own.k_bias, &own.v_bias, &own.o_bias, &own.q_norm,
                           &own.k_norm, &own.rope_periods, &own.input_norm, &own.post_norm,
                           &own.gate_bias, &own.up_bias, &own.down_bias}) {
    if (!*a) continue;
    *a = mx::contiguous(**a, false, s);
    small.push_back(**a);
  }
  mx::eval(small);
  const Place place = place_of(s);
  // Kernels' arrays outlive the layer, on threads that should not meet Python's objects.
  own.q = own.k = own.v = own.o = own.gate_up = own.down = nullptr;
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

LayerResult GpuLayer::run(const LayerParts& p, const array& x, const Held& held,
                          const mx::Stream& s) {
  const auto& [cached, keys, values, offset] = held;
  PartsPtr parts;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
      return known.stream == s.index && known.type == x.dtype();
    });
    if (at != known_.end()) {
      parts = at->parts;
    } else {
      bool known = true;
      parts = parts_for(p, x.dtype(), s, known);
      if (known_.size() > 8) known_.clear();
      if (known) known_.push_back({s.index, x.dtype(), parts});
    }
  }
  const int B = x.shape(0), L = x.shape(1), end = offset + L;
  LayerResult result = {x, std::nullopt, std::nullopt, nullptr};
  const auto fits = [&](const array* a) {
    return a == nullptr || (a->dtype() == x.dtype() && a->shape(3) == p.head_dim);
  };
  if (parts != nullptr && fits(keys) && fits(values)) {
    std::vector<array> inputs = {x};
    if (keys != nullptr) inputs.insert(inputs.end(), {*keys, *values});
    auto op = std::make_shared<GpuLayerOp>(s, std::move(parts), cached, offset);
    if (!cached) {
      result.out = array(x.shape(), x.dtype(), std::move(op), std::move(inputs));
      return result;
    }
    const mx::Shape shape = {B, p.num_kv_heads, end, p.head_dim};
    std::vector<array> made =
        array::make_arrays({x.shape(), shape, shape}, {x.dtype(), x.dtype(), x.dtype()},
                           std::move(op), std::move(inputs));
    result.out = std::move(made[0]);
    result.keys = std::move(made[1]);
    result.values = std::move(made[2]);
    return result;
  }
  std::vector<array> heads = heads_graph(p, x, offset, s);
  if (cached) {
    result.keys = stored(keys, heads[1], offset, s);
    result.values = stored(values, heads[2], offset, s);
    heads[1] = up_to(*result.keys, end, s);
    heads[2] = up_to(*result.values, end, s);
  }
  const array attention = mx::fast::scaled_dot_product_attention(
      heads[0], heads[1], heads[2], p.scale, L > 1 ? "causal" : "", std::nullopt, std::nullopt,
      false, s);
  result.out = rest_graph(p, attention, x, s);
  return result;
}

}  // namespace qmlp_mlx
