#include "cuda/run.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <string>

#include "base/checked.h"
#include "cuda/choice.h"
#include "cuda/device_tiles.h"
#include "cuda/kernels/launch.h"
#include "cuda/runtime.h"
#include "plan/packed_weight.h"
#include "qmlp/cuda.h"

namespace qmlp {
namespace cuda {

namespace {

thread_local cudaError_t t_last_error = cudaSuccess;

bool tile_can_read(const MatrixView& x) noexcept {
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 && x.row_stride % 8 == 0;
}

}  // namespace

std::string last_error() {
  return t_last_error == cudaSuccess ? std::string() : error_words(t_last_error);
}

void* current_context() noexcept {
  using Get = int (*)(void**);
  static const Get get = [] {
    const char* const name = "cuCtxGetCurrent";
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t e = cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found);
#endif
    if (e != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      static_cast<void>(cudaGetLastError());  // the caller's next check is of its own calls
      return Get{nullptr};
    }
    return reinterpret_cast<Get>(entry);
  }();
  void* context = nullptr;
  if (get == nullptr || get(&context) != 0) return nullptr;
  return context;
}

std::size_t kernel_workspace_bytes(const plan::Kernel& kernel, const plan::Problem& problem,
                                   const DeviceFacts& device) noexcept {
  // Also where a tile kernel is meant: it hands rows that TMA cannot read to the stream kernel, and
  // gets those whose x does not fit there.
  const std::size_t fragments =
      stream_fragment_bytes(problem.M, ceil_div(problem.K, kChunkK), device);
  if (kernel.body == kStreamSm80 || (kernel.body < kTileSm90 && fragments == 0)) return fragments;
  const std::int64_t num_tiles = tiles_of(problem.N, problem.op == plan::Op::swiglu);
  return std::max(fragments, partial_bytes(problem.M, num_tiles, problem.segments));
}

int run_kernel(const plan::Kernel& kernel, const plan::OpCall& call) noexcept {
  const plan::Problem& problem = call.plan.problem;
  const DeviceFacts& device = call.plan.device;
  const DeviceTiles& tiles = tiles_of(call.weight);
  const auto* stream = static_cast<const CudaStream*>(call.stream.handle);
  const DeviceScope scope(tiles.ordinal);
  t_last_error = scope.status();
  if (t_last_error != cudaSuccess) return static_cast<int>(Errc::device);

  MatmulArgs args = {};
  args.weights = tiles.data.get();
  args.tile_bytes = tiles.layout.tile_bytes;
  args.format = tiles.layout.format;
  args.num_tiles = tiles.layout.num_tiles;
  args.num_chunks = tiles.layout.num_chunks;
  args.x = call.x.data;
  args.x_stride = call.x.row_stride;
  args.M = call.x.rows;
  args.K = problem.K;
  args.segments = call.plan.segments;
  EpilogueArgs& epilogue = args.epilogue;
  epilogue.out = call.out.data;
  epilogue.out_stride = call.out.row_stride;
  epilogue.N = problem.N;
  epilogue.linear_bias[0] = call.linear_bias[0];
  epilogue.linear_bias[1] = call.linear_bias[1];
  epilogue.residual = call.residual.data;
  epilogue.residual_stride = call.residual.row_stride;
  epilogue.gate_tap = call.gate_tap.data;
  epilogue.gate_tap_stride = call.gate_tap.row_stride;
  epilogue.unscale[0] = tiles.unscale[0];
  epilogue.unscale[1] = tiles.unscale[1];
  epilogue.is_swiglu = problem.op == plan::Op::swiglu;
  epilogue.wide = problem.precision == Precision::wide;

  const bool bf16 = problem.activation == DType::bf16;
  int status = 0;
  const auto launch = [&](auto of_bf16, auto of_f16, const auto&... first) {
    return bf16 ? of_bf16(first..., args, device, *stream)
                : of_f16(first..., args, device, *stream);
  };
  // x that TMA cannot read goes to the stream kernel, and x that does not fit beside a stream
  // kernel's rings to the tile kernel.
  const std::size_t fragment_bytes = stream_fragment_bytes(args.M, args.num_chunks, device);
  std::optional<RelayChoice> relay;
  if (kernel.body == kRelaySm90) {
    const std::size_t x_bytes =
        shared_x_bytes(args.num_chunks, std::min<std::int64_t>(args.M, kRelayRows));
    relay = choose_relay(
        {args.format, args.num_tiles, args.num_chunks, args.segments, 1, x_bytes, 0}, device);
  }
  const bool is_tile = kernel.body >= kTileSm90;
  const bool tile = is_tile || (kernel.body != kStreamSm80 && fragment_bytes != 0);
  // Tile kernels have no segments without a chunk.
  const bool tile_can_split = args.num_chunks >= args.segments;
  args.scratch = reinterpret_cast<std::uint32_t*>(call.workspace.bytes.data());
  if (relay) {
    status = launch(launch_relay_bf16_sm90, launch_relay_f16_sm90, *relay);
  } else if (tile && tile_can_split && tile_can_read(call.x)) {
    const auto config =
        is_tile ? static_cast<TileConfig>(kernel.body - kTileSm90)
                : choose_tile({args.M, args.num_tiles, args.num_chunks, args.segments,
                               common_bits(args.format.half[0].bits, args.format.half[1].bits)},
                              device);
    status = args.segments == 1
                 ? launch(launch_tile_bf16_sm90a, launch_tile_f16_sm90a, config)
                 : launch(launch_split_tile_bf16_sm90a, launch_split_tile_f16_sm90a, config);
  } else {
    if (fragment_bytes == 0) args.scratch = nullptr;
    status = kernel.body == kStreamSm80
                 ? launch_stream_sm80(bf16 ? Element::bf16 : Element::f16, args, device, *stream)
                 : launch(launch_stream_bf16_sm90, launch_stream_f16_sm90);
  }
  t_last_error = static_cast<cudaError_t>(status);
  if (status == cudaSuccess) return 0;
  static_cast<void>(cudaGetLastError());  // the caller's next check is of its own calls
  return static_cast<int>(Errc::device);
}

}  // namespace cuda

Result<DeviceFacts> cuda_facts(int ordinal) {
  int count = 0;
  if (const cudaError_t e = cudaGetDeviceCount(&count); e != cudaSuccess || count == 0) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) return Error{Errc::device, "no NVIDIA driver is installed; use --device cpu"};
    if (driver < runtime) {
      return Error{Errc::device,
                   "the NVIDIA driver supports CUDA " + std::to_string(driver / 1000) + "." +
                       std::to_string(driver % 1000 / 10) + ", this build needs " +
                       std::to_string(runtime / 1000) + "." + std::to_string(runtime % 1000 / 10)};
    }
    return Error{Errc::device, std::string("no CUDA device: ") + cudaGetErrorString(e)};
  }
  if (ordinal < 0 || ordinal >= count) {
    return Error{Errc::invalid_argument, "CUDA device " + std::to_string(ordinal) +
                                             " does not exist; there are " + std::to_string(count)};
  }
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    cudaDeviceGetAttribute(&value, name, ordinal);
    return value;
  };
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
  if (major < 8) {
    return Error{Errc::unsupported, "CUDA device " + std::to_string(ordinal) +
                                        " has compute capability " + std::to_string(major) + "." +
                                        std::to_string(minor) + ", needs 8.0 or later"};
  }
  DeviceFacts facts;
  facts.kind = DeviceKind::cuda;
  facts.ordinal = ordinal;
  facts.isa = major == 9 && minor == 0 ? Isa::sm90a : Isa::sm80;
  facts.num_sms = attribute(cudaDevAttrMultiProcessorCount);
  facts.smem_bytes = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  facts.l2_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  facts.present = true;
  return facts;
}

}  // namespace qmlp
