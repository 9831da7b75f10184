#include "cuda/kernels/pack.h"

#include <algorithm>
#include <type_traits>

#include "base/checked.h"
#include "cuda/device/epilogue.cuh"
#include "cuda/kernels/launch_kernel.cuh"

// Packing and its inverses; the maths is device/packing.h.
namespace qmlp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Blocks of kernels that walk through their work.
constexpr std::int64_t kMostBlocks = 1024;

std::int64_t walking_blocks(std::int64_t items) {
  return std::clamp<std::int64_t>(ceil_div(items, kThreads), 1, kMostBlocks);
}
__device__ std::int64_t global_thread() {
  return blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
}
__device__ std::int64_t all_threads() { return gridDim.x * static_cast<std::int64_t>(kThreads); }

__global__ void __launch_bounds__(kThreads)
    scale_range_kernel(const std::uint16_t* scales, const std::uint16_t* biases, std::int64_t count,
                       ScaleRange* range) {
  ScaleRange own;
  for (std::int64_t i = global_thread(); i < count; i += all_threads()) {
    own = widened(own, scales[i], biases[i]);
  }
  // One atomic a block: they all meet in one place.
  __shared__ std::uint32_t most[kWarps], least[kWarps];
  own.most = __reduce_max_sync(0xFFFFFFFFu, own.most);
  own.least = __reduce_min_sync(0xFFFFFFFFu, own.least);
  if (threadIdx.x % 32 == 0) {
    most[threadIdx.x / 32] = own.most;
    least[threadIdx.x / 32] = own.least;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 0; i < kWarps; ++i) {
    own.most = max(own.most, most[i]);
    own.least = min(own.least, least[i]);
  }
  atomicMax(&range->most, own.most);
  atomicMin(&range->least, own.least);
}

// A warp packs one chunk of 8 rows, neighbouring warps neighbouring chunks. kBits is the half's.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ PackRows args, unsigned chunk_blocks) {
  const TileLayout& layout = args.layout;
  const SourceRows& source = args.source;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const std::int64_t block = blockIdx.x / chunk_blocks;
  const std::int64_t c =
      static_cast<std::int64_t>(blockIdx.x % chunk_blocks) * kWarps + threadIdx.x / 32;
  if (c >= layout.num_chunks) return;
  const std::int64_t row = block * kHalfRows + g;  // of the source
  const std::int64_t first_k = c * kChunkK;
  const HalfChunk to =
      half_chunk(layout, args.tiles, args.part, args.first_row / kHalfRows + block, c);
  bool finite = true;
  if constexpr (kBits == kDenseBits) {
    std::uint32_t pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const std::int64_t k = first_k + pair_k(lane, i, 0);
      const std::uint16_t first = decoded_element(source, row, k, layout.activation);
      const std::uint16_t second = decoded_element(source, row, k + 1, layout.activation);
      pairs[i] = first | static_cast<std::uint32_t>(second) << 16;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      finite = finite &&
               is_finite_element(static_cast<std::uint16_t>(pairs[i]), layout.activation) &&
               is_finite_element(static_cast<std::uint16_t>(pairs[i] >> 16), layout.activation);
    }
    store_aligned<16>(to.codes + lane * 32, pairs);
    store_aligned<16>(to.codes + lane * 32 + 16, pairs + 4);
  } else {
    // The four lanes of a row load its words side by side, and each then needs all of them.
    constexpr int kWords = 2 * kBits, kLoads = (kWords + 3) / 4;
    const std::int64_t left = source.K - first_k;
    const int words_here = left >= kChunkK ? kWords : static_cast<int>(left / 32) * kBits;
    const auto* words = reinterpret_cast<const std::uint32_t*>(
        source.codes + row * packed_row_bytes(source.K, kBits) + c * (8 * kBits));
    std::uint32_t own[kLoads], row_words[kWords];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int at = 4 * j + t;
      own[j] = row < source.rows && at < words_here ? words[at] : 0;
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      row_words[j] = __shfl_sync(0xFFFFFFFFu, own[j / 4], j % 4, 4);
    }
    store_lane(to.codes, kBits, lane, lane_words(row_words, kBits, t));

    const int half = half_of(layout, args.part, block);
    const HalfFormat& format = layout.format.half[half];
    if (lane < format.scale_sets() * kHalfRows) {
      const std::int64_t scale_row = block * kHalfRows + lane % kHalfRows;
      const std::int64_t k = first_k + lane / kHalfRows * format.group_size;
      const std::uint32_t word =
          scale_word(source, scale_row, k, layout.activation, layout.prescale[half]);
      reinterpret_cast<std::uint32_t*>(to.scales)[lane] = word;
      finite = is_finite_group(source, scale_row, k, layout.activation);
    }
  }
  if (!finite) *args.non_finite = 1;
}

// A warp copies one chunk of 8 rows of the linear's tiles, zeros beyond the source's.
__global__ void __launch_bounds__(kThreads)
    part_kernel(const __grid_constant__ PartCopy args, unsigned chunk_blocks) {
  const int lane = threadIdx.x % 32;
  const std::int64_t block = blockIdx.x / chunk_blocks;
  const std::int64_t c =
      static_cast<std::int64_t>(blockIdx.x % chunk_blocks) * kWarps + threadIdx.x / 32;
  if (c >= args.to.num_chunks) return;
  const HalfChunk to = half_chunk(args.to, args.to_tiles, 0, block, c);
  const HalfFormat& format = args.to.format.half[0];
  const HalfFormat& from_format = args.from.format.half[args.part];
  const bool exists = block < args.from.num_tiles;
  const HalfChunk from = half_chunk(args.from, const_cast<std::uint8_t*>(args.from_tiles),
                                    args.part, exists ? block : 0, c);
  const uint4 zero = {0, 0, 0, 0};
  for (int i = lane; i < format.code_bytes() / 16; i += 32) {
    reinterpret_cast<uint4*>(to.codes)[i] =
        exists ? reinterpret_cast<const uint4*>(from.codes)[i] : zero;
  }
  if (lane < format.scale_sets() * kHalfRows) {
    const int set = lane / kHalfRows * (format.group_size / from_format.group_size);
    reinterpret_cast<std::uint32_t*>(to.scales)[lane] =
        exists ? reinterpret_cast<const std::uint32_t*>(from.scales +
                                                        set * kScaleSetBytes)[lane % kHalfRows]
               : 0;
  }
}

__device__ void store_bytes(std::byte* to, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

// A thread gives back a run of 8 elements, and the scale and bias of a group that it begins.
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ UnpackRows args) {
  const TileLayout& layout = args.layout;
  const std::int64_t row_runs = (layout.K + 7) / 8;
  for (std::int64_t at = global_thread(); at < args.rows * row_runs; at += all_threads()) {
    const std::int64_t to_row = at / row_runs, run = at % row_runs, k = run * 8;
    const std::int64_t row = args.first_row + to_row, block = row / kHalfRows;
    const int g = static_cast<int>(row % kHalfRows), in_chunk = static_cast<int>(k % kChunkK);
    const HalfChunk chunk =
        half_chunk(layout, const_cast<std::uint8_t*>(args.tiles), args.part, block, k / kChunkK);
    const int half = half_of(layout, args.part, block);
    const HalfFormat& format = layout.format.half[half];
    if (format.bits == kDenseBits) {
      const int count = layout.K - k < 8 ? static_cast<int>(layout.K - k) : 8;
      for (int j = 0; j < count; ++j) {
        store_bytes(args.codes + (to_row * layout.K + k + j) * 2,
                    tile_element(chunk, format, g, in_chunk + j, layout.activation, 0), 2);
      }
      continue;
    }
    store_bytes(args.codes + (to_row * row_runs + run) * format.bits,
                source_run(chunk.codes, format.bits, g, in_chunk / 8), format.bits);
    if (k % args.group_size == 0) {
      const int set = in_chunk / format.group_size;
      const ScaleAndBias of =
          source_scales(load_aligned<std::uint32_t>(chunk.scales + set * kScaleSetBytes, g),
                        layout.activation, layout.prescale[half]);
      const std::int64_t group = to_row * (layout.K / args.group_size) + k / args.group_size;
      store_bytes(args.scales + group * 2, of.scale, 2);
      store_bytes(args.biases + group * 2, of.bias, 2);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    decode_row_kernel(const __grid_constant__ DecodeRow args) {
  const TileLayout& layout = args.layout;
  const std::int64_t block = args.row / kHalfRows;
  const int g = static_cast<int>(args.row % kHalfRows), half = half_of(layout, 0, block);
  for (std::int64_t k = global_thread(); k < layout.K; k += all_threads()) {
    const HalfChunk chunk =
        half_chunk(layout, const_cast<std::uint8_t*>(args.tiles), 0, block, k / kChunkK);
    static_cast<std::uint16_t*>(args.out)[k] =
        tile_element(chunk, layout.format.half[half], g, static_cast<int>(k % kChunkK),
                     layout.activation, layout.prescale[half]);
  }
}

// kWide: 8 elements a thread, 16-byte loads; else one.
template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationArgs args) {
  constexpr int kWidth = kWide ? 8 : 1;
  const std::int64_t columns = args.N / kWidth;
  for (std::int64_t at = global_thread(); at < args.M * columns; at += all_threads()) {
    const std::int64_t m = at / columns, n = at % columns * kWidth;
    const std::int64_t from_gate = m * args.gate_stride + n, from_up = m * args.up_stride + n;
    const std::int64_t to = m * args.out_stride + n;
    if constexpr (kWide) {
      const auto load = [](const void* p, std::int64_t i) {
        return *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(p) + i);
      };
      const uint4 gate = load(args.gate, from_gate), up = load(args.up, from_up);
      uint4 out;
      out.x = swiglu_match_pair<T>(gate.x, up.x);
      out.y = swiglu_match_pair<T>(gate.y, up.y);
      out.z = swiglu_match_pair<T>(gate.z, up.z);
      out.w = swiglu_match_pair<T>(gate.w, up.w);
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(args.out) + to) = out;
    } else {
      store<T>(args.out, to,
               swiglu_match<T>(element<T>(args.gate, from_gate), element<T>(args.up, from_up)));
    }
  }
}

// On the current device. These kernels have no dynamic shared memory, so of its facts the ordinal
// alone counts.
template <class... Parameters>
int launch(void (*kernel)(Parameters...), std::int64_t blocks, const LaunchTarget& target,
           std::type_identity_t<const Parameters&>... arguments) {
  DeviceFacts device;
  if (const cudaError_t e = cudaGetDevice(&device.ordinal); e != cudaSuccess) return e;
  device.smem_bytes = kStaticSharedBytes;
  const LaunchShape shape = {static_cast<unsigned>(blocks), kThreads, 0, false};
  return launch_kernel(kernel, shape, device, target, arguments...);
}
LaunchTarget on(cudaStream_t stream) {
  LaunchTarget target;
  target.cuda_stream = stream;
  return target;
}

template <class T>
int launch_activation(const ActivationArgs& args, const LaunchTarget& target) {
  const auto wide = [&](const void* p, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && (args.M == 1 || stride % 8 == 0);
  };
  const bool is_wide = args.N % 8 == 0 && wide(args.gate, args.gate_stride) &&
                       wide(args.up, args.up_stride) && wide(args.out, args.out_stride);
  return is_wide
             ? launch(activation_kernel<T, true>, walking_blocks(args.M * args.N / 8), target, args)
             : launch(activation_kernel<T, false>, walking_blocks(args.M * args.N), target, args);
}

}  // namespace

int launch_scale_range(const void* scales, const void* biases, std::int64_t count,
                       ScaleRange* range, cudaStream_t stream) {
  return launch(scale_range_kernel, walking_blocks(count), on(stream),
                static_cast<const std::uint16_t*>(scales),
                static_cast<const std::uint16_t*>(biases), count, range);
}

int launch_pack(const PackRows& args, cudaStream_t stream) {
  const int tile_rows = args.layout.is_swiglu ? kHalfRows : kTileRows;
  const std::int64_t row_blocks = ceil_div(args.source.rows, tile_rows) * (tile_rows / kHalfRows);
  const auto chunk_blocks = static_cast<unsigned>(ceil_div(args.layout.num_chunks, kWarps));
  const auto with = [&](auto kernel) {
    return launch(kernel, row_blocks * chunk_blocks, on(stream), args, chunk_blocks);
  };
  switch (args.layout.format.half[half_of(args.layout, args.part, 0)].bits) {
    case 2:
      return with(pack_kernel<2>);
    case 3:
      return with(pack_kernel<3>);
    case 4:
      return with(pack_kernel<4>);
    case 5:
      return with(pack_kernel<5>);
    case 6:
      return with(pack_kernel<6>);
    case 8:
      return with(pack_kernel<8>);
    default:
      return with(pack_kernel<kDenseBits>);
  }
}

int launch_part(const PartCopy& args, cudaStream_t stream) {
  const auto chunk_blocks = static_cast<unsigned>(ceil_div(args.to.num_chunks, kWarps));
  return launch(part_kernel, args.to.num_tiles * 2 * chunk_blocks, on(stream), args, chunk_blocks);
}

int launch_unpack(const UnpackRows& args, cudaStream_t stream) {
  return launch(unpack_kernel, walking_blocks(args.rows * ceil_div(args.layout.K, 8)), on(stream),
                args);
}

int launch_decode_row(const DecodeRow& args, const LaunchTarget& target) {
  return launch(decode_row_kernel, walking_blocks(args.layout.K), target, args);
}

int launch_swiglu_activation(Element element, const ActivationArgs& args,
                             const LaunchTarget& target) {
  return element == Element::bf16 ? launch_activation<Bf16>(args, target)
                                  : launch_activation<F16>(args, target);
}

}  // namespace qmlp::cuda
