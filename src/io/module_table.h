#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/architecture.h"
#include "io/config.h"
#include "io/tensor_files.h"
#include "qmlp/checkpoint.h"
#include "qmlp/status.h"

namespace qmlp {

// The tensors of one linear or embedding module.
struct ModuleTensors {
  const TensorFiles::Location* weight = nullptr;
  const TensorFiles::Location* scales = nullptr;
  const TensorFiles::Location* biases = nullptr;
  const TensorFiles::Location* linear_bias = nullptr;
};

std::string describe(const TensorFiles::Location& tensor);                 // "BF16 [160, 128]"
std::span<const std::byte> bytes_of(const TensorFiles::Location* tensor);  // null: none
std::uint64_t size_of_tensor(const TensorFiles::Location* tensor);

// Which tensors a config needs, found in the files and checked: shapes, types, formats. Where the
// files hold one stacked projection (qkv_proj, gate_up_proj), its row ranges become the modules.
class ModuleTable {
 public:
  struct Entry {
    const ModuleInfo* info = nullptr;
    const ModuleTensors* tensors = nullptr;  // of info->stored_path
  };

  // `folder` names the checkpoint in messages. May set config.tie_word_embeddings, where a model
  // without a head of its own may use the embedding.
  Status build(const std::string& folder, const QuantConfig& quant, const TensorFiles& files,
               ModelConfig& config, std::vector<std::string>& warnings);

  const std::vector<ModuleInfo>& modules() const noexcept { return modules_; }
  const std::vector<ModuleInfo>& stored() const noexcept { return stored_; }
  // By path, of either list; info is null when there is none.
  Entry find(std::string_view path) const noexcept;

 private:
  class Builder;

  std::vector<ModuleInfo> modules_;
  std::vector<ModuleInfo> stored_;
  std::vector<ModuleTensors> tensors_;  // beside stored_
  std::vector<Entry> by_path_;          // sorted
};

}  // namespace qmlp
