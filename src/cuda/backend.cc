#include "cuda/backend.h"

#include <limits>

#include "base/try.h"
#include "cuda/run.h"

namespace qmlp::cuda {
namespace {

using plan::Backend;
using plan::Kernel;
using plan::Op;

constexpr int kMaxSegments = 1;
constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();
constexpr std::uint32_t kLayoutFragment = 16;
constexpr auto kRun = kCompiled ? run_kernel : nullptr;

// Rows of every build; in one without CUDA they have no code.
#define QMLP_CUDA_ROW(op, dtype, isa, tile, body, M_begin, M_end)                                \
  Kernel {                                                                                       \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa, Accumulation::tensor, \
        kMaxSegments, body, kLayoutFragment, M_begin, M_end, kRun, kernel_workspace_bytes        \
  }
#define QMLP_CUDA_OP(op, dtype)                                           \
  QMLP_CUDA_ROW(op, dtype, sm90a, m16n16k16, kStreamSm90, 0, 17),         \
      QMLP_CUDA_ROW(op, dtype, sm90a, m256n128k64, kTileSm90, 17, kAnyM), \
      QMLP_CUDA_ROW(op, dtype, sm80, m16n16k16, kStreamSm80, 0, kAnyM)

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
