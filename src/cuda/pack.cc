#include "cuda/pack.h"

#include <algorithm>

#include "base/checked.h"

namespace qmlp::cuda {

bool needs_scale_range(const QuantSpec& spec, DType activation) noexcept {
  return !spec.is_dense() && spec.scale_dtype == DType::bf16 && activation == DType::bf16;
}

HalfChoice choose_half(const QuantSpec& spec, DType activation, const ScaleRange& range) noexcept {
  constexpr HalfChoice kDense = {kDenseBits, kChunkK, 0};
  if (spec.is_dense() || spec.scale_dtype != activation) return kDense;
  const int prescale = needs_scale_range(spec, activation) ? prescale_of(range) : 0;
  if (prescale == kNoPrescale) return kDense;
  return {spec.bits, std::min(spec.group_size, kChunkK), prescale};
}

Result<TileLayout> lay_out_tiles(std::int64_t N, std::int64_t K, const HalfChoice* choices,
                                 bool is_swiglu, DType activation) {
  const HalfChoice& first = choices[0];
  const HalfChoice& second = choices[is_swiglu ? 1 : 0];
  const int group_size = std::min(first.group_size, second.group_size);
  TileLayout layout = {};
  layout.format = {{{first.bits, group_size}, {second.bits, group_size}}};
  layout.N = N;
  layout.K = K;
  layout.num_tiles = ceil_div(N, is_swiglu ? kHalfRows : kTileRows);
  layout.num_chunks = ceil_div(K, kChunkK);
  layout.prescale[0] = first.prescale;
  layout.prescale[1] = second.prescale;
  layout.is_swiglu = is_swiglu;
  layout.activation = activation;
  const auto tile =
      checked_mul<std::int64_t>(layout.num_chunks, std::int64_t{layout.format.chunk_bytes()});
  const auto total = tile ? checked_mul<std::int64_t>(layout.num_tiles, *tile) : tile;
  if (!total) return Error{Errc::out_of_memory, "packed weight size overflows 64 bits"};
  layout.tile_bytes = *tile;
  return layout;
}

}  // namespace qmlp::cuda
