#include "layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "array_holders.h"
#include "layer_gpu.h"
#include "primitive.h"
#include "small_rows.h"

namespace qmlp_mlx {

namespace {

struct CacheDeleter {
  void operator()(qmlp_attention_cache* cache) const { qmlp_attention_cache_free(cache); }
};

}  // namespace

class Sequences {
 public:
  Sequences(int count, int num_kv_heads, int head_dim, mx::Dtype type) {
    for (int i = 0; i < count; ++i) {
      qmlp_attention_cache* made = nullptr;
      check(qmlp_attention_cache_create(num_kv_heads, head_dim, dtype_code(type), &made));
      caches_.emplace_back(made);
    }
  }
  int count() const { return static_cast<int>(caches_.size()); }
  qmlp_attention_cache* operator[](int index) const {
    return caches_[static_cast<std::size_t>(index)].get();
  }

 private:
  std::vector<std::unique_ptr<qmlp_attention_cache, CacheDeleter>> caches_;
};

bool KvRows::continues(const array& keys, const array& values, bool unshared, int wanted_batch,
                       int offset, const mx::Stream& s) const {
  if (keys.id() != keys_id || values.id() != values_id || batch != wanted_batch ||
      offset > length || s.index != stream) {
    return false;
  }
  // What was evaluated is a copy. What was not could still be asked for by another holder.
  const auto is_private = [&](const array& a) {
    return a.status() != array::Status::unscheduled || (unshared && holders_of(a) == 1);
  };
  return is_private(keys) && is_private(values);
}

struct Layer::Ready {
  mx::Dtype type = mx::float32;
  bool fits = false;
  LayerParts parts;  // arrays contiguous and evaluated
  PackedPtr q, k, v, o, gate_up, down;
  std::int64_t hidden = 0;

  bool is_block() const { return gate_up != nullptr; }
  std::int64_t query_width() const { return std::int64_t{parts.num_heads} * parts.head_dim; }
  std::int64_t kv_width() const { return std::int64_t{parts.num_kv_heads} * parts.head_dim; }
};

namespace {

using ReadyPtr = std::shared_ptr<const Layer::Ready>;

const char* data_of(const OptionalArray& a) { return a ? a->data<char>() : nullptr; }

// Calls function(begin, end) over ranges of rows, on the pool's threads where that is worth waking
// them.
template <class Function>
void for_rows(const qmlp_stream& stream, std::int64_t rows, std::int64_t width,
              const Function& function) {
  constexpr std::int64_t kRows = 8;
  constexpr std::int64_t kSerialElements = 16384;
  if (rows <= kRows || rows * width < kSerialElements) {
    function(0, rows);
    return;
  }
  struct Job {
    const Function* function;
    std::int64_t rows;
  } job = {&function, rows};
  check(qmlp_pool_run(
      static_cast<qmlp_pool*>(stream.handle), (rows + kRows - 1) / kRows,
      [](void* context, std::int64_t index, std::int32_t) {
        const Job& it = *static_cast<const Job*>(context);
        (*it.function)(index * kRows, std::min(it.rows, (index + 1) * kRows));
      },
      &job));
}

// One evaluation of a layer, on the stream's thread.
struct Pass {
  ReadyPtr ready;
  std::shared_ptr<Sequences> sequences;
  const char* x;
  char* out;
  int batch, length, offset;
  // Keys and values that the cache held when it came from elsewhere.
  const char* keys = nullptr;
  const char* values = nullptr;
  std::int64_t head_stride = 0;  // elements

  void operator()() const;

 private:
  void linear(const PackedPtr& packed, const qmlp_matrix& from, const qmlp_mutable_matrix& to,
              const OptionalArray& bias, const char* residual, const qmlp_workspace& workspace,
              const qmlp_stream& stream) const;
  void attend(char* q, char* k, char* v, char* attended, const qmlp_workspace& workspace,
              const qmlp_stream& stream) const;
};

void Pass::linear(const PackedPtr& packed, const qmlp_matrix& from, const qmlp_mutable_matrix& to,
                  const OptionalArray& bias, const char* residual, const qmlp_workspace& workspace,
                  const qmlp_stream& stream) const {
  qmlp_linear_epilogue epilogue = QMLP_LINEAR_EPILOGUE_INIT;
  epilogue.linear_bias = data_of(bias);
  if (residual != nullptr) epilogue.residual = {residual, to.rows, to.cols, to.cols, to.dtype};
  check(qmlp_quantized_linear(packed->plan.get(), packed->weight.get(), &from, &to, &workspace,
                              &stream, &epilogue));
}

// Rows [begin, end) of q or k, in place: the norm of each head where there is one, then the
// rotation.
template <class T>
void turn_rows(char* data, std::int64_t begin, std::int64_t end, int heads, int length,
               const LayerParts& parts, const OptionalArray& weight, float eps,
               const Angles* angles) {
  const std::int64_t width = std::int64_t{heads} * parts.head_dim;
  for (std::int64_t row = begin; row < end; ++row) {
    T* head = reinterpret_cast<T*>(data) + row * width;
    if (weight) rms_rows(head, weight->data<T>(), head, heads, parts.head_dim, eps);
    if (angles == nullptr) continue;
    const auto half = static_cast<std::int64_t>(angles->frequencies.size());
    const std::int64_t at = row % length * half;
    for (int h = 0; h < heads; ++h, head += parts.head_dim) {
      rotate_head(head, 1, head, angles->cos.data() + at, angles->sin.data() + at, half,
                  parts.traditional);
    }
  }
}

// Norms and rotation of q and k in place, k and v into the cache, attention.
void Pass::attend(char* q, char* k, char* v, char* attended, const qmlp_workspace& workspace,
                  const qmlp_stream& stream) const {
  const LayerParts& parts = ready->parts;
  const qmlp_dtype dtype = dtype_code(ready->type);
  const std::int64_t rows = std::int64_t{batch} * length;
  std::shared_ptr<const Angles> angles;
  if (parts.frequencies) {
    angles = angles_of(parts.frequencies->data<float>(), parts.frequencies->size(),
                       parts.rope_scale, offset, length);
  }
  if (parts.q_norm || angles != nullptr) {
    for_rows(stream, rows, ready->query_width(), [&](std::int64_t begin, std::int64_t end) {
      for_type(ready->type, [&](auto tag) {
        using T = decltype(tag);
        turn_rows<T>(q, begin, end, parts.num_heads, length, parts, parts.q_norm, parts.q_eps,
                     angles.get());
        turn_rows<T>(k, begin, end, parts.num_kv_heads, length, parts, parts.k_norm, parts.k_eps,
                     angles.get());
      });
    });
  }
  const auto element = static_cast<std::int64_t>(ready->type.size());
  const std::int64_t q_bytes = length * ready->query_width() * element;
  const std::int64_t kv_bytes = length * ready->kv_width() * element;
  for (int b = 0; b < batch; ++b) {
    qmlp_attention_cache* cache = (*sequences)[b];
    if (keys != nullptr) {
      const std::int64_t at = b * parts.num_kv_heads * head_stride * element;
      check(qmlp_attention_cache_store(cache, offset, keys + at, values + at, head_stride));
    }
    const qmlp_matrix new_k = {k + b * kv_bytes, length, ready->kv_width(), ready->kv_width(),
                               dtype};
    const qmlp_matrix new_v = {v + b * kv_bytes, length, ready->kv_width(), ready->kv_width(),
                               dtype};
    check(qmlp_attention_cache_append(cache, offset, &new_k, &new_v));
    const qmlp_matrix queries = {q + b * q_bytes, length, ready->query_width(),
                                 ready->query_width(), dtype};
    const qmlp_mutable_matrix to = {attended + b * q_bytes, length, ready->query_width(),
                                    ready->query_width(), dtype};
    check(qmlp_attention(cache, &queries, &to, parts.scale, &workspace, &stream));
  }
}

void Pass::operator()() const {
  const qmlp_python::PoolHold pool(runtime());
  if (pool.pool() == nullptr) throw_last_error(QMLP_DEVICE);
  const qmlp_stream stream = {QMLP_CPU, 0, pool.pool()};
  const LayerParts& parts = ready->parts;
  const qmlp_dtype dtype = dtype_code(ready->type);
  const auto element = static_cast<std::size_t>(ready->type.size());
  const std::int64_t rows = std::int64_t{batch} * length;

  // Scratch: the rows between the ops, then the workspace that these take in turn.
  std::size_t used = 0;
  const auto take = [&](std::int64_t width) {
    const std::size_t at = used;
    const auto bytes = static_cast<std::size_t>(rows * width) * element;
    used += (bytes + QMLP_WORKSPACE_ALIGNMENT - 1) / QMLP_WORKSPACE_ALIGNMENT *
            QMLP_WORKSPACE_ALIGNMENT;
    return at;
  };
  const std::size_t normed_at = take(ready->hidden);
  const std::size_t q_at = take(ready->query_width());
  const std::size_t k_at = take(ready->kv_width());
  const std::size_t v_at = take(ready->kv_width());
  const std::size_t attended_at = take(ready->query_width());
  std::size_t need = qmlp_attention_workspace_bytes(
      (*sequences)[0], offset + length,
      qmlp_pool_num_threads(static_cast<const qmlp_pool*>(pool.pool())));
  for (const PackedPtr* packed : {&ready->q, &ready->k, &ready->v, &ready->o}) {
    need = std::max(need, qmlp_plan_workspace_bytes((*packed)->plan.get(), rows));
  }
  if (ready->is_block()) {
    need = std::max(
        need, qmlp_mlp_workspace_bytes(ready->gate_up->plan.get(), ready->down->plan.get(), rows));
  }
  auto* const scratch = static_cast<char*>(runtime().scratch(used + need));
  if (scratch == nullptr) throw std::bad_alloc();
  const qmlp_workspace workspace = {scratch + used, need};
  const auto matrix = [&](const char* data, std::int64_t cols) {
    return qmlp_matrix{data, rows, cols, cols, dtype};
  };
  const auto output = [&](char* data, std::int64_t cols) {
    return qmlp_mutable_matrix{data, rows, cols, cols, dtype};
  };
  const auto norm = [&](const char* from, const OptionalArray& weight, float eps) {
    for_rows(stream, rows, ready->hidden, [&](std::int64_t begin, std::int64_t end) {
      for_type(ready->type, [&](auto tag) {
        using T = decltype(tag);
        const std::int64_t at = begin * ready->hidden;
        rms_rows(reinterpret_cast<const T*>(from) + at, weight->data<T>(),
                 reinterpret_cast<T*>(scratch + normed_at) + at, end - begin, ready->hidden, eps);
      });
    });
  };

  const char* input = x;
  if (ready->is_block()) {
    norm(x, parts.input_norm, parts.input_eps);
    input = scratch + normed_at;
  }
  const qmlp_matrix in = matrix(input, ready->hidden);
  linear(ready->q, in, output(scratch + q_at, ready->query_width()), parts.q_bias, nullptr,
         workspace, stream);
  linear(ready->k, in, output(scratch + k_at, ready->kv_width()), parts.k_bias, nullptr, workspace,
         stream);
  linear(ready->v, in, output(scratch + v_at, ready->kv_width()), parts.v_bias, nullptr, workspace,
         stream);
  attend(scratch + q_at, scratch + k_at, scratch + v_at, scratch + attended_at, workspace, stream);
  const qmlp_mutable_matrix to = output(out, ready->hidden);
  linear(ready->o, matrix(scratch + attended_at, ready->query_width()), to, parts.o_bias,
         ready->is_block() ? x : nullptr, workspace, stream);
  if (!ready->is_block()) return;
  norm(out, parts.post_norm, parts.post_eps);
  qmlp_swiglu_epilogue first = QMLP_SWIGLU_EPILOGUE_INIT;
  first.gate_bias = data_of(parts.gate_bias);
  first.up_bias = data_of(parts.up_bias);
  qmlp_linear_epilogue second = QMLP_LINEAR_EPILOGUE_INIT;
  second.linear_bias = data_of(parts.down_bias);
  second.residual = matrix(out, ready->hidden);
  const qmlp_matrix normed = matrix(scratch + normed_at, ready->hidden);
  check(qmlp_fused_mlp(ready->gate_up->plan.get(), ready->gate_up->weight.get(),
                       ready->down->plan.get(), ready->down->weight.get(), &normed, &to, &workspace,
                       &stream, &first, &second));
}

class LayerOp : public CpuPrimitive {
 public:
  LayerOp(mx::Stream stream, ReadyPtr ready, std::shared_ptr<Sequences> sequences, int offset,
          int taken_over)
      : CpuPrimitive(stream),
        ready_(std::move(ready)),
        sequences_(std::move(sequences)),
        offset_(offset),
        taken_over_(taken_over) {}

  const char* name() const override { return "QmlpLayer"; }

  // Inputs: x, then either the last call's `done`, or the keys and values to take over, or nothing.
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const array& x = inputs[0];
    array& out = outputs[0];
    if (x.is_donatable() && x.nbytes() == out.nbytes()) {
      out.copy_shared_buffer(x);
    } else {
      allocate(out);
    }
    allocate(outputs[1]);
    Pass pass{ready_,     sequences_, x.data<char>(), out.data<char>(),
              x.shape(0), x.shape(1), offset_};
    if (taken_over_ > 0) {
      pass.keys = inputs[1].data<char>();
      pass.values = inputs[2].data<char>();
      pass.head_stride = std::int64_t{inputs[1].shape(2)} * inputs[1].shape(3);
    }
    mx::cpu::get_command_encoder(stream()).dispatch(
        [pass = std::move(pass), done = outputs[1].data<std::uint8_t>()] {
          pass();
          *done = 1;
        });
  }

 private:
  ReadyPtr ready_;
  std::shared_ptr<Sequences> sequences_;
  int offset_;
  int taken_over_;  // positions
};

// The keys (part 0) or values (1) as MLX would hold them, zeros past the last position.
class KvArray : public CpuPrimitive {
 public:
  KvArray(mx::Stream stream, std::shared_ptr<Sequences> sequences, int part, int length)
      : CpuPrimitive(stream), sequences_(std::move(sequences)), part_(part), length_(length) {}

  const char* name() const override { return "QmlpKvArray"; }

  void eval_cpu(const std::vector<array>&, std::vector<array>& outputs) override {
    array& out = outputs[0];
    allocate(out);
    const std::size_t sequence_bytes = out.nbytes() / static_cast<std::size_t>(out.shape(0));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [sequences = sequences_, part = part_, length = length_, to = out.data<char>(),
         bytes = out.nbytes(), sequence_bytes,
         head_stride = std::int64_t{out.shape(2)} * out.shape(3)] {
          std::memset(to, 0, bytes);
          for (int b = 0; b < sequences->count(); ++b) {
            char* const rows = to + static_cast<std::size_t>(b) * sequence_bytes;
            check(qmlp_attention_cache_load((*sequences)[b], length, part == 0 ? rows : nullptr,
                                            part == 0 ? nullptr : rows, head_stride));
          }
        });
  }

 private:
  std::shared_ptr<Sequences> sequences_;
  int part_;
  int length_;
};

bool is_vector(const OptionalArray& a, std::int64_t width, mx::Dtype type) {
  return !a || (a->ndim() == 1 && a->shape(0) == width && a->dtype() == type);
}

}  // namespace

bool belong_together(const LayerParts& p, mx::Dtype type) {
  const std::int64_t query_width = std::int64_t{p.num_heads} * p.head_dim;
  const std::int64_t kv_width = std::int64_t{p.num_kv_heads} * p.head_dim;
  if (p.num_heads < 1 || p.num_kv_heads < 1 || p.head_dim < 1 ||
      p.num_heads % p.num_kv_heads != 0 || p.q_norm.has_value() != p.k_norm.has_value()) {
    return false;
  }
  const auto is_linear = [&](const PackedWeightPtr& w, std::int64_t N, std::int64_t K) {
    return w != nullptr && w->num_parts() == 1 && w->N() == N && w->K() == K &&
           w->compute_type(type) == type;
  };
  if (p.q == nullptr) return false;
  const std::int64_t hidden = p.q->K();
  if (!is_linear(p.q, query_width, hidden) || !is_linear(p.k, kv_width, hidden) ||
      !is_linear(p.v, kv_width, hidden) || !is_linear(p.o, hidden, query_width) ||
      !is_vector(p.q_bias, query_width, type) || !is_vector(p.k_bias, kv_width, type) ||
      !is_vector(p.v_bias, kv_width, type) || !is_vector(p.o_bias, hidden, type) ||
      !is_vector(p.q_norm, p.head_dim, type) || !is_vector(p.k_norm, p.head_dim, type)) {
    return false;
  }
  if (p.frequencies && (p.frequencies->ndim() != 1 || p.frequencies->dtype() != mx::float32 ||
                        2 * p.frequencies->shape(0) > p.head_dim)) {
    return false;
  }
  if (p.gate_up == nullptr) return true;
  return p.input_norm && p.post_norm && is_vector(p.input_norm, hidden, type) &&
         is_vector(p.post_norm, hidden, type) && p.gate_up->num_parts() == 2 &&
         p.gate_up->K() == hidden && p.gate_up->compute_type(type) == type &&
         is_linear(p.down, hidden, p.gate_up->N()) &&
         is_vector(p.gate_bias, p.gate_up->N(), type) &&
         is_vector(p.up_bias, p.gate_up->N(), type) && is_vector(p.down_bias, hidden, type);
}

Layer::Layer(LayerParts parts) : parts_(std::move(parts)), gpu_(std::make_unique<GpuLayer>()) {}
Layer::~Layer() = default;

std::shared_ptr<const Layer::Ready> Layer::ready_for(mx::Dtype type) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ready_ != nullptr && ready_->type == type) return ready_;
  auto made = std::make_shared<Ready>();
  made->type = type;
  made->fits = belong_together(parts_, type);
  if (made->fits) {
    made->parts = parts_;
    std::vector<array> small;
    LayerParts& p = made->parts;
    for (OptionalArray* a :
         {&p.q_bias, &p.k_bias, &p.v_bias, &p.o_bias, &p.q_norm, &p.k_norm, &p.frequencies,
          &p.input_norm, &p.post_norm, &p.gate_bias, &p.up_bias, &p.down_bias}) {
      if (!*a) continue;
      *a = mx::contiguous(**a, false, mx::Device::cpu);
      small.push_back(**a);
    }
    mx::eval(small);
    const Place cpu = mx::Device::cpu;
    made->hidden = p.q->K();
    made->q = p.q->packed(type, cpu);
    made->k = p.k->packed(type, cpu);
    made->v = p.v->packed(type, cpu);
    made->o = p.o->packed(type, cpu);
    if (p.gate_up != nullptr) {
      made->gate_up = p.gate_up->packed(type, cpu);
      made->down = p.down->packed(type, cpu);
    }
  }
  ready_ = made;
  return made;
}

std::optional<LayerResult> Layer::run_on_gpu(const array& x, bool cached, const array* keys,
                                             const array* values, int offset,
                                             const mx::Stream& s) const {
  const LayerParts& p = parts_;
  if (x.is_tracer() || x.ndim() != 3 || x.size() == 0 || x.shape(2) != p.q->K() ||
      (p.frequencies && p.rope_dims == 0)) {
    return std::nullopt;
  }
  if (cached && keys != nullptr && values != nullptr) {
    const auto fits = [&](const array& a) {
      return !a.is_tracer() && a.ndim() == 4 && a.shape(0) == x.shape(0) &&
             a.shape(1) == p.num_kv_heads && a.shape(2) >= offset;
    };
    if (!fits(*keys) || !fits(*values)) return std::nullopt;
  } else if (offset != 0) {
    return std::nullopt;
  }
  const bool continues = keys != nullptr && values != nullptr;
  const GpuLayer::Held held = {cached, continues ? keys : nullptr, continues ? values : nullptr,
                               offset};
  return gpu_->run(p, x, held, s);
}

std::optional<LayerResult> Layer::run(const array& x, bool cached, const KvRowsPtr& rows,
                                      const array* keys, const array* values, int offset,
                                      bool unshared) const {
  const mx::Stream s = mx::default_stream(mx::default_device());
  const mx::Dtype type = x.dtype();
  if (s.device != mx::Device::cpu) return run_on_gpu(x, cached, keys, values, offset, s);
  if (x.is_tracer() || x.ndim() != 3 || x.size() == 0 ||
      (type != mx::float32 && type != mx::float16 && type != mx::bfloat16)) {
    return std::nullopt;
  }
  const ReadyPtr ready = ready_for(type);
  if (!ready->fits || x.shape(2) != ready->hidden) return std::nullopt;
  const LayerParts& parts = ready->parts;
  const int batch = x.shape(0), length = x.shape(1);

  bool goes_on = false;
  if (cached && keys != nullptr && values != nullptr) {
    const auto fits = [&](const array& a) {
      return !a.is_tracer() && a.ndim() == 4 && a.shape(0) == batch &&
             a.shape(1) == parts.num_kv_heads && a.shape(2) >= offset &&
             a.shape(3) == parts.head_dim && a.dtype() == type;
    };
    if (!fits(*keys) || !fits(*values)) return std::nullopt;
    goes_on = rows != nullptr && rows->continues(*keys, *values, unshared, batch, offset, s);
  } else if (offset != 0) {
    return std::nullopt;
  }

  // Our own results are contiguous.
  const bool is_ours = x.has_primitive() && dynamic_cast<const LayerOp*>(&x.primitive()) != nullptr;
  std::vector<array> inputs = {is_ours ? x : mx::contiguous(x, false, s)};
  std::shared_ptr<Sequences> sequences;
  int taken_over = 0;
  if (goes_on) {
    sequences = rows->sequences;
    inputs.push_back(*rows->done);
  } else {
    sequences = std::make_shared<Sequences>(batch, parts.num_kv_heads, parts.head_dim, type);
    if (offset > 0) {
      taken_over = offset;
      inputs.push_back(mx::contiguous(*keys, false, s));
      inputs.push_back(mx::contiguous(*values, false, s));
    }
  }
  std::vector<array> outputs = array::make_arrays(
      {x.shape(), {1}}, {type, mx::uint8},
      std::make_shared<LayerOp>(s, ready, sequences, offset, taken_over), std::move(inputs));
  LayerResult result = {outputs[0], std::nullopt, std::nullopt, nullptr};
  if (!cached) return result;

  const int end = offset + length;
  int capacity = whole_steps(end);
  if (keys != nullptr) capacity = std::max(capacity, keys->shape(2));
  const mx::Shape shape = {batch, parts.num_kv_heads, capacity, parts.head_dim};
  const auto stand_in = [&](int part) {
    return array(shape, type, std::make_shared<KvArray>(s, sequences, part, end), {outputs[1]});
  };
  result.keys = stand_in(0);
  result.values = stand_in(1);
  result.rows = goes_on ? rows : std::make_shared<KvRows>();
  KvRows& now = *result.rows;
  now.sequences = std::move(sequences);
  now.done = outputs[1];
  now.keys_id = result.keys->id();
  now.values_id = result.values->id();
  now.batch = batch;
  now.length = end;
  now.stream = s.index;
  return result;
}

}  // namespace qmlp_mlx
