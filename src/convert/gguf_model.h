#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convert/gguf.h"
#include "qmlp/status.h"

namespace qmlp {

// A model in one GGUF file, or in the parts that llama.cpp's tools split it into:
// NAME-00001-of-0000N.gguf and so on, beside each other, opened by the name of any of them. The
// first part holds the metadata. All parts are checked against each other at open.
class GgufModel {
 public:
  static Result<GgufModel> open(const std::string& path, bool use_mmap = true);

  const std::string& path() const noexcept { return parts_.front().path(); }
  std::size_t num_parts() const noexcept { return parts_.size(); }
  const GgufValue* find(std::string_view key) const noexcept { return parts_.front().find(key); }
  const std::vector<GgufTensor>& tensors() const noexcept { return tensors_; }  // sorted by name
  const GgufTensor* find_tensor(std::string_view name) const noexcept;
  const std::string& path_of(const GgufTensor& tensor) const noexcept {
    return parts_[tensor.part].path();
  }
  std::span<const std::byte> data(const GgufTensor& tensor) const noexcept {
    return parts_[tensor.part].data(tensor);
  }
  void release(const GgufTensor& tensor) const noexcept { parts_[tensor.part].release(tensor); }

 private:
  std::vector<GgufFile> parts_;
  std::vector<GgufTensor> tensors_;
};

}  // namespace qmlp
