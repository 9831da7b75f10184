#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "convert/gguf_model.h"
#include "qmlp/status.h"

namespace qmlp {

// Typed access to the keys of one architecture: `head_count` of "llama" is "llama.head_count".
// Every error names the file and the key.
class GgufMetadata {
 public:
  GgufMetadata(const GgufModel& model, std::string_view architecture)
      : model_(model), architecture_(architecture) {}

  const GgufModel& model() const noexcept { return model_; }
  std::string key(std::string_view name) const;
  Error error(Errc code, std::string_view rest) const;
  bool has(std::string_view name) const { return model_.find(key(name)) != nullptr; }

  // An integer from 1 to 2^31; of an array, the value that all its elements have.
  Status size(std::string_view name, std::int64_t& out) const;           // required
  Status optional_size(std::string_view name, std::int64_t& out) const;  // kept when absent
  // A finite number above 0.
  Result<std::optional<float>> positive(std::string_view name) const;
  Result<std::optional<std::string_view>> text(std::string_view name) const;

 private:
  const GgufModel& model_;
  std::string architecture_;
};

}  // namespace qmlp
