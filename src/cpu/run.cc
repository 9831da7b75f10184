#include "cpu/run.h"

#include <algorithm>
#include <limits>

#include "base/carver.h"
#include "base/checked.h"
#include "cpu/kernels/kernel_args.h"
#include "cpu/pack.h"
#include "cpu/sigmoid_table.h"
#include "plan/packed_weight.h"

namespace qmlp::cpu {
namespace {

const IsaFunctions& functions_of(Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return *functions_avx512();
  if (isa == Isa::avx2) return *functions_avx2();
#endif
  return *functions_portable();
}

// Rows of x that are carried at a time: as many as keep their f32 form near 8 MiB, so that a
// decoded panel is used often and x stays in the last cache. A multiple of every tile height.
std::int64_t chunk_rows(std::int64_t K, bool tensor) noexcept {
  const std::int64_t rows = (std::int64_t{8} << 20) / (std::max<std::int64_t>(K, 1) * 4);
  return std::clamp<std::int64_t>(rows / 12 * 12, 48, tensor ? 48 : 384);
}

std::int64_t num_units(const plan::Problem& problem) noexcept {
  const std::int64_t blocks = ceil_div(problem.N, kLanes);
  return problem.op == plan::Op::swiglu ? blocks : ceil_div(blocks, kUnitBlocks);
}

struct Scratch {
  std::int64_t rows = 0;  // of a chunk
  float* x_tiles = nullptr;
  float* x_exponents = nullptr;
  unsigned char* row_non_finite = nullptr;
  float* threads = nullptr;
  std::int64_t thread_floats = 0;
  std::size_t bytes = 0;
};

Scratch carve(const plan::Problem& problem, const DeviceFacts& device, std::byte* data) noexcept {
  const bool tensor = problem.accumulation == Accumulation::tensor;
  Carver carver(data);
  Scratch scratch;
  scratch.rows = std::min(problem.M, chunk_rows(problem.K, tensor));
  const std::int64_t K = tensor ? round_up(problem.K, kTensorStep) : problem.K;
  scratch.x_tiles = carver.take<float>(scratch.rows * K);
  const std::int64_t panels = std::int64_t{kUnitBlocks} * kPanelK * kLanes;
  const std::int64_t sums = scratch.rows * kUnitBlocks * kLanes;
  if (tensor) {
    scratch.x_exponents = carver.take<float>(scratch.rows * K);
    scratch.row_non_finite = carver.take<unsigned char>(scratch.rows);
    scratch.thread_floats = 2 * panels + sums * std::max(problem.segments, 1);
  } else {
    scratch.thread_floats = panels + sums;
  }
  scratch.thread_floats = round_up(scratch.thread_floats, 64);
  scratch.threads = carver.take<float>(scratch.thread_floats * device.num_threads);
  // A workspace past 2^62 bytes is one that nobody can bring.
  scratch.bytes = carver.total().value_or(std::numeric_limits<std::size_t>::max());
  return scratch;
}

}  // namespace

std::size_t kernel_workspace_bytes(const plan::Kernel&, const plan::Problem& problem,
                                   const DeviceFacts& device) noexcept {
  return carve(problem, device, nullptr).bytes;
}

int run_kernel(const plan::Kernel& kernel, const plan::OpCall& call) noexcept {
  const Plan::State& plan = call.plan;
  ThreadPool& pool = *static_cast<ThreadPool*>(call.stream.handle);
  const IsaFunctions& isa = functions_of(kernel.isa);
  const KernelFunctions& functions = kernel.body == kTensor ? isa.tensor
                                     : kernel.body == kRows ? isa.rows
                                                            : isa.tiles;

  plan::Problem problem = plan.problem;
  problem.M = call.x.rows;
  problem.segments = plan.segments;
  const Scratch scratch = carve(problem, plan.device, call.workspace.bytes.data());
  if (scratch.bytes > call.workspace.bytes.size()) return static_cast<int>(Errc::internal);

  KernelArgs args = {};
  args.x = call.x.data;
  args.x_stride = call.x.row_stride;
  args.dtype = static_cast<int>(problem.activation);
  args.N = problem.N;
  args.K = problem.K;
  for (int i = 0; i < call.weight.num_parts; ++i) {
    args.weight[i] = &static_cast<const PackedMatrix*>(call.weight.parts[i].get())->blocks;
    args.linear_bias[i] = call.linear_bias[i];
  }
  args.is_swiglu = problem.op == plan::Op::swiglu;
  args.wide = problem.precision == Precision::wide;
  args.segments = plan.segments;
  args.sigmoid_table = sigmoid_table(problem.activation);
  args.residual = call.residual.data;
  args.residual_stride = call.residual.row_stride;
  args.gate_tap = call.gate_tap.data;
  args.gate_tap_stride = call.gate_tap.row_stride;
  args.out = call.out.data;
  args.out_stride = call.out.row_stride;
  args.x_tiles = scratch.x_tiles;
  args.x_exponents = scratch.x_exponents;
  args.row_non_finite = scratch.row_non_finite;

  const std::int64_t units = num_units(problem);
  // Scratch is there for the plan's number of threads. Several shares a thread: one that is late,
  // or shares its core, leaves some to the others.
  const std::int64_t threads = std::min<std::int64_t>(plan.device.num_threads, pool.num_threads());
  const bool is_small_pool = pool.num_threads() <= plan.device.num_threads;
  constexpr std::int64_t kSharesPerThread = 4;
  const std::int64_t shares = std::min(is_small_pool ? threads * kSharesPerThread : threads, units);
  for (std::int64_t row = 0; row < problem.M; row += scratch.rows) {
    args.row_begin = row;
    args.row_count = std::min(scratch.rows, problem.M - row);
    const std::int64_t tiles = ceil_div(args.row_count, functions.tile_rows);
    // Below this many elements a second wake-up of the pool costs more than it saves.
    constexpr std::int64_t kParallelPack = 1 << 16;
    if (args.row_count * args.K < kParallelPack) {
      functions.pack_x(&args, 0, tiles);
    } else {
      pool.for_each(tiles,
                    [&](std::int64_t tile, int) { functions.pack_x(&args, tile, tile + 1); });
    }
    pool.for_each(shares, [&](std::int64_t share, int thread) {
      const std::int64_t piece = is_small_pool ? thread : share;
      functions.compute(&args, units * share / shares, units * (share + 1) / shares,
                        scratch.threads + piece * scratch.thread_floats);
    });
  }
  return 0;
}

void swiglu_activation(const MatrixView& gate, const MatrixView& up, const MutableMatrixView& out,
                       const Stream& stream) noexcept {
  static const IsaFunctions& isa = functions_of(host_facts().isa);
  const auto bytes = static_cast<std::int64_t>(size_of(out.dtype));
  static_cast<ThreadPool*>(stream.handle)->for_each(out.rows, [&](std::int64_t row, int) {
    isa.activation(static_cast<int>(out.dtype), sigmoid_table(out.dtype),
                   gate.data + row * gate.row_stride * bytes, up.data + row * up.row_stride * bytes,
                   out.data + row * out.row_stride * bytes, out.cols);
  });
}

}  // namespace qmlp::cpu
