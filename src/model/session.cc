#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/carver.h"
#include "base/checked.h"
#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "model/attention.h"
#include "model/rope.h"
#include "model/session_impl.h"

namespace qmlp {
namespace {

constexpr std::int64_t kDefaultMaxTokens = 4096;
// Rows of logits computed at once: a vocabulary is wide, so they are not all kept.
constexpr std::int64_t kHeadRows = 32;
// Multiply-adds below which waking the other threads costs more than it saves.
constexpr std::int64_t kSerialWork = 16384;

MatrixView read_only(const MutableMatrixView& view) noexcept {
  return {view.data, view.rows, view.cols, view.row_stride, view.dtype, view.device};
}

const std::byte* data_or_null(const std::vector<std::byte>& bytes) noexcept {
  return bytes.empty() ? nullptr : bytes.data();
}

Status check_options(const SessionOptions& options, const Model::Impl& model) {
  const auto refuse = [](const char* field, std::int64_t have, std::string_view need) -> Status {
    return Error{Errc::invalid_argument, concat(field, ": is ", have, ", must be ", need)};
  };
  if (options.max_tokens < 0) {
    return refuse("max_tokens", options.max_tokens, "at least 1, or 0 for the default");
  }
  const ModelConfig& config = model.config;
  if (config.context_length > 0 && options.max_tokens > config.context_length) {
    return refuse("max_tokens", options.max_tokens,
                  concat("at most ", config.context_length, ", the model's context"));
  }
  if (options.prefill_chunk < 1 || options.prefill_chunk > kMaxPrefillChunk) {
    return refuse("prefill_chunk", options.prefill_chunk, concat("from 1 to ", kMaxPrefillChunk));
  }
  const FusionOptions& fusion = options.fusion;
  if (fusion.fuse_min_m < 0) return refuse("fuse_min_m", fusion.fuse_min_m, "at least 0");
  if (fusion.fused_max_calls < -1) {
    return refuse("fused_max_calls", fusion.fused_max_calls, "at least 0, or -1 for no cap");
  }
  const bool always_fused = fusion.fused && fusion.fuse_min_m <= 1 && fusion.fused_max_calls < 0;
  if (model.precision == Precision::wide && !always_fused) {
    return Error{Errc::invalid_argument,
                 "fusion: unfused ops round as precision match does, so with precision wide every "
                 "MLP must be fused"};
  }
  return {};
}

}  // namespace

MutableMatrixView Session::Impl::matrix(std::byte* data, std::int64_t rows,
                                        std::int64_t cols) const noexcept {
  return {data, rows, cols, cols, impl().activations, Device{}};
}

// Calls function(begin, end) over ranges of [0, M), on the pool's threads when the work is worth
// it.
template <class Function>
void Session::Impl::for_rows(std::int64_t M, std::int64_t rows_per_task, std::int64_t work,
                             Function&& function) {
  if (work < kSerialWork || M <= rows_per_task) {
    function(std::int64_t{0}, M);
    return;
  }
  pool.for_each(ceil_div(M, rows_per_task), [&](std::int64_t task, int) {
    const std::int64_t begin = task * rows_per_task;
    function(begin, std::min(M, begin + rows_per_task));
  });
}

Status Session::Impl::allocate() {
  const ModelConfig& config = impl().config;
  const std::int64_t stated = config.context_length > 0 ? config.context_length : kDefaultMaxTokens;
  max_tokens = options.max_tokens > 0 ? options.max_tokens : std::min(stated, kDefaultMaxTokens);
  chunk = std::min(options.prefill_chunk, max_tokens);
  QMLP_TRY(allocate_cache());
  QMLP_TRY(allocate_scratch());
  QMLP_TRY(make_rotary_tables());
  tokens.reserve(static_cast<std::size_t>(max_tokens));
  return {};
}

Status Session::Impl::allocate_cache() {
  const ModelConfig& config = impl().config;
  cache.num_layers = config.num_hidden_layers;
  cache.num_kv_heads = config.num_key_value_heads;
  cache.head_dim = config.head_dim;
  cache.v_row_stride = round_up(config.head_dim, 16);
  cache.element_bytes = size_of(impl().activations);
  const auto too_large = [&]() -> Status {
    return Error{Errc::out_of_memory,
                 concat("max_tokens: a cache of ", max_tokens, " tokens is too large")};
  };
  if (max_tokens > (std::int64_t{1} << 40)) return too_large();
  const std::int64_t positions = round_up(max_tokens, cpu::kCacheBlock);
  const auto k_head = checked_mul(positions, cache.head_dim);
  const auto v_head = checked_mul(positions, cache.v_row_stride);
  if (!k_head || !v_head) return too_large();
  cache.k_head_stride = *k_head;
  cache.v_head_stride = *v_head;
  Carver sizes(nullptr);
  sizes.take(cache.num_layers * cache.num_kv_heads, *k_head + *v_head, cache.element_bytes);
  if (!sizes.total()) return too_large();
  auto data = AlignedBuffer::allocate(*sizes.total());
  if (!data) {
    return Error{data.error().code,
                 concat("KV cache of ", max_tokens, " tokens: ", data.error().message)};
  }
  cache.data = *std::move(data);
  // NaN in unused positions shows that masked keys reach nothing.
  if (options.fusion.poison_scratch) std::memset(cache.data.data(), 0xFF, cache.data.size());
  return {};
}

Status Session::Impl::allocate_scratch() {
  const Model::Impl& m = impl();
  const ModelConfig& config = m.config;
  const std::int64_t query_width = config.num_attention_heads * config.head_dim;
  const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
  for (const Model::Op& op : m.ops) {
    workspace_bytes_ = std::max(workspace_bytes_, op.plan.workspace_bytes(chunk));
  }
  for (const Plan& plan : m.part_plans) {
    workspace_bytes_ = std::max(workspace_bytes_, plan.workspace_bytes(chunk));
  }
  score_stride_ = round_up(max_tokens, cpu::kCacheBlock);
  const std::int64_t scores_per_thread =
      attention_scratch_floats(score_stride_, cache.head_dim, cache.v_row_stride);
  const FusionOptions& fusion = options.fusion;
  const bool may_be_unfused = !fusion.fused || fusion.fuse_min_m > 1 || fusion.fused_max_calls >= 0;
  const std::size_t element = size_of(m.activations);

  const auto carve = [&](std::byte* base) {
    Carver carver(base);
    Scratch s;
    s.x = carver.take(chunk, config.hidden_size, element);
    s.normed = carver.take(chunk, config.hidden_size, element);
    s.q = carver.take(chunk, query_width, element);
    s.k = carver.take(chunk, kv_width, element);
    s.v = carver.take(chunk, kv_width, element);
    s.attention = carver.take(chunk, query_width, element);
    if (may_be_unfused || options.tap_gate) {
      s.gate = carver.take(chunk, config.intermediate_size, element);
    }
    if (may_be_unfused) s.up = carver.take(chunk, config.intermediate_size, element);
    s.hidden = carver.take(chunk, config.intermediate_size, element);
    if (m.activations != DType::f32) {
      s.logits = carver.take(std::min(chunk, kHeadRows), config.vocab_size, element);
    }
    s.scores =
        reinterpret_cast<float*>(carver.take(pool.num_threads(), scores_per_thread, sizeof(float)));
    s.workspace = carver.take(1, static_cast<std::int64_t>(workspace_bytes_), 1);
    scratch_ = s;
    return carver.total();
  };
  const std::optional<std::size_t> bytes = carve(nullptr);
  if (!bytes) return Error{Errc::out_of_memory, "prefill_chunk: its buffers are too large"};
  QMLP_ASSIGN(scratch_memory_, AlignedBuffer::allocate(*bytes));
  carve(scratch_memory_.data());
  return {};
}

Status Session::Impl::make_rotary_tables() {
  const ModelConfig& config = impl().config;
  const std::int64_t half = config.rotary_dim / 2;
  const auto cells = checked_mul(max_tokens, half);
  if (!cells || *cells > (std::int64_t{1} << 40)) {
    return Error{Errc::out_of_memory, "max_tokens: its rotary tables are too large"};
  }
  cosines_.resize(static_cast<std::size_t>(*cells));
  sines_.resize(static_cast<std::size_t>(*cells));
  const RotaryFrequencies rotary = rotary_frequencies(config);
  constexpr double kMostRadians = 0x1p30;  // what pinned_sin_cos takes
  for (const double frequency : rotary.frequencies) {
    const double last = static_cast<double>(max_tokens) / rotary.divisor * frequency;
    if (last >= 0.0 && last < kMostRadians) continue;
    return Error{
        Errc::unsupported,
        concat("config.json: rope (theta, factors) turns a pair further than 2^30 radians in ",
               max_tokens, " tokens, must be less")};
  }
  for_rows(max_tokens, 64, max_tokens * half, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      rotary_row(rotary, row, cosines_.data() + row * half, sines_.data() + row * half);
    }
  });
  return {};
}

void Session::Impl::norm(const std::byte* x, const std::vector<float>& weight, std::byte* out,
                         std::int64_t rows) {
  const Model::Impl& m = impl();
  const auto cols = static_cast<std::int64_t>(weight.size());
  const cpu::RmsNormArgs args{
      static_cast<int>(m.activations),          x, weight.data(), out, cols, cols, cols,
      static_cast<float>(m.config.rms_norm_eps)};
  for_rows(rows, 8, rows * cols,
           [&](std::int64_t begin, std::int64_t end) { m.kernels->rms_norm(&args, begin, end); });
}

void Session::Impl::scale(const MutableMatrixView& x, double factor) {
  if (factor == 1.0) return;
  const Model::Impl& m = impl();
  const std::int64_t row_bytes = x.cols * static_cast<std::int64_t>(size_of(m.activations));
  for_rows(x.rows, 8, x.rows * x.cols, [&](std::int64_t begin, std::int64_t end) {
    m.kernels->scale(static_cast<int>(m.activations), x.data + begin * row_bytes,
                     (end - begin) * x.cols, static_cast<float>(factor));
  });
}

Status Session::Impl::linear(const LinearOp& op, const MatrixView& x, const MutableMatrixView& out,
                             const MatrixView& residual) {
  const Model::Op& entry = impl().ops[op.index];
  return quantized_linear(entry.plan, *entry.weight, x, out,
                          Workspace{{scratch_.workspace, workspace_bytes_}}, cpu_stream(pool),
                          LinearEpilogue{data_or_null(op.bias), residual});
}

// x += residual_scale * op(in). Without a scale the kernel adds; with one the product waits in
// `normed`, which has done its work by then.
Status Session::Impl::add_linear(const LinearOp& op, const MatrixView& in,
                                 const MutableMatrixView& x) {
  const Model::Impl& m = impl();
  const double factor = m.config.residual_scale;
  if (factor == 1.0) return linear(op, in, x, read_only(x));
  const MutableMatrixView product = matrix(scratch_.normed, x.rows, x.cols);
  QMLP_TRY(linear(op, in, product));
  const std::int64_t row_bytes = x.cols * static_cast<std::int64_t>(size_of(m.activations));
  for_rows(x.rows, 8, x.rows * x.cols, [&](std::int64_t begin, std::int64_t end) {
    m.kernels->add_scaled(static_cast<int>(m.activations), x.data + begin * row_bytes,
                          product.data + begin * row_bytes, (end - begin) * x.cols,
                          static_cast<float>(factor));
  });
  return {};
}

Status Session::Impl::run_attention(std::int64_t layer_index, std::int64_t start, std::int64_t M) {
  const Model::Impl& m = impl();
  const ModelConfig& config = m.config;
  const Layer& layer = m.layers[static_cast<std::size_t>(layer_index)];
  const LayerConfig& layer_config = config.layers[static_cast<std::size_t>(layer_index)];
  const std::int64_t query_width = config.num_attention_heads * config.head_dim;
  const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
  const MutableMatrixView x = matrix(scratch_.x, M, config.hidden_size);
  const MatrixView normed = read_only(matrix(scratch_.normed, M, config.hidden_size));

  norm(scratch_.x, layer.input_norm, scratch_.normed, M);
  QMLP_TRY(linear(layer.q, normed, matrix(scratch_.q, M, query_width)));
  QMLP_TRY(linear(layer.k, normed, matrix(scratch_.k, M, kv_width)));
  QMLP_TRY(linear(layer.v, normed, matrix(scratch_.v, M, kv_width)));
  if (config.qk_norm) {
    norm(scratch_.q, layer.q_norm, scratch_.q, M * config.num_attention_heads);
    norm(scratch_.k, layer.k_norm, scratch_.k, M * config.num_key_value_heads);
  }

  cpu::RopeArgs rope{};
  rope.type = static_cast<int>(m.activations);
  rope.interleaved = config.rope_traditional ? 1 : 0;
  rope.q = scratch_.q;
  rope.k = scratch_.k;
  rope.v = scratch_.v;
  rope.num_heads = config.num_attention_heads;
  rope.num_kv_heads = config.num_key_value_heads;
  rope.head_dim = config.head_dim;
  rope.rotary_dim = layer_config.rotary ? config.rotary_dim : 0;
  rope.cosines = cosines_.data();
  rope.sines = sines_.data();
  rope.position = start;
  rope.k_cache = cache.keys(layer_index);
  rope.v_cache = cache.values(layer_index);
  rope.k_head_stride = cache.k_head_stride;
  rope.v_head_stride = cache.v_head_stride;
  rope.v_row_stride = cache.v_row_stride;
  for_rows(M, 16, M * (query_width + 2 * kv_width), [&](std::int64_t begin, std::int64_t end) {
    m.kernels->rope_append(&rope, begin, end);
  });

  cpu::AttentionArgs attention{};
  attention.type = static_cast<int>(m.activations);
  attention.q = scratch_.q;
  attention.out = scratch_.attention;
  attention.k_cache = rope.k_cache;
  attention.v_cache = rope.v_cache;
  attention.num_heads = config.num_attention_heads;
  attention.heads_per_kv = config.num_attention_heads / config.num_key_value_heads;
  attention.head_dim = config.head_dim;
  attention.k_head_stride = cache.k_head_stride;
  attention.v_head_stride = cache.v_head_stride;
  attention.v_row_stride = cache.v_row_stride;
  attention.score_stride = score_stride_;
  attention.position = start;
  attention.window = layer_config.window;
  attention.scale = config.attention_scale > 0.0
                        ? static_cast<float>(config.attention_scale)
                        : 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  attend(*m.kernels, attention, config.num_key_value_heads, M, scratch_.scores, pool);

  QMLP_TRY(add_linear(layer.o, read_only(matrix(scratch_.attention, M, query_width)), x));
  return tap(Tap::attention_out, layer_index, start, read_only(x));
}

Status Session::Impl::run_mlp(std::int64_t layer_index, std::int64_t start, std::int64_t M) {
  const Model::Impl& m = impl();
  const ModelConfig& config = m.config;
  const Layer& layer = m.layers[static_cast<std::size_t>(layer_index)];
  const SwigluOp& op = layer.gate_up;
  const FusionOptions& fusion = options.fusion;
  const MutableMatrixView x = matrix(scratch_.x, M, config.hidden_size);
  const MatrixView normed = read_only(matrix(scratch_.normed, M, config.hidden_size));
  const MutableMatrixView gate = matrix(scratch_.gate, M, config.intermediate_size);
  const MutableMatrixView hidden = matrix(scratch_.hidden, M, config.intermediate_size);
  const Workspace workspace{{scratch_.workspace, workspace_bytes_}};
  const Stream stream = cpu_stream(pool);

  norm(scratch_.x, layer.post_attention_norm, scratch_.normed, M);
  const bool fused = fusion.fused && M >= fusion.fuse_min_m &&
                     (fusion.fused_max_calls < 0 || fused_calls_ < fusion.fused_max_calls);
  if (fused) {
    ++fused_calls_;
    const Model::Op& entry = m.ops[op.index];
    SwigluEpilogue epilogue{data_or_null(op.gate_bias), data_or_null(op.up_bias), {}};
    if (options.tap_gate) epilogue.gate_tap = gate;
    QMLP_TRY(fused_swiglu(entry.plan, *entry.weight, normed, hidden, workspace, stream, epilogue));
  } else {
    const MutableMatrixView up = matrix(scratch_.up, M, config.intermediate_size);
    QMLP_TRY(quantized_linear(m.part_plans[op.gate_plan], *op.gate, normed, gate, workspace, stream,
                              LinearEpilogue{data_or_null(op.gate_bias), {}}));
    QMLP_TRY(quantized_linear(m.part_plans[op.up_plan], *op.up, normed, up, workspace, stream,
                              LinearEpilogue{data_or_null(op.up_bias), {}}));
    QMLP_TRY(swiglu_activation(read_only(gate), read_only(up), hidden, stream));
  }
  if (options.tap_gate && options.observer) {
    options.observer(TapEvent{Tap::gate, layer_index, read_only(gate)});
  }
  QMLP_TRY(tap(Tap::swiglu, layer_index, start, read_only(hidden)));
  QMLP_TRY(add_linear(layer.down, read_only(hidden), x));
  return tap(Tap::layer_out, layer_index, start, read_only(x));
}

Status Session::Impl::run_head(std::int64_t start, std::int64_t M, std::int64_t logit_rows,
                               std::span<float> out) {
  const Model::Impl& m = impl();
  const ModelConfig& config = m.config;
  const std::int64_t first = M - logit_rows;
  const std::int64_t row_bytes =
      config.hidden_size * static_cast<std::int64_t>(size_of(m.activations));
  norm(scratch_.x + first * row_bytes, m.final_norm, scratch_.normed, logit_rows);
  QMLP_TRY(tap(Tap::final_norm, -1, start + first,
               read_only(matrix(scratch_.normed, logit_rows, config.hidden_size))));
  scale(matrix(scratch_.normed, logit_rows, config.hidden_size), config.head_input_scale);
  const bool direct = scratch_.logits == nullptr;  // f32 logits need no widening
  for (std::int64_t row = 0; row < logit_rows; row += kHeadRows) {
    const std::int64_t rows = std::min(kHeadRows, logit_rows - row);
    float* wide = out.data() + row * config.vocab_size;
    const MutableMatrixView logits = matrix(
        direct ? reinterpret_cast<std::byte*>(wide) : scratch_.logits, rows, config.vocab_size);
    QMLP_TRY(linear(m.head,
                    read_only(matrix(scratch_.normed + row * row_bytes, rows, config.hidden_size)),
                    logits));
    scale(logits, config.logits_scale);
    QMLP_TRY(tap(Tap::logits, -1, start + first + row, read_only(logits)));
    if (!direct) {
      m.kernels->widen(static_cast<int>(m.activations), scratch_.logits, wide,
                       rows * config.vocab_size);
    }
  }
  return {};
}

Status Session::Impl::run_chunk(std::span<const std::int32_t> ids, std::int64_t start,
                                std::int64_t logit_rows, std::span<float> out) {
  const Model::Impl& m = impl();
  const ModelConfig& config = m.config;
  const auto M = static_cast<std::int64_t>(ids.size());
  const std::int64_t row_bytes =
      config.hidden_size * static_cast<std::int64_t>(size_of(m.activations));
  for (std::int64_t row = 0; row < M; ++row) {
    QMLP_TRY(decode_row(*m.embedding, ids[static_cast<std::size_t>(row)],
                        matrix(scratch_.x + row * row_bytes, 1, config.hidden_size)));
  }
  scale(matrix(scratch_.x, M, config.hidden_size), config.embedding_scale);
  QMLP_TRY(tap(Tap::embedding, -1, start, read_only(matrix(scratch_.x, M, config.hidden_size))));
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    if (options.fusion.poison_scratch) {
      const std::byte* end = scratch_memory_.data() + scratch_memory_.size();
      std::memset(scratch_.normed, 0xFF, static_cast<std::size_t>(end - scratch_.normed));
    }
    QMLP_TRY(run_attention(layer, start, M));
    QMLP_TRY(run_mlp(layer, start, M));
  }
  if (logit_rows == 0) return {};
  return run_head(start, M, logit_rows, out);
}

Status Session::Impl::forward(std::span<const std::int32_t> ids, Logits logits,
                              std::span<float> out) {
  const std::int64_t vocab = impl().config.vocab_size;
  const auto count = static_cast<std::int64_t>(ids.size());
  if (count == 0) return Error{Errc::invalid_argument, "tokens: none given"};
  if (ids.size() > static_cast<std::size_t>(max_tokens - position)) {
    return Error{Errc::invalid_argument, concat("tokens: ", ids.size(), " more after ", position,
                                                " exceed the context of ", max_tokens)};
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t id = ids[static_cast<std::size_t>(i)];
    if (id < 0 || id >= vocab) {
      return Error{Errc::invalid_argument, concat("tokens: id ", id, " at index ", i,
                                                  " is outside the vocabulary of ", vocab)};
    }
  }
  const std::int64_t wanted = logits == Logits::none ? 0 : logits == Logits::last ? 1 : count;
  const auto floats = checked_mul(wanted, vocab);
  if (wanted > 0 && (!floats || static_cast<std::int64_t>(out.size()) != *floats)) {
    return Error{Errc::invalid_argument, concat("logits: out holds ", out.size(), " floats, ",
                                                wanted, " rows of ", vocab, " are asked for")};
  }
  for (std::int64_t done = 0; done < count; done += chunk) {
    const std::int64_t M = std::min(chunk, count - done);
    const std::int64_t skipped = std::max<std::int64_t>(count - wanted - done, 0);
    const std::int64_t rows = std::max<std::int64_t>(M - skipped, 0);
    const auto first = static_cast<std::size_t>(std::max<std::int64_t>(wanted - (count - done), 0));
    QMLP_TRY(run_chunk(
        ids.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(M)), position + done,
        rows,
        rows == 0 ? std::span<float>{} : out.subspan(first * static_cast<std::size_t>(vocab))));
  }
  // Only now: after an error the cache holds what it held before, at this position.
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  position += count;
  return {};
}

Status Session::Impl::tap(Tap which, std::int64_t layer, std::int64_t first_position,
                          const MatrixView& values) {
  if (options.observer) options.observer(TapEvent{which, layer, values});
  if (!options.check_finite) return {};
  const Model::Impl& m = impl();
  const std::int64_t index = m.kernels->find_non_finite(static_cast<int>(m.activations),
                                                        values.data, values.rows * values.cols);
  if (index < 0) return {};
  return non_finite_error(which, layer, first_position + index / values.cols, index % values.cols,
                          load_float(values.data, values.dtype, index));
}

Error Session::Impl::non_finite_error(Tap which, std::int64_t layer, std::int64_t token,
                                      std::int64_t feature, float value) const {
  const Model::Impl& m = impl();
  std::string text;
  if (layer >= 0) text = concat("layer ", layer, " ");
  switch (which) {
    case Tap::attention_out:
      text += "attention output";
      break;
    case Tap::swiglu:
      text += "mlp hidden (silu(gate) * up)";
      break;
    case Tap::layer_out:
      text += "mlp output";
      break;
    default:
      text += to_string(which);
      break;
  }
  text += concat(" is not finite at token ", token, ", feature ", feature, " (",
                 std::isnan(value) ? "nan"
                 : value > 0       ? "inf"
                                   : "-inf",
                 ", ", to_string(m.activations), ")");
  // A weight that is itself not finite explains it; the range of f16 does otherwise.
  const auto blame = [&](const std::string& path, const PackedWeight& weight) {
    const bool bad = packed_info(weight).non_finite;
    if (bad) text += concat("; the weight ", path, " is not finite");
    return bad;
  };
  if (which == Tap::embedding) {
    if (blame("model.embed_tokens", *m.embedding)) return Error{Errc::unsupported, text};
  } else if (layer < 0) {
    const Model::Op& head = m.ops[m.head.index];
    if (blame(head.path, *head.weight)) return Error{Errc::unsupported, text};
  } else {
    const std::string prefix = concat("model.layers.", layer, ".");
    for (const Model::Op& op : m.ops) {
      if (op.path.starts_with(prefix) && blame(op.path, *op.weight)) {
        return Error{Errc::unsupported, text};
      }
    }
  }
  if (m.activations == DType::f16) {
    text += "; f16 ends at 65504: try --activations bf16";
    if (which == Tap::swiglu && m.precision == Precision::match) {
      text += ", or --precision wide if only gate or up passes it";
    }
  }
  return Error{Errc::unsupported, text};
}

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const Model> model,
                                                 const SessionOptions& options, ThreadPool& pool) {
  if (model == nullptr) return Error{Errc::invalid_argument, "model: is null"};
  QMLP_TRY(check_options(options, model->impl()));
  auto impl = std::make_unique<Impl>(std::move(model), options, pool);
  QMLP_TRY(impl->allocate());
  return std::unique_ptr<Session>(new Session(std::move(impl)));
}

Session::Session(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Session::~Session() = default;

std::int64_t Session::position() const noexcept { return impl_->position; }
std::int64_t Session::max_tokens() const noexcept { return impl_->max_tokens; }
std::uint64_t Session::cache_bytes() const noexcept { return impl_->cache.data.size(); }
std::span<const std::int32_t> Session::tokens() const noexcept { return impl_->tokens; }

Status Session::forward(std::span<const std::int32_t> tokens, Logits logits, std::span<float> out) {
  return impl_->forward(tokens, logits, out);
}

Status Session::truncate(std::int64_t position) {
  if (position < 0 || position > impl_->position) {
    return Error{Errc::invalid_argument, concat("position: is ", position, ", must be from 0 to ",
                                                impl_->position, ", the tokens in the cache")};
  }
  impl_->position = position;
  impl_->tokens.resize(static_cast<std::size_t>(position));
  return {};
}

Status Session::save(const std::string& path) const { return impl_->save(path); }
Status Session::load(const std::string& path) { return impl_->load(path); }

}  // namespace qmlp
