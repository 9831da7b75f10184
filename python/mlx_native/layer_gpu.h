#pragma once

#include <mutex>
#include <vector>

#include "layer.h"

namespace qmlp_mlx {

// A layer on GPU streams, with the results of its Python code: one op, with MLX's norms and
// attention evaluated inside. The host's time for a token, which is by the op and by the kernel, is
// what a GPU waits for.
class GpuLayer {
 public:
  // What a pass finds in the cache.
  struct Held {
    bool cached;  // there is one
    const array* keys;
    const array* values;  // before the pass; both or neither
    int offset;
  };

  GpuLayer();
  ~GpuLayer();
  LayerResult run(const LayerParts& parts, const array& x, const Held& held,
                  const mlx::core::Stream& s);

 private:
  struct Known;
  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace qmlp_mlx
