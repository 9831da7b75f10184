#include "qmlp/checkpoint.h"

#include <initializer_list>
#include <utility>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "io/config.h"
#include "io/files.h"
#include "io/json.h"
#include "io/module_table.h"
#include "io/tensor_files.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 16'000'000;
using Location = TensorFiles::Location;

// The bytes of a module's rows in a tensor of the module that holds them.
std::span<const std::byte> rows_of(const Location* tensor, const ModuleInfo& info,
                                   std::int64_t stored_rows) {
  const std::span<const std::byte> bytes = bytes_of(tensor);
  const std::size_t row_bytes = bytes.size() / static_cast<std::size_t>(stored_rows);
  return bytes.subspan(row_bytes * static_cast<std::size_t>(info.row_begin),
                       row_bytes * static_cast<std::size_t>(info.N));
}

// That the tensors can still be read. Null: not there.
Status check_readable(std::initializer_list<const Location*> tensors) {
  const SafetensorsFile* checked = nullptr;  // most often one file holds them all
  for (const Location* tensor : tensors) {
    if (tensor == nullptr || tensor->file == checked) continue;
    checked = tensor->file;
    QMLP_TRY(checked->file().check_size());
  }
  return {};
}

std::vector<float> widen(std::span<const std::byte> bytes, DType dtype) {
  std::vector<float> out(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = load_float(bytes.data(), dtype, static_cast<std::int64_t>(i));
  }
  return out;
}

}  // namespace

struct Checkpoint::Impl {
  std::string path;
  ModelConfig config;
  QuantConfig quant;
  TensorFiles files;
  std::vector<TensorInfo> tensors;
  ModuleTable table;
  std::vector<std::string> warnings;

  Status read_configs();
};

namespace {

// NVIDIA's exporter names its scheme in a file of its own.
Status refuse_other_quantization_file(const std::string& folder) {
  constexpr const char* kName = "hf_quant_config.json";
  QMLP_ASSIGN(const PathKind kind, path_kind(join_path(folder, kName)));
  if (kind == PathKind::missing) return {};
  return Error{Errc::unsupported, concat(folder, ": ", kName,
                                         " is there: a ModelOpt checkpoint (nvfp4, fp8) is not "
                                         "supported, only MLX's affine format and floats")};
}

}  // namespace

Status Checkpoint::Impl::read_configs() {
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
  QMLP_ASSIGN(quant, parse_quant_config(json, config_path, &warnings));
  if (!quant.present) QMLP_TRY(refuse_other_quantization_file(path));
  QMLP_ASSIGN(config,
              parse_model_config(json, generation ? &*generation : nullptr, config_path, warnings));
  return {};
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;

Result<std::shared_ptr<const Checkpoint>> Checkpoint::open(const std::string& path,
                                                           const CheckpointOptions& options) {
  QMLP_ASSIGN(const PathKind kind, path_kind(path));
  if (kind == PathKind::missing) return Error{Errc::io, concat(path, ": does not exist")};
  if (kind != PathKind::directory) {
    const bool gguf = path.ends_with(".gguf");
    return Error{
        gguf ? Errc::unsupported : Errc::invalid_argument,
        concat(path, gguf ? ": is a GGUF file: convert it first (qmlp convert)"
                          : ": is not a folder; a model folder with config.json is needed")};
  }
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  QMLP_TRY(impl->read_configs());
  QMLP_ASSIGN(impl->files, TensorFiles::open(path, options.use_mmap, impl->warnings));
  for (const Location& tensor : impl->files.tensors()) {
    impl->tensors.push_back({std::string(tensor.name),
                             std::string(base_name(tensor.file->file().path())),
                             tensor.entry->dtype, tensor.entry->shape, size_of_tensor(&tensor)});
  }
  QMLP_TRY(impl->table.build(path, impl->quant, impl->files, impl->config, impl->warnings));
  return std::shared_ptr<const Checkpoint>(new Checkpoint(std::move(impl)));
}

const std::string& Checkpoint::path() const noexcept { return impl_->path; }
const ModelConfig& Checkpoint::config() const noexcept { return impl_->config; }
const std::vector<TensorInfo>& Checkpoint::tensors() const noexcept { return impl_->tensors; }
const std::vector<ModuleInfo>& Checkpoint::modules() const noexcept {
  return impl_->table.modules();
}
const std::vector<ModuleInfo>& Checkpoint::stored_modules() const noexcept {
  return impl_->table.stored();
}
const std::vector<std::string>& Checkpoint::warnings() const noexcept { return impl_->warnings; }
std::uint64_t Checkpoint::file_bytes() const noexcept { return impl_->files.file_bytes(); }
bool Checkpoint::mapped() const noexcept { return impl_->files.mapped(); }

const ModuleInfo* Checkpoint::find_module(std::string_view module_path) const noexcept {
  return impl_->table.find(module_path).info;
}

Result<QuantizedTensorView> Checkpoint::weight(std::string_view module_path) const {
  const ModuleTable::Entry entry = impl_->table.find(module_path);
  if (entry.info == nullptr) {
    return Error{Errc::invalid_argument, concat("no module '", module_path, "' in ", path())};
  }
  const ModuleInfo& info = *entry.info;
  QMLP_TRY(check_readable({entry.tensors->weight, entry.tensors->scales, entry.tensors->biases}));
  const std::int64_t rows = find_module(info.stored_path)->N;
  QuantizedTensorView view{rows_of(entry.tensors->weight, info, rows),
                           rows_of(entry.tensors->scales, info, rows),
                           rows_of(entry.tensors->biases, info, rows),
                           info.N,
                           info.K,
                           info.spec};
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
  QMLP_TRY(check_readable({tensor}));
  return widen(bytes_of(tensor), *dtype);
}

Result<std::vector<float>> Checkpoint::linear_bias(std::string_view module_path) const {
  const ModuleTable::Entry entry = impl_->table.find(module_path);
  if (entry.info == nullptr) {
    return Error{Errc::invalid_argument, concat("no module '", module_path, "' in ", path())};
  }
  if (!entry.info->has_linear_bias) return std::vector<float>();
  const Location& tensor = *entry.tensors->linear_bias;  // its type and size were checked
  QMLP_TRY(check_readable({&tensor}));
  const std::int64_t rows = find_module(entry.info->stored_path)->N;
  return widen(rows_of(&tensor, *entry.info, rows), *float_dtype(tensor.entry->dtype));
}

void Checkpoint::release(std::string_view module_path) const noexcept {
  const ModuleTable::Entry entry = impl_->table.find(module_path);
  if (entry.info == nullptr) return;
  const auto rows = static_cast<std::uint64_t>(find_module(entry.info->stored_path)->N);
  for (const Location* tensor :
       {entry.tensors->weight, entry.tensors->scales, entry.tensors->biases}) {
    if (tensor == nullptr) continue;
    const std::uint64_t row_bytes = size_of_tensor(tensor) / rows;
    tensor->file->file().release(
        tensor->entry->begin + row_bytes * static_cast<std::uint64_t>(entry.info->row_begin),
        row_bytes * static_cast<std::uint64_t>(entry.info->N));
  }
}

}  // namespace qmlp
