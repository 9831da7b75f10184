#include "cuda/backend.h"

#include <algorithm>
#include <limits>

#include "base/checked.h"
#include "base/try.h"
#include "cuda/choice.h"
#include "cuda/device_tiles.h"
#include "cuda/run.h"

namespace qmlp::cuda {
namespace {

using plan::Backend;
using plan::Kernel;
using plan::Op;

constexpr int kMaxSegments = 8;
constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();
constexpr std::uint32_t kLayoutFragment = 16;
constexpr auto kRun = kCompiled ? run_kernel : nullptr;

std::int64_t chunks_of(const plan::Problem& problem) noexcept {
  return ceil_div(problem.K, kChunkK);
}
std::int64_t num_tiles_of(const plan::Problem& problem) noexcept {
  return tiles_of(problem.N, problem.op == Op::swiglu);
}

bool is_chosen_relay(const Kernel&, const plan::Problem& problem,
                     const DeviceFacts& device) noexcept {
  return prefers_relay(num_tiles_of(problem), chunks_of(problem), problem.segments, device);
}

bool is_chosen_tile(const Kernel& kernel, const plan::Problem& problem,
                    const DeviceFacts& device) noexcept {
  const auto bits_of = [](const QuantSpec& spec) {
    return spec.is_dense() ? kDenseBits : spec.bits;
  };
  const int bits =
      common_bits(bits_of(problem.spec[0]), bits_of(problem.spec[problem.num_weights() - 1]));
  const TileConfig config = choose_tile(
      {problem.M, num_tiles_of(problem), chunks_of(problem), problem.segments, bits}, device);
  return kernel.body == kTileSm90 + static_cast<int>(config);
}

constexpr int most_segments(TileConfig config) { return splits_k(config) ? kMaxSegments : 1; }

// Rows of every build; in one without CUDA they have no code.
#define QMLP_CUDA_ROW(op, dtype, isa, tile, segments, body, M_begin, M_end, preferred)           \
  Kernel {                                                                                       \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa, Accumulation::tensor, \
        segments, body, kLayoutFragment, M_begin, M_end, kRun, kernel_workspace_bytes, preferred \
  }
#define QMLP_CUDA_TILE(op, dtype, tile, config)                            \
  QMLP_CUDA_ROW(op, dtype, sm90a, tile, most_segments(TileConfig::config), \
                kTileSm90 + static_cast<int>(TileConfig::config), 9, kAnyM, is_chosen_tile)
#define QMLP_CUDA_OP(op, dtype)                                                                    \
  QMLP_CUDA_ROW(op, dtype, sm90a, m16n8k512, kMaxSegments, kRelaySm90, 0, 9, is_chosen_relay),     \
      QMLP_CUDA_TILE(op, dtype, m256n16k64, t16), QMLP_CUDA_TILE(op, dtype, m128n16k64, t16_pair), \
      QMLP_CUDA_TILE(op, dtype, m256n32k64, t32), QMLP_CUDA_TILE(op, dtype, m128n32k64, t32_pair), \
      QMLP_CUDA_TILE(op, dtype, m256n64k64, t64), QMLP_CUDA_TILE(op, dtype, m128n128k64, t128),    \
      QMLP_CUDA_TILE(op, dtype, m128n256k64, t256),                                                \
      QMLP_CUDA_TILE(op, dtype, m128n128k512, t128_sequence),                                      \
      QMLP_CUDA_ROW(op, dtype, sm90a, m16n8k16, kMaxSegments, kStreamSm90, 0, 9, nullptr),         \
      QMLP_CUDA_ROW(op, dtype, sm80, m16n16k16, kMaxSegments, kStreamSm80, 0, kAnyM, nullptr)

constexpr Kernel kKernels[] = {
    QMLP_CUDA_OP(swiglu, bf16),
    QMLP_CUDA_OP(swiglu, f16),
    QMLP_CUDA_OP(linear, bf16),
    QMLP_CUDA_OP(linear, f16),
};

Status pack(std::span<const QuantizedTensorView> sources, const Stream& stream,
            PackedWeight& weight) {
  QMLP_ASSIGN(weight.parts[0], pack_on_device(sources, weight.activation, stream));
  return {};
}

PackedInfo info(const PackedWeight& weight) noexcept {
  const DeviceTiles& tiles = tiles_of(weight);
  PackedInfo info;
  info.bytes = static_cast<std::size_t>(tiles.layout.bytes());
  const std::int64_t blocks = ceil_div(weight.N, 16);
  info.blocks = blocks * weight.num_parts;
  for (int i = 0; i < weight.num_parts; ++i) {
    const bool decoded = tiles.layout.format.half[i].bits == kDenseBits;
    if (decoded && !weight.spec[i].is_dense()) info.exact_blocks += blocks;
  }
  info.non_finite = tiles.non_finite[0] || tiles.non_finite[1];
  return info;
}

Result<std::shared_ptr<const void>> part(const PackedWeight& weight, int index) {
  QMLP_ASSIGN(DeviceTilesPtr own, copy_part(tiles_of(weight), index, weight.spec[index]));
  return std::shared_ptr<const void>(std::move(own));
}

constexpr Backend kBackend = {
    kKernels,           pack, info, part, decode_device_row, activate_on_device, last_error,
    unpack_device_rows,
};

}  // namespace

const Backend& backend() noexcept { return kBackend; }

}  // namespace qmlp::cuda
