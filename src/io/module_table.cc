#include "io/module_table.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/concat.h"
#include "base/try.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

using Location = TensorFiles::Location;
constexpr std::size_t kNamed = 5;  // names that a warning lists at most

Error bad_tensor(const Location& tensor, std::string_view rest) {
  return Error{Errc::corrupt_file,
               concat(tensor.file->file().path(), ": tensor '", tensor.name, "': ", rest)};
}

// Names for a warning: "a, b and 3 more".
struct NameList {
  std::size_t count = 0;
  std::string text;
  void add(std::string_view name) {
    if (++count <= kNamed) text += concat(count == 1 ? "" : ", ", name);
  }
  std::string all() const {
    return count > kNamed ? concat(text, " and ", count - kNamed, " more") : text;
  }
};

bool is_rotary_table(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

// What the shapes of a quantized module say its format is, K being known. They leave one answer:
// the scales give the group, the codes then the bits.
std::optional<std::pair<int, int>> format_of_shapes(const ModuleInfo& info,
                                                    const ModuleTensors& module) {
  const auto& weight = module.weight->entry->shape;
  const auto& scales = module.scales->entry->shape;
  if (weight.size() != 2 || scales.size() != 2 || weight[0] != info.N || scales[0] != info.N ||
      scales[1] <= 0 || info.K % scales[1] != 0 || info.K % 32 != 0 ||
      weight[1] % (info.K / 32) != 0) {
    return std::nullopt;
  }
  const std::int64_t bits = weight[1] / (info.K / 32);
  const std::int64_t group = info.K / scales[1];
  const QuantSpec spec{static_cast<int>(std::min<std::int64_t>(bits, 99)),
                       static_cast<int>(std::min<std::int64_t>(group, 9999)), DType::bf16};
  if (!validate(spec)) return std::nullopt;
  return std::pair(spec.bits, spec.group_size);
}

}  // namespace

std::string describe(const Location& tensor) {
  return concat(tensor.entry->dtype, " ", shape_to_string(tensor.entry->shape));
}
std::span<const std::byte> bytes_of(const Location* tensor) {
  return tensor == nullptr ? std::span<const std::byte>() : tensor->file->data(*tensor->entry);
}
std::uint64_t size_of_tensor(const Location* tensor) {
  return tensor == nullptr ? 0 : tensor->entry->end - tensor->entry->begin;
}

class ModuleTable::Builder {
 public:
  Builder(const std::string& folder, const QuantConfig& quant, const TensorFiles& files,
          ModelConfig& config, std::vector<std::string>& warnings, ModuleTable& table)
      : folder_(folder),
        quant_(quant),
        files_(files),
        config_(config),
        warnings_(warnings),
        table_(table),
        override_used_(quant.overrides.size()) {}

  Status add_all();
  Status report_unused();

 private:
  struct Part {
    std::string_view name;
    std::int64_t N = 0;
  };

  const Location* use(std::string_view name) {
    const Location* tensor = files_.find(name);
    if (tensor != nullptr) used_.insert(tensor->name);
    return tensor;
  }
  bool holds(std::string_view module) const {
    return files_.find(concat(module, ".weight")) != nullptr;
  }
  Error missing(std::string_view name, std::string_view why) const {
    return Error{Errc::corrupt_file, concat(folder_, ": tensor '", name, "' is missing, ", why)};
  }

  Result<const QuantOverride*> find_override(std::string_view path);
  Status set_dense(const ModuleTensors& module, const QuantOverride* entry, ModuleInfo& info);
  Status set_quantized(const ModuleTensors& module, const QuantOverride* entry, ModuleInfo& info);
  Status check_quantized(const ModuleInfo& info, const ModuleTensors& module) const;
  Status add_stored(const std::string& path, std::int64_t N, std::int64_t K, bool has_bias);
  Status add_module(const std::string& path, std::int64_t N, std::int64_t K, bool has_bias);
  Status add_projections(const std::string& prefix, std::string_view stacked_name,
                         std::span<const Part> parts, std::int64_t K, bool has_bias);
  Status need_vector(const std::string& name, std::int64_t size);
  Status add_layer(std::int64_t index);
  Status add_head();
  void warn_of_unused_head();

  const std::string& folder_;
  const QuantConfig& quant_;
  const TensorFiles& files_;
  ModelConfig& config_;
  std::vector<std::string>& warnings_;
  ModuleTable& table_;
  std::vector<bool> override_used_;
  std::unordered_set<std::string_view> used_;
  NameList by_shape_;
  bool stacked_ = false;
};

// The entry for a module: its exact path, or else a key that names it under a wrapper's prefix.
Result<const QuantOverride*> ModuleTable::Builder::find_override(std::string_view path) {
  const QuantOverride* found = nullptr;
  for (std::size_t i = 0; i < quant_.overrides.size(); ++i) {
    const QuantOverride& candidate = quant_.overrides[i];
    if (candidate.key == path) {
      override_used_[i] = true;
      return &candidate;
    }
    if (canonical_module_path(candidate.key) != path) continue;
    override_used_[i] = true;
    if (found != nullptr && (found->kind != candidate.kind || found->bits != candidate.bits ||
                             found->group_size != candidate.group_size)) {
      return Error{Errc::corrupt_file,
                   concat("config.json: quantization keys '", found->key, "' and '", candidate.key,
                          "' both name '", path, "' and differ")};
    }
    found = &candidate;
  }
  return found;
}

Status ModuleTable::Builder::set_dense(const ModuleTensors& module, const QuantOverride* entry,
                                       ModuleInfo& info) {
  for (const Location* extra : {module.scales, module.biases}) {
    if (extra == nullptr) continue;
    return bad_tensor(*extra, entry != nullptr ? concat("is there, but config.json says that '",
                                                        entry->key, "' is not quantized")
                                               : concat("is there without ", info.path, ".scales"));
  }
  const auto dtype = float_dtype(module.weight->entry->dtype);
  if (!dtype) {
    return bad_tensor(*module.weight, concat("is ", describe(*module.weight),
                                             module.weight->entry->dtype == "U32"
                                                 ? concat(", but ", info.path, ".scales is missing")
                                                 : std::string(", needs F32, F16 or BF16")));
  }
  info.spec = QuantSpec::dense(*dtype);
  const std::vector<std::int64_t> need{info.N, info.K};
  if (module.weight->entry->shape == need) return {};
  return bad_tensor(*module.weight, concat("is ", describe(*module.weight), ", config.json needs ",
                                           shape_to_string(need)));
}

Status ModuleTable::Builder::set_quantized(const ModuleTensors& module, const QuantOverride* entry,
                                           ModuleInfo& info) {
  if (!quant_.present) {
    return bad_tensor(*module.scales,
                      "is there, but config.json has no quantization entry (bits, group_size)");
  }
  for (const auto& [tensor, suffix] :
       {std::pair(module.scales, ".scales"), std::pair(module.biases, ".biases")}) {
    if (tensor == nullptr) {
      return missing(concat(info.path, suffix), concat(info.spec_source, " says affine"));
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
  info.spec = {entry != nullptr ? entry->bits : quant_.bits,
               entry != nullptr ? entry->group_size : quant_.group_size, *dtype};
  // As mlx-lm does: a module that config.json does not name has the format of its shapes.
  if (const auto format = format_of_shapes(info, module); entry == nullptr && format) {
    if (*format != std::pair(info.spec.bits, info.spec.group_size)) {
      std::tie(info.spec.bits, info.spec.group_size) = *format;
      info.spec_source = "tensor shapes";
      by_shape_.add(info.path);
    }
  }
  return check_quantized(info, module);
}

Status ModuleTable::Builder::check_quantized(const ModuleInfo& info,
                                             const ModuleTensors& module) const {
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
    if (const auto format = format_of_shapes(info, module)) {
      hint = concat("; the shapes fit ", format->first, " bits, group ", format->second);
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

Status ModuleTable::Builder::add_stored(const std::string& path, std::int64_t N, std::int64_t K,
                                        bool has_bias) {
  ModuleTensors module;
  module.weight = use(concat(path, ".weight"));
  if (module.weight == nullptr) return missing(concat(path, ".weight"), "config.json needs it");
  module.scales = use(concat(path, ".scales"));
  module.biases = use(concat(path, ".biases"));
  module.linear_bias = use(concat(path, ".bias"));
  QMLP_ASSIGN(const QuantOverride* const entry, find_override(path));

  ModuleInfo info;
  info.path = path;
  info.stored_path = path;
  info.N = N;
  info.K = K;
  info.has_linear_bias = has_bias;
  bool quantized = module.scales != nullptr;
  info.spec_source = quantized ? "config quantization" : "unquantized";
  if (entry != nullptr) {
    quantized = entry->kind != QuantOverride::Kind::unquantized;
    info.spec_source = concat("config quantization.", entry->key);
    if (entry->key != path) {
      warnings_.push_back(
          concat("config.json: quantization key '", entry->key, "' is taken for '", path, "'"));
    }
  }
  QMLP_TRY(quantized ? set_quantized(module, entry, info) : set_dense(module, entry, info));
  if (has_bias) {
    QMLP_TRY(need_vector(concat(path, ".bias"), N));
  } else if (module.linear_bias != nullptr) {
    return bad_tensor(*module.linear_bias,
                      concat("is there, but this layer has no bias in a ", config_.model_type,
                             " model with this config.json (attention_bias, mlp_bias)"));
  }
  for (const Location* tensor : {module.weight, module.scales, module.biases, module.linear_bias}) {
    info.bytes += size_of_tensor(tensor);
  }
  table_.stored_.push_back(std::move(info));
  table_.tensors_.push_back(module);
  return {};
}

Status ModuleTable::Builder::add_module(const std::string& path, std::int64_t N, std::int64_t K,
                                        bool has_bias) {
  QMLP_TRY(add_stored(path, N, K, has_bias));
  table_.modules_.push_back(table_.stored_.back());
  return {};
}

// Projections of one input, each a tensor or all stacked in one.
Status ModuleTable::Builder::add_projections(const std::string& prefix,
                                             std::string_view stacked_name,
                                             std::span<const Part> parts, std::int64_t K,
                                             bool has_bias) {
  const std::string stacked = concat(prefix, stacked_name);
  bool apart = false;
  std::int64_t rows = 0;
  for (const Part& part : parts) {
    const std::string path = concat(prefix, part.name);
    if (holds(path) && holds(stacked)) {
      return Error{Errc::corrupt_file, concat(folder_, ": tensors '", stacked, ".weight' and '",
                                              path, ".weight' are both there, needs one of them")};
    }
    apart = apart || holds(path);
    rows += part.N;
  }
  if (!holds(stacked) && (apart || !stacked_)) {
    for (const Part& part : parts) {
      QMLP_TRY(add_module(concat(prefix, part.name), part.N, K, has_bias));
    }
    return {};
  }
  QMLP_TRY(add_stored(stacked, rows, K, has_bias));
  const ModuleInfo& whole = table_.stored_.back();
  std::int64_t row = 0;
  for (const Part& part : parts) {
    ModuleInfo info = whole;
    info.path = concat(prefix, part.name);
    info.N = part.N;
    info.row_begin = row;
    info.bytes =
        whole.bytes / static_cast<std::uint64_t>(rows) * static_cast<std::uint64_t>(part.N);
    row += part.N;
    table_.modules_.push_back(std::move(info));
  }
  return {};
}

Status ModuleTable::Builder::need_vector(const std::string& name, std::int64_t size) {
  const Location* tensor = use(name);
  if (tensor == nullptr) return missing(name, "config.json needs it");
  if (!float_dtype(tensor->entry->dtype) ||
      tensor->entry->shape != std::vector<std::int64_t>{size}) {
    return bad_tensor(*tensor,
                      concat("is ", describe(*tensor), ", needs F32, F16 or BF16 [", size, "]"));
  }
  return {};
}

Status ModuleTable::Builder::add_layer(std::int64_t index) {
  const std::int64_t hidden = config_.hidden_size;
  const std::int64_t inner = config_.intermediate_size;
  const std::int64_t q_width = config_.num_attention_heads * config_.head_dim;
  const std::int64_t kv_width = config_.num_key_value_heads * config_.head_dim;
  const std::string layer = concat("model.layers.", index, ".");
  const std::string attention = concat(layer, "self_attn.");
  const std::string mlp = concat(layer, "mlp.");
  QMLP_TRY(need_vector(concat(layer, "input_layernorm.weight"), hidden));
  const Part qkv[] = {{"q_proj", q_width}, {"k_proj", kv_width}, {"v_proj", kv_width}};
  QMLP_TRY(add_projections(attention, "qkv_proj", qkv, hidden, config_.attention_bias));
  if (config_.qk_norm) {
    QMLP_TRY(need_vector(concat(attention, "q_norm.weight"), config_.head_dim));
    QMLP_TRY(need_vector(concat(attention, "k_norm.weight"), config_.head_dim));
  }
  QMLP_TRY(add_module(concat(attention, "o_proj"), hidden, q_width, config_.attention_output_bias));
  QMLP_TRY(need_vector(concat(layer, "post_attention_layernorm.weight"), hidden));
  const Part gate_up[] = {{"gate_proj", inner}, {"up_proj", inner}};
  QMLP_TRY(add_projections(mlp, "gate_up_proj", gate_up, hidden, config_.mlp_bias));
  return add_module(concat(mlp, "down_proj"), hidden, inner, config_.mlp_bias);
}

Status ModuleTable::Builder::add_head() {
  const Architecture* architecture = find_architecture(config_.model_type);
  if (!config_.tie_word_embeddings && !holds("lm_head") && architecture != nullptr &&
      architecture->head_falls_back) {
    warnings_.push_back("lm_head is missing: the embedding is the head, as mlx-lm has it");
    config_.tie_word_embeddings = true;
  }
  if (config_.tie_word_embeddings) return {};
  return add_module("lm_head", config_.vocab_size, config_.hidden_size, false);
}

Status ModuleTable::Builder::add_all() {
  const Architecture* architecture = find_architecture(config_.model_type);
  stacked_ = architecture != nullptr && architecture->stacked;
  QMLP_TRY(add_module("model.embed_tokens", config_.vocab_size, config_.hidden_size, false));
  for (std::int64_t i = 0; i < config_.num_hidden_layers; ++i) QMLP_TRY(add_layer(i));
  QMLP_TRY(need_vector("model.norm.weight", config_.hidden_size));
  QMLP_TRY(add_head());

  for (std::size_t i = 0; i < table_.stored_.size(); ++i) {
    table_.by_path_.push_back({&table_.stored_[i], &table_.tensors_[i]});
  }
  // Parts of stacked modules have their tensors, and come in the same order; others are in both.
  std::size_t at = 0;
  for (const ModuleInfo& info : table_.modules_) {
    if (info.path == info.stored_path) continue;
    while (table_.stored_[at].path != info.stored_path) ++at;
    table_.by_path_.push_back({&info, &table_.tensors_[at]});
  }
  std::sort(table_.by_path_.begin(), table_.by_path_.end(),
            [](const Entry& a, const Entry& b) { return a.info->path < b.info->path; });
  return {};
}

void ModuleTable::Builder::warn_of_unused_head() {
  bool present = false;
  bool equal = true;
  for (const char* suffix : {".weight", ".scales", ".biases"}) {
    const Location* head = use(concat("lm_head", suffix));
    const Location* embedding = files_.find(concat("model.embed_tokens", suffix));
    present = present || head != nullptr;
    if (head == nullptr && embedding == nullptr) continue;
    const auto a = bytes_of(head);
    const auto b = bytes_of(embedding);
    equal = equal && head != nullptr && embedding != nullptr &&
            describe(*head) == describe(*embedding) && a.size() == b.size() &&
            std::memcmp(a.data(), b.data(), a.size()) == 0;
  }
  if (present) {
    warnings_.push_back(concat("lm_head is ignored, since tie_word_embeddings is true; it ",
                               equal ? "equals" : "DIFFERS from", " the embedding"));
  }
}

// A tensor of a layer that nothing uses means another model than config.json's, as mlx-lm has it
// too. Tensors elsewhere may be of parts that text does not need.
Status ModuleTable::Builder::report_unused() {
  if (config_.tie_word_embeddings) warn_of_unused_head();
  NameList unused;
  for (const Location& tensor : files_.tensors()) {
    if (used_.count(tensor.name) != 0 || is_rotary_table(tensor.name)) continue;
    if (tensor.name.starts_with("model.layers.")) {
      return bad_tensor(tensor, concat("is there, but a ", config_.model_type, " model of ",
                                       config_.num_hidden_layers,
                                       " layers with this config.json has no such tensor"));
    }
    unused.add(tensor.name);
  }
  if (unused.count != 0) warnings_.push_back(concat("unused tensors: ", unused.all()));
  if (by_shape_.count != 0) {
    warnings_.push_back(
        concat("config.json: quantization says ", quant_.bits, " bits, group ", quant_.group_size,
               "; the shapes of ", by_shape_.count,
               " modules say otherwise and are followed, as mlx-lm does: ", by_shape_.all()));
  }
  for (std::size_t i = 0; i < quant_.overrides.size(); ++i) {
    if (override_used_[i]) continue;
    warnings_.push_back(
        concat("config.json: quantization key '", quant_.overrides[i].key, "' matches no module"));
  }
  return {};
}

Status ModuleTable::build(const std::string& folder, const QuantConfig& quant,
                          const TensorFiles& files, ModelConfig& config,
                          std::vector<std::string>& warnings) {
  Builder builder(folder, quant, files, config, warnings, *this);
  QMLP_TRY(builder.add_all());
  return builder.report_unused();
}

ModuleTable::Entry ModuleTable::find(std::string_view path) const noexcept {
  const auto at = std::lower_bound(
      by_path_.begin(), by_path_.end(), path,
      [](const Entry& entry, std::string_view key) { return entry.info->path < key; });
  if (at == by_path_.end() || at->info->path != path) return {};
  return *at;
}

}  // namespace qmlp
