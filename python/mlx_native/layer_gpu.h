#pragma once

#include <mutex>
#include <vector>

#include "layer.h"

namespace qmlp_mlx {

// A layer on GPU streams, with the results of its Python code: MLX's attention and cache between
// two ops, one that makes q, k and v and one for what follows. The host's time for a token, which
// is by the op, is what a GPU waits for.
class GpuLayer {
 public:
  GpuLayer();
  ~GpuLayer();
  // one_type: all parts compute in x's type; otherwise the layer is a graph of single ops. keys and
  // values are the cache's arrays before the call, or null.
  LayerResult run(const LayerParts& parts, bool one_type, const array& x, bool cached,
                  const array* keys, const array* values, int offset, const mlx::core::Stream& s);

 private:
  struct Known;
  std::mutex mutex_;
  std::vector<Known> known_;
};

}  // namespace qmlp_mlx
