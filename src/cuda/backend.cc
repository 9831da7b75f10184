#include "cuda/backend.h"

#include <limits>

#include "base/checked.h"
#include "base/try.h"
#include "cuda/choice.h"
#include "cuda/run.h"

namespace qmlp::cuda {
namespace {

using plan::Backend;
using plan::Kernel;
using plan::Op;

constexpr int kMaxSegments = 8;  // of the stream kernels; tile kernels keep one chain
constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();
constexpr std::uint32_t kLayoutFragment = 16;
constexpr auto kRun = kCompiled ? run_kernel : nullptr;

bool is_chosen_tile(const Kernel& kernel, const plan::Problem& problem,
                    const DeviceFacts& device) noexcept {
  const TileConfig config = choose_tile(problem.M, tiles_of(problem.N, problem.op == Op::swiglu),
                                        ceil_div(problem.K, kChunkK), device);
  return kernel.body == kTileSm90 + static_cast<int>(config);
}

// Rows of every build; in one without CUDA they have no code.
#define QMLP_CUDA_ROW(op, dtype, isa, tile, segments, body, M_begin, M_end, preferred)           \
  Kernel {                                                                                       \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa, Accumulation::tensor, \
        segments, body, kLayoutFragment, M_begin, M_end, kRun, kernel_workspace_bytes, preferred \
  }
#define QMLP_CUDA_TILE(op, dtype, tile, config)                                                 \
  QMLP_CUDA_ROW(op, dtype, sm90a, tile, 1, kTileSm90 + static_cast<int>(TileConfig::config), 9, \
                kAnyM, is_chosen_tile)
#define QMLP_CUDA_OP(op, dtype)                                                                    \
  QMLP_CUDA_ROW(op, dtype, sm90a, m16n8k16, kMaxSegments, kStreamSm90, 0, 9, nullptr),             \
      QMLP_CUDA_TILE(op, dtype, m256n16k64, t16), QMLP_CUDA_TILE(op, dtype, m128n16k64, t16_pair), \
      QMLP_CUDA_TILE(op, dtype, m256n32k64, t32), QMLP_CUDA_TILE(op, dtype, m128n32k64, t32_pair), \
      QMLP_CUDA_TILE(op, dtype, m256n64k64, t64), QMLP_CUDA_TILE(op, dtype, m128n128k64, t128),    \
      QMLP_CUDA_TILE(op, dtype, m128n256k64, t256),                                                \
      QMLP_CUDA_ROW(op, dtype, sm80, m16n16k16, kMaxSegments, kStreamSm80, 0, kAnyM, nullptr)

constexpr Kernel kKernels[] = {
    QMLP_CUDA_OP(swiglu, bf16),
    QMLP_CUDA_OP(swiglu, f16),
    QMLP_CUDA_OP(linear, bf16),
    QMLP_CUDA_OP(linear, f16),
};

Status pack(std::span<const QuantizedTensorView> sources, const Stream& stream,
            PackedWeight& weight) {
  QMLP_ASSIGN(weight.parts[0],
              upload(sources.data(), static_cast<int>(sources.size()), weight.activation, stream));
  return {};
}

PackedInfo info(const PackedWeight& weight) noexcept {
  PackedInfo info;
  info.bytes = device_bytes(*static_cast<const DeviceTiles*>(weight.parts[0].get()));
  info.blocks = (weight.N + 15) / 16 * weight.num_parts;
  return info;
}

constexpr Backend kBackend = {
    kKernels, pack, info, false, nullptr, nullptr, last_error,
};

}  // namespace

const Backend& backend() noexcept { return kBackend; }

}  // namespace qmlp::cuda
