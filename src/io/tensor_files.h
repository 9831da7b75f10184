#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "qmlp/status.h"

namespace qmlp {

// One of `count` files, numbered from 1: "model-00002-of-00003.safetensors".
std::string shard_name(std::int64_t number, std::int64_t count);

// The safetensors files of a checkpoint folder as one set of tensors.
class TensorFiles {
 public:
  struct Location {
    std::string_view name;
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
  };

  // Opens model.safetensors, or the shards that model.safetensors.index.json names, or else all
  // model*.safetensors. Refuses missing shards, tensors the index promises and no shard holds, and
  // names that two files hold. `warnings` gets the files that were left aside.
  static Result<TensorFiles> open(const std::string& directory, bool use_mmap,
                                  std::vector<std::string>& warnings);

  // Sorted by name.
  const std::vector<Location>& tensors() const noexcept { return tensors_; }
  const Location* find(std::string_view name) const noexcept;
  std::uint64_t file_bytes() const noexcept;
  bool mapped() const noexcept;

 private:
  std::vector<SafetensorsFile> files_;  // not resized once tensors_ points into it
  std::vector<Location> tensors_;
};

}  // namespace qmlp
