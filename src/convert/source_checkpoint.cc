#include "base/try.h"
#include "convert/source.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "qmlp/checkpoint.h"

namespace qmlp {
namespace {

constexpr std::uint64_t kMaxTextFile = 200'000'000;
constexpr const char* kCopiedFiles[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "NOTICE",
};

}  // namespace

Result<SourceModel> open_checkpoint_source(const std::string& path) {
  QMLP_ASSIGN(std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::open(path));
  SourceModel model;
  const std::string config_path = join_path(path, "config.json");
  QMLP_ASSIGN(const std::string config_text, read_text_file(config_path, kMaxTextFile));
  QMLP_ASSIGN(Json config, Json::parse(config_text, config_path));
  model.config = std::move(*config.object());
  model.config.erase("quantization");
  model.config.erase("quantization_config");

  for (const ModuleInfo& info : checkpoint->stored_modules()) {
    SourceMatrix matrix;
    matrix.path = info.path;
    matrix.N = info.N;
    matrix.K = info.K;
    matrix.spec = info.spec;
    const Checkpoint* source = checkpoint.get();
    matrix.read = [source, name = info.path]() -> Result<NativeWeight> {
      NativeWeight weight;
      QMLP_ASSIGN(weight.view, source->weight(name));
      return weight;
    };
    matrix.release = [source, name = info.path] { source->release(name); };
    model.matrices.push_back(std::move(matrix));
  }
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    const bool is_norm = tensor.name.find("norm.weight") != std::string::npos;
    const auto dot = tensor.name.rfind('.');
    const ModuleInfo* module =
        dot == std::string::npos ? nullptr : checkpoint->find_module(tensor.name.substr(0, dot));
    const bool is_linear_bias =
        module != nullptr && module->has_linear_bias && tensor.name.substr(dot) == ".bias";
    const bool is_model = tensor.name.starts_with("model.");
    if ((!is_norm && !is_linear_bias) || !is_model || tensor.shape.size() != 1) continue;
    const auto dtype = float_dtype(tensor.dtype);
    if (!dtype) continue;
    SourceVector vector;
    vector.name = tensor.name;
    vector.dtype = *dtype;
    QMLP_ASSIGN(vector.values, checkpoint->float_tensor(tensor.name));
    model.vectors.push_back(std::move(vector));
  }
  for (const char* name : kCopiedFiles) {
    const std::string file = join_path(path, name);
    QMLP_ASSIGN(const PathKind kind, path_kind(file));
    if (kind != PathKind::file) continue;
    QMLP_ASSIGN(std::string text, read_text_file(file, kMaxTextFile));
    model.files.emplace_back(name, std::move(text));
  }
  for (const std::string& warning : checkpoint->warnings()) model.notes.push_back(warning);
  model.owner = std::move(checkpoint);
  return model;
}

}  // namespace qmlp
