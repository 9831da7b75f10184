#include "qmlp/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "base/checked.h"
#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "io/config.h"
#include "io/files.h"
#include "io/json.h"
#include "io/tensor_files.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 16'000'000;
using Location = TensorFiles::Location;

Error bad_tensor(const Location& tensor, std::string_view rest) {
  return Error{Errc::corrupt_file,
               concat(tensor.file->file().path(), ": tensor '", tensor.name, "': ", rest)};
}

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

std::string describe(const Location& tensor) {
  return concat(tensor.entry->dtype, " ", shape_to_string(tensor.entry->shape));
}

// The tensors of one linear or embedding module.
struct Module {
  const Location* weight = nullptr;
  const Location* scales = nullptr;
  const Location* biases = nullptr;
  const Location* linear_bias = nullptr;
};

std::span<const std::byte> bytes_of(const Location* tensor) {
  return tensor == nullptr ? std::span<const std::byte>() : tensor->file->data(*tensor->entry);
}
std::uint64_t size_of_tensor(const Location* tensor) {
  return tensor == nullptr ? 0 : tensor->entry->end - tensor->entry->begin;
}

}  // namespace

struct Checkpoint::Impl {
  std::string path;
  ModelConfig config;
  QuantConfig quant;
  std::vector<bool> override_used;
  TensorFiles files;
  std::vector<TensorInfo> tensors;
  std::vector<ModuleInfo> modules;
  std::vector<Module> module_tensors;  // beside modules
  std::vector<std::size_t> by_path;    // indices of modules, sorted by path
  std::unordered_set<std::string_view> used;
  std::vector<std::string> warnings;

  const Location* use(std::string_view name) {
    const Location* tensor = files.find(name);
    if (tensor != nullptr) used.insert(tensor->name);
    return tensor;
  }

  Status read_configs(QuantConfig& out);
  Result<const QuantOverride*> find_override(std::string_view module_path);
  Status add_module(const std::string& module_path, std::int64_t N, std::int64_t K, bool has_bias);
  Status check_dense(const ModuleInfo& info, const Module& module) const;
  Status check_quantized(const ModuleInfo& info, const Module& module) const;
  Status need_vector(const std::string& name, std::int64_t size);
  Status add_all_modules();
  void report_unused();
};

namespace {

Error missing_tensor(std::string_view path, std::string_view name, std::string_view why) {
  return Error{Errc::corrupt_file, concat(path, ": tensor '", name, "' is missing, ", why)};
}

}  // namespace

Status Checkpoint::Impl::read_configs(QuantConfig& out) {
  const std::string config_path = join_path(path, "config.json");
  QMLP_ASSIGN(const PathKind kind, path_kind(config_path));
  if (kind == PathKind::missing) {
    return Error{Errc::corrupt_file, concat(path, ": holds no config.json: not a model folder")};
  }
  QMLP_ASSIGN(const std::string text, read_text_file(config_path, kMaxConfigBytes));
  QMLP_ASSIGN(const Json json, Json::parse(text, config_path));

  const std::string generation_path = join_path(path, "generation_config.json");
  QMLP_ASSIGN(const PathKind generation_kind, path_kind(generation_path));
  std::optional<Json> generation;
  if (generation_kind != PathKind::missing) {
    QMLP_ASSIGN(const std::string generation_text,
                read_text_file(generation_path, kMaxConfigBytes));
    QMLP_ASSIGN(generation, Json::parse(generation_text, generation_path));
  }
  // Another quantization scheme is the more telling reason to refuse, so it is looked at first.
  QMLP_ASSIGN(out, parse_quant_config(json, config_path));
  QMLP_ASSIGN(config,
              parse_model_config(json, generation ? &*generation : nullptr, config_path, warnings));
  return {};
}

// The entry for a module: its exact path, or else a key that names it under a wrapper's prefix.
Result<const QuantOverride*> Checkpoint::Impl::find_override(std::string_view module_path) {
  const QuantOverride* found = nullptr;
  for (std::size_t i = 0; i < quant.overrides.size(); ++i) {
    const QuantOverride& candidate = quant.overrides[i];
    if (candidate.key == module_path) {
      override_used[i] = true;
      return &candidate;
    }
    if (canonical_module_path(candidate.key) != module_path) continue;
    override_used[i] = true;
    if (found != nullptr && (found->kind != candidate.kind || found->bits != candidate.bits ||
                             found->group_size != candidate.group_size)) {
      return Error{Errc::corrupt_file,
                   concat("config.json: quantization keys '", found->key, "' and '", candidate.key,
                          "' both name '", module_path, "' and differ")};
    }
    found = &candidate;
  }
  return found;
}

Status Checkpoint::Impl::check_dense(const ModuleInfo& info, const Module& module) const {
  const std::vector<std::int64_t> need{info.N, info.K};
  if (module.weight->entry->shape == need) return {};
  return bad_tensor(*module.weight, concat("is ", describe(*module.weight), ", config.json needs ",
                                           shape_to_string(need)));
}

Status Checkpoint::Impl::check_quantized(const ModuleInfo& info, const Module& module) const {
  const std::int64_t N = info.N;
  const std::int64_t K = info.K;
  const QuantSpec& spec = info.spec;
  const std::string rule =
      concat(spec.bits, " bits, group ", spec.group_size, " (", info.spec_source, ")");
  if (K % spec.group_size != 0) {
    return bad_tensor(*module.weight,
                      concat("its K ", K, " is no multiple of the group in ", rule));
  }
  const std::vector<std::int64_t> need_weight{N, K / 32 * spec.bits};
  const std::vector<std::int64_t> need_scales{N, K / spec.group_size};
  const auto& weight_shape = module.weight->entry->shape;
  const auto& scales_shape = module.scales->entry->shape;
  if (weight_shape != need_weight || scales_shape != need_scales) {
    const bool weight_wrong = weight_shape != need_weight;
    const Location& wrong = weight_wrong ? *module.weight : *module.scales;
    std::string hint;
    if (weight_shape.size() == 2 && scales_shape.size() == 2 && weight_shape[0] == N &&
        scales_shape[0] == N && scales_shape[1] > 0 && K % scales_shape[1] == 0 && K % 32 == 0 &&
        weight_shape[1] % (K / 32) == 0) {
      hint = concat("; the shapes fit ", weight_shape[1] / (K / 32), " bits, group ",
                    K / scales_shape[1]);
    }
    return bad_tensor(wrong,
                      concat("is ", describe(wrong), ", [", N, ", ", K, "] at ", rule, " needs ",
                             shape_to_string(weight_wrong ? need_weight : need_scales), hint));
  }
  if (module.biases->entry->shape != scales_shape ||
      module.biases->entry->dtype != module.scales->entry->dtype) {
    return bad_tensor(*module.biases, concat("is ", describe(*module.biases), ", its scales are ",
                                             describe(*module.scales)));
  }
  return {};
}

Status Checkpoint::Impl::add_module(const std::string& module_path, std::int64_t N, std::int64_t K,
                                    bool has_bias) {
  Module module;
  module.weight = use(concat(module_path, ".weight"));
  if (module.weight == nullptr) {
    return missing_tensor(path, concat(module_path, ".weight"), "config.json needs it");
  }
  module.scales = use(concat(module_path, ".scales"));
  module.biases = use(concat(module_path, ".biases"));
  module.linear_bias = use(concat(module_path, ".bias"));
  QMLP_ASSIGN(const QuantOverride* const entry, find_override(module_path));

  ModuleInfo info;
  info.path = module_path;
  info.N = N;
  info.K = K;
  info.has_linear_bias = has_bias;
  bool quantized = module.scales != nullptr;
  info.spec_source = quantized ? "config quantization" : "unquantized";
  if (entry != nullptr) {
    quantized = entry->kind != QuantOverride::Kind::unquantized;
    info.spec_source = concat("config quantization.", entry->key);
    if (entry->key != module_path) {
      warnings.push_back(concat("config.json: quantization key '", entry->key, "' is taken for '",
                                module_path, "'"));
    }
  }
  if (!quantized) {
    for (const Location* extra : {module.scales, module.biases}) {
      if (extra != nullptr) {
        return bad_tensor(*extra, entry != nullptr
                                      ? concat("is there, but config.json says that '", entry->key,
                                               "' is not quantized")
                                      : concat("is there without ", module_path, ".scales"));
      }
    }
    const auto dtype = float_dtype(module.weight->entry->dtype);
    if (!dtype) {
      return bad_tensor(*module.weight,
                        concat("is ", describe(*module.weight),
                               module.weight->entry->dtype == "U32"
                                   ? concat(", but ", module_path, ".scales is missing")
                                   : concat(", needs F32, F16 or BF16")));
    }
    info.spec = QuantSpec::dense(*dtype);
    QMLP_TRY(check_dense(info, module));
  } else {
    if (!quant.present) {
      return bad_tensor(*module.scales,
                        "is there, but config.json has no quantization entry (bits, group_size)");
    }
    for (const auto& [tensor, suffix] :
         {std::pair(module.scales, ".scales"), std::pair(module.biases, ".biases")}) {
      if (tensor == nullptr) {
        return missing_tensor(path, concat(module_path, suffix),
                              concat(info.spec_source, " says affine"));
      }
    }
    if (module.weight->entry->dtype != "U32") {
      return bad_tensor(*module.weight,
                        concat("is ", describe(*module.weight), ", packed codes need U32"));
    }
    const auto dtype = float_dtype(module.scales->entry->dtype);
    if (!dtype) {
      return bad_tensor(*module.scales,
                        concat("is ", describe(*module.scales), ", needs F32, F16 or BF16"));
    }
    info.spec = {entry != nullptr ? entry->bits : quant.bits,
                 entry != nullptr ? entry->group_size : quant.group_size, *dtype};
    QMLP_TRY(check_quantized(info, module));
  }

  if (has_bias) {
    QMLP_TRY(need_vector(concat(module_path, ".bias"), N));
  } else if (module.linear_bias != nullptr) {
    return bad_tensor(*module.linear_bias,
                      "is there, but config.json says that this layer has no bias "
                      "(attention_bias, mlp_bias)");
  }
  for (const Location* tensor : {module.weight, module.scales, module.biases, module.linear_bias}) {
    info.bytes += size_of_tensor(tensor);
  }
  modules.push_back(std::move(info));
  module_tensors.push_back(module);
  return {};
}

Status Checkpoint::Impl::need_vector(const std::string& name, std::int64_t size) {
  const Location* tensor = use(name);
  if (tensor == nullptr) return missing_tensor(path, name, "config.json needs it");
  if (!float_dtype(tensor->entry->dtype) ||
      tensor->entry->shape != std::vector<std::int64_t>{size}) {
    return bad_tensor(*tensor,
                      concat("is ", describe(*tensor), ", needs F32, F16 or BF16 [", size, "]"));
  }
  return {};
}

Status Checkpoint::Impl::add_all_modules() {
  const std::int64_t hidden = config.hidden_size;
  const std::int64_t inner = config.intermediate_size;
  const std::int64_t q_width = config.num_attention_heads * config.head_dim;
  const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
  QMLP_TRY(add_module("model.embed_tokens", config.vocab_size, hidden, false));
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string layer = concat("model.layers.", i, ".");
    const std::string attention = concat(layer, "self_attn.");
    const std::string mlp = concat(layer, "mlp.");
    QMLP_TRY(need_vector(concat(layer, "input_layernorm.weight"), hidden));
    QMLP_TRY(add_module(concat(attention, "q_proj"), q_width, hidden, config.attention_bias));
    QMLP_TRY(add_module(concat(attention, "k_proj"), kv_width, hidden, config.attention_bias));
    QMLP_TRY(add_module(concat(attention, "v_proj"), kv_width, hidden, config.attention_bias));
    QMLP_TRY(add_module(concat(attention, "o_proj"), hidden, q_width, config.attention_bias));
    QMLP_TRY(need_vector(concat(layer, "post_attention_layernorm.weight"), hidden));
    QMLP_TRY(add_module(concat(mlp, "gate_proj"), inner, hidden, config.mlp_bias));
    QMLP_TRY(add_module(concat(mlp, "up_proj"), inner, hidden, config.mlp_bias));
    QMLP_TRY(add_module(concat(mlp, "down_proj"), hidden, inner, config.mlp_bias));
  }
  QMLP_TRY(need_vector("model.norm.weight", hidden));
  if (!config.tie_word_embeddings) {
    QMLP_TRY(add_module("lm_head", config.vocab_size, hidden, false));
  }
  by_path.resize(modules.size());
  for (std::size_t i = 0; i < by_path.size(); ++i) by_path[i] = i;
  std::sort(by_path.begin(), by_path.end(),
            [this](std::size_t a, std::size_t b) { return modules[a].path < modules[b].path; });
  return {};
}

void Checkpoint::Impl::report_unused() {
  if (config.tie_word_embeddings) {
    bool present = false;
    bool equal = true;
    for (const char* suffix : {".weight", ".scales", ".biases"}) {
      const Location* head = use(concat("lm_head", suffix));
      const Location* embedding = files.find(concat("model.embed_tokens", suffix));
      present = present || head != nullptr;
      if (head == nullptr && embedding == nullptr) continue;
      const auto a = bytes_of(head);
      const auto b = bytes_of(embedding);
      equal = equal && head != nullptr && embedding != nullptr &&
              describe(*head) == describe(*embedding) && a.size() == b.size() &&
              std::memcmp(a.data(), b.data(), a.size()) == 0;
    }
    if (present) {
      warnings.push_back(concat("lm_head is ignored, since tie_word_embeddings is true; it ",
                                equal ? "equals" : "DIFFERS from", " the embedding"));
    }
  }
  constexpr std::size_t kNamed = 5;
  std::size_t count = 0;
  std::string names;
  for (const Location& tensor : files.tensors()) {
    if (used.count(tensor.name) != 0 || ends_with(tensor.name, "rotary_emb.inv_freq")) continue;
    if (++count <= kNamed) names += concat(count == 1 ? "" : ", ", tensor.name);
  }
  if (count > kNamed) names += concat(" and ", count - kNamed, " more");
  if (count != 0) warnings.push_back(concat("unused tensors: ", names));
  for (std::size_t i = 0; i < quant.overrides.size(); ++i) {
    if (override_used[i]) continue;
    warnings.push_back(
        concat("config.json: quantization key '", quant.overrides[i].key, "' matches no module"));
  }
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<const Checkpoint>> Checkpoint::open(const std::string& path,
                                                           const CheckpointOptions& options) {
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  if (kind == PathKind::missing) return Error{Errc::io, concat(path, ": does not exist")};
  if (kind != PathKind::directory) {
    const bool gguf = ends_with(path, ".gguf");
    return Error{
        gguf ? Errc::unsupported : Errc::invalid_argument,
        concat(path, gguf ? ": is a GGUF file: convert it first (qmlp convert)"
                          : ": is not a folder; a model folder with config.json is needed")};
  }
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  QMLP_TRY(impl->read_configs(impl->quant));
  impl->override_used.resize(impl->quant.overrides.size());
  QMLP_ASSIGN(impl->files, TensorFiles::open(path, options.use_mmap, impl->warnings));
  for (const Location& tensor : impl->files.tensors()) {
    impl->tensors.push_back({std::string(tensor.name),
                             std::string(base_name(tensor.file->file().path())),
                             tensor.entry->dtype, tensor.entry->shape, size_of_tensor(&tensor)});
  }
  QMLP_TRY(impl->add_all_modules());
  impl->report_unused();
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(impl)));
}

const std::string& Checkpoint::path() const noexcept { return impl_->path; }
const ModelConfig& Checkpoint::config() const noexcept { return impl_->config; }
const std::vector<TensorInfo>& Checkpoint::tensors() const noexcept { return impl_->tensors; }
const std::vector<ModuleInfo>& Checkpoint::modules() const noexcept { return impl_->modules; }
const std::vector<std::string>& Checkpoint::warnings() const noexcept { return impl_->warnings; }
std::uint64_t Checkpoint::file_bytes() const noexcept { return impl_->files.file_bytes(); }
bool Checkpoint::mapped() const noexcept { return impl_->files.mapped(); }

const ModuleInfo* Checkpoint::find_module(std::string_view module_path) const noexcept {
  const auto& order = impl_->by_path;
  const auto at = std::lower_bound(
      order.begin(), order.end(), module_path,
      [this](std::size_t index, std::string_view key) { return impl_->modules[index].path < key; });
  if (at == order.end() || impl_->modules[*at].path != module_path) return nullptr;
  return &impl_->modules[*at];
}

Result<QuantizedTensorView> Checkpoint::weight(std::string_view module_path) const {
  const ModuleInfo* info = find_module(module_path);
  if (info == nullptr) {
    return Error{Errc::invalid_argument, concat("no module '", module_path, "' in ", path())};
  }
  const Module& module =
      impl_->module_tensors[static_cast<std::size_t>(info - impl_->modules.data())];
  QuantizedTensorView view{bytes_of(module.weight),
                           bytes_of(module.scales),
                           bytes_of(module.biases),
                           info->N,
                           info->K,
                           info->spec};
  QMLP_TRY(validate(view));
  return view;
}

Result<std::vector<float>> Checkpoint::float_tensor(std::string_view name) const {
  const Location* tensor = impl_->files.find(name);
  if (tensor == nullptr) {
    return Error{Errc::invalid_argument, concat("no tensor '", name, "' in ", path())};
  }
  const auto dtype = float_dtype(tensor->entry->dtype);
  if (!dtype) {
    return Error{Errc::unsupported,
                 concat("tensor '", name, "': is ", describe(*tensor), ", needs F32, F16 or BF16")};
  }
  const auto bytes = bytes_of(tensor);
  std::vector<float> out(bytes.size() / size_of(*dtype));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = load_float(bytes.data(), *dtype, static_cast<std::int64_t>(i));
  }
  return out;
}

void Checkpoint::release(std::string_view module_path) const noexcept {
  const ModuleInfo* info = find_module(module_path);
  if (info == nullptr) return;
  const Module& module =
      impl_->module_tensors[static_cast<std::size_t>(info - impl_->modules.data())];
  for (const Location* tensor : {module.weight, module.scales, module.biases}) {
    if (tensor == nullptr) continue;
    tensor->file->file().release(tensor->entry->begin, tensor->entry->end - tensor->entry->begin);
  }
}

}  // namespace qmlp
