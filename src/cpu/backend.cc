#include "cpu/backend.h"

#include <limits>

#include "base/try.h"
#include "cpu/pack.h"
#include "cpu/run.h"

namespace qmlp::cpu {
namespace {

using plan::Backend;
using plan::Kernel;
using plan::Op;

const PackedMatrix& part_of(const PackedWeight& weight, int i) noexcept {
  return *static_cast<const PackedMatrix*>(weight.parts[i].get());
}

Status pack(std::span<const QuantizedTensorView> sources, const Stream& stream,
            PackedWeight& weight) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    QMLP_ASSIGN(weight.parts[i], pack_matrix(sources[i], weight.activation,
                                             *static_cast<ThreadPool*>(stream.handle)));
  }
  return {};
}

constexpr int kMaxSegments = 8;
constexpr std::int64_t kAnyM = std::numeric_limits<std::int64_t>::max();

// A kernel serves every bits, group and scale type; `k16` marks the steps of the tensor contract.
#define QMLP_CPU_ROW(op, dtype, isa, tile, accumulation, body, M_end)                     \
  Kernel {                                                                                \
#op "_" #dtype "_any_" #tile "_" #isa, Op::op, DType::dtype, Isa::isa,                \
        Accumulation::accumulation, kMaxSegments, body, kLayoutN16, 0, M_end, run_kernel, \
        kernel_workspace_bytes                                                            \
  }
#define QMLP_CPU_TYPES(op, isa, tile, body, M_end)        \
  QMLP_CPU_ROW(op, bf16, isa, tile, f32, body, M_end),    \
      QMLP_CPU_ROW(op, f16, isa, tile, f32, body, M_end), \
      QMLP_CPU_ROW(op, f32, isa, tile, f32, body, M_end)
#define QMLP_CPU_TENSOR(op, isa)                                 \
  QMLP_CPU_ROW(op, bf16, isa, m1n16k16, tensor, kTensor, kAnyM), \
      QMLP_CPU_ROW(op, f16, isa, m1n16k16, tensor, kTensor, kAnyM)
#define QMLP_CPU_SIMD(op, isa, tile)                                                      \
  QMLP_CPU_TYPES(op, isa, m4n16, kRows, 5), QMLP_CPU_TYPES(op, isa, tile, kTiles, kAnyM), \
      QMLP_CPU_TENSOR(op, isa)
#define QMLP_CPU_PORTABLE(op) \
  QMLP_CPU_TYPES(op, portable, m6n16, kTiles, kAnyM), QMLP_CPU_TENSOR(op, portable)

constexpr Kernel kCpuKernels[] = {
#if defined(__x86_64__)
    QMLP_CPU_SIMD(swiglu, avx512, m12n32),
    QMLP_CPU_SIMD(linear, avx512, m12n32),
    QMLP_CPU_SIMD(swiglu, avx2, m6n16),
    QMLP_CPU_SIMD(linear, avx2, m6n16),
#endif
    QMLP_CPU_PORTABLE(swiglu),
    QMLP_CPU_PORTABLE(linear),
};

PackedInfo info(const PackedWeight& weight) noexcept {
  PackedInfo info;
  for (int i = 0; i < weight.num_parts; ++i) {
    const PackedMatrix& packed = part_of(weight, i);
    info.bytes += packed.data.size();
    info.blocks += packed.blocks.num_blocks;
    info.exact_blocks += packed.exact_blocks;
    info.non_finite |= packed.blocks.non_finite != 0;
  }
  return info;
}

// Parts are matrices of their own.
Result<std::shared_ptr<const void>> share_part(const PackedWeight& weight, int index) {
  return weight.parts[index];
}

Status decode_packed_row(const PackedWeight& weight, std::int64_t row, std::byte* out,
                         const Stream&) noexcept {
  decode_row(part_of(weight, 0), weight.activation, row, out);
  return {};
}

Status unpack_packed_rows(const PackedWeight& weight, int part, std::int64_t row_begin,
                          std::int64_t row_count, std::byte* codes, std::byte* scales,
                          std::byte* biases) noexcept {
  const PackedMatrix& packed = part_of(weight, part);
  if (!can_unpack(packed)) return plan::codes_not_kept();
  unpack_rows(packed, row_begin, row_count, codes, scales, biases);
  return {};
}

Status activate(const MatrixView& gate, const MatrixView& up, const MutableMatrixView& out,
                const Stream& stream) noexcept {
  cpu::swiglu_activation(gate, up, out, stream);
  return {};
}

constexpr Backend kBackend = {
    kCpuKernels, pack, info, share_part, decode_packed_row, activate, nullptr, unpack_packed_rows,
};

}  // namespace

const Backend& backend() noexcept { return kBackend; }

}  // namespace qmlp::cpu
