#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "model/hash.h"
#include "model/kernels.h"
#include "model/model_impl.h"
#include "model/rope.h"

namespace qmlp {
namespace {

// Part of a cache file's fingerprint: changes whenever the forward's bits do.
constexpr std::uint64_t kForwardVersion = 1;

Error with_context(std::string_view what, const Error& error) {
  return Error{error.code, concat(what, ": ", error.message)};
}

Result<DeviceFacts> choose_facts(const ModelOptions& options, const ThreadPool& pool) {
  DeviceFacts facts = host_facts();
  facts.num_threads = pool.num_threads();
  if (options.force_isa.empty()) return facts;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    if (options.force_isa != to_string(isa)) continue;
    const bool usable =
        isa == Isa::portable || isa == facts.isa || (isa == Isa::avx2 && facts.isa == Isa::avx512);
    if (!usable) {
      return Error{Errc::unsupported,
                   concat("isa: ", options.force_isa, " is not on this machine, which has ",
                          to_string(facts.isa))};
    }
    facts.isa = isa;
    return facts;
  }
  return Error{Errc::invalid_argument,
               concat("isa: is '", options.force_isa, "', must be portable, avx2, avx512 or neon")};
}

Status check_config(const ModelConfig& config) {
  const auto refuse = [](const char* field, std::int64_t have, std::string_view need) -> Status {
    return Error{Errc::unsupported,
                 concat("config.json: ", field, " is ", have, ", must be ", need)};
  };
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_hidden_layers", config.num_hidden_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.num_key_value_heads},
      {"head_dim", config.head_dim},
      {"vocab_size", config.vocab_size},
  };
  for (const auto& [field, value] : sizes) {
    if (value < 1 || value > (std::int64_t{1} << 24)) return refuse(field, value, "from 1 to 2^24");
  }
  if (config.rotary_dim < 2 || config.rotary_dim % 2 != 0 || config.rotary_dim > config.head_dim) {
    return refuse("rotary_dim", config.rotary_dim, "even, from 2 to head_dim");
  }
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return refuse("num_attention_heads", config.num_attention_heads,
                  concat("a multiple of num_key_value_heads, ", config.num_key_value_heads));
  }
  if (!(config.rope_theta > 1.0) || !std::isfinite(config.rope_theta) ||
      !(config.rope_factor > 0.0) || !std::isfinite(config.rope_factor)) {
    return Error{Errc::unsupported,
                 "config.json: rope_theta must be above 1 and rope factor above 0"};
  }
  const std::pair<const char*, double> scales[] = {
      {"embedding", config.embedding_scale},
      {"residual", config.residual_scale},
      {"head input", config.head_input_scale},
      {"logits", config.logits_scale},
  };
  for (const auto& [name, value] : scales) {
    if (!(value > 0.0) || !std::isfinite(static_cast<float>(value))) {
      return Error{Errc::unsupported,
                   concat("config.json: the scale of the ", name, " must be above 0 and fit f32")};
    }
  }
  const RotaryFrequencies rotary = rotary_frequencies(config);
  bool finite = std::isfinite(rotary.scale);
  for (const double frequency : rotary.frequencies) finite = finite && std::isfinite(frequency);
  if (!finite) {
    return Error{Errc::unsupported,
                 concat("config.json: rope ", to_string(config.rope_kind),
                        " (theta, factors) gives a frequency that is not finite")};
  }
  return {};
}

// Loads a model's modules one by one, in execution order.
class Loader {
 public:
  Loader(const Checkpoint& checkpoint, const ModelOptions& options, ThreadPool& pool,
         Model::Impl& model)
      : checkpoint_(checkpoint), options_(options), pool_(pool), model_(model) {}

  Status load_all() {
    const ModelConfig& config = model_.config;
    const std::int64_t query_width = config.num_attention_heads * config.head_dim;
    const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
    total_ = 7 * config.num_hidden_layers + (config.tie_word_embeddings ? 1 : 2);
    hash_config();

    // The tied head is the embedding: one packed weight serves both.
    const std::string embedding = "model.embed_tokens";
    LinearOp tied_head;
    QMLP_ASSIGN(Model::Op op, make_linear(embedding, config.vocab_size, config.hidden_size));
    model_.embedding = op.weight;

    model_.layers.resize(static_cast<std::size_t>(config.num_hidden_layers));
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      Layer& layer = model_.layers[i];
      const std::string path = concat("model.layers.", i);
      const std::string attention = path + ".self_attn.";
      QMLP_TRY(load_norm(path + ".input_layernorm.weight", layer.input_norm));
      QMLP_TRY(load_linear(attention + "q_proj", query_width, config.hidden_size, layer.q));
      QMLP_TRY(load_linear(attention + "k_proj", kv_width, config.hidden_size, layer.k));
      QMLP_TRY(load_linear(attention + "v_proj", kv_width, config.hidden_size, layer.v));
      if (config.qk_norm) {
        QMLP_TRY(load_floats(attention + "q_norm.weight", config.head_dim, layer.q_norm));
        QMLP_TRY(load_floats(attention + "k_norm.weight", config.head_dim, layer.k_norm));
      }
      QMLP_TRY(load_linear(attention + "o_proj", config.hidden_size, query_width, layer.o));
      QMLP_TRY(load_norm(path + ".post_attention_layernorm.weight", layer.post_attention_norm));
      QMLP_TRY(load_swiglu(path + ".mlp", layer.gate_up));
      QMLP_TRY(load_linear(path + ".mlp.down_proj", config.hidden_size, config.intermediate_size,
                           layer.down));
    }
    QMLP_TRY(load_norm("model.norm.weight", model_.final_norm));
    if (config.tie_word_embeddings) {
      QMLP_TRY(add_linear(std::move(op), tied_head));
      model_.head = std::move(tied_head);
    } else {
      QMLP_TRY(load_linear("lm_head", config.vocab_size, config.hidden_size, model_.head));
    }
    model_.fingerprint = hash_.value();
    return {};
  }

 private:
  Stream stream() const noexcept { return cpu_stream(pool_); }

  void hash_config() {
    const ModelConfig& c = model_.config;
    hash_.mix(kForwardVersion);
    for (const std::int64_t value : {c.hidden_size, c.intermediate_size, c.num_hidden_layers,
                                     c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                                     c.vocab_size, static_cast<std::int64_t>(model_.activations),
                                     static_cast<std::int64_t>(model_.precision),
                                     static_cast<std::int64_t>(c.rope_traditional), c.rotary_dim}) {
      hash_.mix(static_cast<std::uint64_t>(value));
    }
    for (const LayerConfig& layer : c.layers) {
      hash_.mix(layer.rotary ? 1 : 0);
      hash_.mix(static_cast<std::uint64_t>(layer.window));
    }
    hash_.mix(c.qk_norm ? 1 : 0);
    hash_doubles({c.rms_norm_eps, c.embedding_scale, c.attention_scale, c.residual_scale,
                  c.head_input_scale, c.logits_scale});
    const RotaryFrequencies rotary = rotary_frequencies(c);
    hash_doubles(rotary.frequencies);
    hash_doubles({rotary.divisor, rotary.scale});
  }

  void hash_doubles(const std::vector<double>& values) {
    hash_.update(values.data(), values.size() * sizeof(double));
  }

  // A sample of a weight: enough to tell two models of one shape apart, cheap for any size.
  void hash_weight(const QuantizedTensorView& view) {
    hash_.mix(static_cast<std::uint64_t>(view.spec.bits));
    hash_.mix(static_cast<std::uint64_t>(view.spec.group_size));
    hash_.mix(static_cast<std::uint64_t>(view.spec.scale_dtype));
    constexpr std::size_t kPieces = 16;
    constexpr std::size_t kPieceBytes = 128;
    for (const auto bytes : {view.codes, view.scales, view.biases}) {
      hash_.mix(bytes.size());
      if (bytes.size() <= kPieces * kPieceBytes) {
        hash_.update(bytes.data(), bytes.size());
        continue;
      }
      for (std::size_t i = 0; i < kPieces; ++i) {
        const std::size_t start = (bytes.size() - kPieceBytes) / (kPieces - 1) * i;
        hash_.update(bytes.data() + start, kPieceBytes);
      }
    }
  }

  void hash_plan(const Plan& plan) {
    hash_.mix(static_cast<std::uint64_t>(plan.accumulation()));
    hash_.mix(static_cast<std::uint64_t>(plan.segments()));
  }

  void report(std::string_view path) {
    ++done_;
    if (options_.progress) options_.progress(path, done_, total_);
  }

  // Values of the stored type, rounded once to the activation type.
  Status load_floats(const std::string& name, std::int64_t count, std::vector<float>& out) {
    return round_floats(name, checkpoint_.float_tensor(name), count, out);
  }
  Status round_floats(const std::string& name, Result<std::vector<float>> values,
                      std::int64_t count, std::vector<float>& out) {
    if (!values) return values.error();
    if (static_cast<std::int64_t>(values->size()) != count) {
      return Error{Errc::corrupt_file,
                   concat(name, ": holds ", values->size(), " values, the model needs ", count)};
    }
    for (std::size_t i = 0; i < values->size(); ++i) {
      (*values)[i] = round_to((*values)[i], model_.activations);
      if (!std::isfinite((*values)[i])) {
        return Error{Errc::unsupported, concat(name, ": value ", i, " is not finite in ",
                                               to_string(model_.activations))};
      }
    }
    out = *std::move(values);
    hash_.update(out.data(), out.size() * sizeof(float));
    return {};
  }

  Status load_norm(const std::string& name, std::vector<float>& out) {
    return load_floats(name, model_.config.hidden_size, out);
  }

  // The module's linear bias; empty when it has none.
  Status load_bias(const std::string& path, std::int64_t N, std::vector<float>& out) {
    const ModuleInfo* module = checkpoint_.find_module(path);
    if (module == nullptr || !module->has_linear_bias) return {};
    return round_floats(path + ".bias", checkpoint_.linear_bias(path), N, out);
  }

  std::vector<std::byte> narrow(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * size_of(model_.activations));
    for (std::size_t i = 0; i < values.size(); ++i) {
      store_float(bytes.data(), model_.activations, static_cast<std::int64_t>(i), values[i]);
    }
    return bytes;
  }

  Result<QuantizedTensorView> find_weight(const std::string& path, std::int64_t N,
                                          std::int64_t K) const {
    auto view = checkpoint_.weight(path);
    if (!view) return view.error();
    if (view->N != N || view->K != K) {
      return Error{Errc::corrupt_file, concat(path, ": is ", view->N, " x ", view->K,
                                              ", the model needs ", N, " x ", K)};
    }
    return view;
  }

  Result<Plan> linear_plan(const std::string& path, std::int64_t N, std::int64_t K,
                           const QuantSpec& spec) {
    for (const auto& [problem, plan] : linear_plans_) {
      if (problem.N == N && problem.K == K && problem.weight == spec) return plan;
    }
    LinearProblem problem;
    problem.M_max = kMaxPrefillChunk;
    problem.N = N;
    problem.K = K;
    problem.weight = spec;
    problem.activation = model_.activations;
    problem.accumulation = options_.accumulation;
    problem.segments = options_.segments;
    auto plan = make_plan(problem, model_.facts);
    if (!plan) return with_context(path, plan.error());
    linear_plans_.emplace_back(problem, *plan);
    return plan;
  }

  Result<Plan> swiglu_plan(const std::string& path, const QuantSpec& gate, const QuantSpec& up) {
    for (const auto& [problem, plan] : swiglu_plans_) {
      if (problem.gate == gate && problem.up == up) return plan;
    }
    SwigluProblem problem;
    problem.M_max = kMaxPrefillChunk;
    problem.hidden = model_.config.hidden_size;
    problem.intermediate = model_.config.intermediate_size;
    problem.gate = gate;
    problem.up = up;
    problem.activation = model_.activations;
    problem.precision = options_.precision;
    problem.accumulation = options_.accumulation;
    problem.segments = options_.segments;
    auto plan = make_plan(problem, model_.facts);
    if (!plan) return with_context(path, plan.error());
    swiglu_plans_.emplace_back(problem, *plan);
    return plan;
  }

  Result<Model::Op> make_linear(const std::string& path, std::int64_t N, std::int64_t K) {
    QMLP_ASSIGN(const QuantizedTensorView view, find_weight(path, N, K));
    QMLP_ASSIGN(Plan plan, linear_plan(path, N, K, view.spec));
    hash_weight(view);
    hash_plan(plan);
    Model::Op op{path, false, plan, nullptr, {}};
    QMLP_TRY(load_bias(path, N, op.linear_bias));
    auto packed = pack(plan, view, stream());
    if (!packed) return with_context(path, packed.error());
    checkpoint_.release(path);
    op.weight = *std::move(packed);
    model_.packed_bytes += packed_info(*op.weight).bytes;
    report(path);
    return op;
  }

  Status add_linear(Model::Op op, LinearOp& out) {
    out.bias = narrow(op.linear_bias);
    out.index = model_.ops.size();
    model_.ops.push_back(std::move(op));
    return {};
  }

  Status load_linear(const std::string& path, std::int64_t N, std::int64_t K, LinearOp& out) {
    QMLP_ASSIGN(Model::Op op, make_linear(path, N, K));
    return add_linear(std::move(op), out);
  }

  Status load_swiglu(const std::string& path, SwigluOp& out) {
    const std::int64_t N = model_.config.intermediate_size;
    const std::int64_t K = model_.config.hidden_size;
    const std::string gate_path = path + ".gate_proj";
    const std::string up_path = path + ".up_proj";
    QMLP_ASSIGN(const QuantizedTensorView gate, find_weight(gate_path, N, K));
    QMLP_ASSIGN(const QuantizedTensorView up, find_weight(up_path, N, K));
    QMLP_ASSIGN(Plan plan, swiglu_plan(path, gate.spec, up.spec));
    hash_weight(gate);
    hash_weight(up);
    hash_plan(plan);
    std::vector<float> gate_bias;
    std::vector<float> up_bias;
    QMLP_TRY(load_bias(gate_path, N, gate_bias));
    QMLP_TRY(load_bias(up_path, N, up_bias));
    out.gate_bias = narrow(gate_bias);
    out.up_bias = narrow(up_bias);

    auto packed = pack(plan, gate, up, stream());
    if (!packed) return with_context(path, packed.error());
    checkpoint_.release(gate_path);
    checkpoint_.release(up_path);
    // The op lists gate's bias, then up's; a missing one of the two counts as zeros there.
    Model::Op op{path, true, plan, *std::move(packed), {}};
    if (!gate_bias.empty() || !up_bias.empty()) {
      gate_bias.resize(static_cast<std::size_t>(N));
      up_bias.resize(static_cast<std::size_t>(N));
      op.linear_bias = std::move(gate_bias);
      op.linear_bias.insert(op.linear_bias.end(), up_bias.begin(), up_bias.end());
    }
    model_.packed_bytes += packed_info(*op.weight).bytes;

    QMLP_ASSIGN(out.gate, part(op.weight, 0));
    QMLP_ASSIGN(out.up, part(op.weight, 1));
    QMLP_ASSIGN(out.gate_plan, part_plan(gate_path, gate.spec));
    QMLP_ASSIGN(out.up_plan, part_plan(up_path, up.spec));
    out.index = model_.ops.size();
    model_.ops.push_back(std::move(op));
    report(gate_path);
    report(up_path);
    return {};
  }

  Result<std::size_t> part_plan(const std::string& path, const QuantSpec& spec) {
    for (const auto& [known, index] : part_specs_) {
      if (known == spec) return index;
    }
    QMLP_ASSIGN(Plan plan, linear_plan(path, model_.config.intermediate_size,
                                       model_.config.hidden_size, spec));
    part_specs_.emplace_back(spec, model_.part_plans.size());
    model_.part_plans.push_back(std::move(plan));
    return model_.part_plans.size() - 1;
  }

  const Checkpoint& checkpoint_;
  const ModelOptions& options_;
  ThreadPool& pool_;
  Model::Impl& model_;
  Hash64 hash_;
  std::vector<std::pair<LinearProblem, Plan>> linear_plans_;
  std::vector<std::pair<SwigluProblem, Plan>> swiglu_plans_;
  std::vector<std::pair<QuantSpec, std::size_t>> part_specs_;
  std::int64_t done_ = 0;
  std::int64_t total_ = 0;
};

}  // namespace

const char* to_string(Tap tap) noexcept {
  switch (tap) {
    case Tap::embedding:
      return "embedding";
    case Tap::attention_out:
      return "attention_out";
    case Tap::gate:
      return "gate";
    case Tap::swiglu:
      return "swiglu";
    case Tap::layer_out:
      return "layer_out";
    case Tap::final_norm:
      return "final_norm";
    case Tap::logits:
      return "logits";
  }
  return "unknown";
}

Result<std::shared_ptr<const Model>> Model::load(
    const std::shared_ptr<const Checkpoint>& checkpoint, const ModelOptions& options,
    ThreadPool& pool) {
  if (checkpoint == nullptr) return Error{Errc::invalid_argument, "checkpoint: is null"};
  auto impl = std::make_unique<Impl>();
  impl->config = checkpoint->config();
  QMLP_TRY(check_config(impl->config));
  QMLP_ASSIGN(impl->facts, choose_facts(options, pool));
  impl->kernels = find_model_kernels(impl->facts.isa);
  if (impl->kernels == nullptr) {
    return Error{Errc::unsupported,
                 concat("isa: this build holds no forward for ", to_string(impl->facts.isa))};
  }
  const ModuleInfo* embedding = checkpoint->find_module("model.embed_tokens");
  if (embedding == nullptr) {
    return Error{Errc::corrupt_file, "model.embed_tokens: is missing from the checkpoint"};
  }
  impl->activations = options.activations.value_or(embedding->spec.scale_dtype);
  impl->precision = options.precision;
  QMLP_TRY(Loader(*checkpoint, options, pool, *impl).load_all());
  return std::shared_ptr<const Model>(new Model(std::move(impl)));
}

Model::Model(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Model::~Model() = default;

const ModelConfig& Model::config() const noexcept { return impl_->config; }
DType Model::activations() const noexcept { return impl_->activations; }
std::uint64_t Model::packed_bytes() const noexcept { return impl_->packed_bytes; }
const std::vector<Model::Op>& Model::ops() const noexcept { return impl_->ops; }

}  // namespace qmlp
