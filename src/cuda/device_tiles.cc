#include "cuda/device_tiles.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "base/try.h"
#include "cuda/kernels/pack.h"
#include "cuda/pack.h"
#include "cuda/runtime.h"
#include "plan/backend.h"

namespace qmlp::cuda {
namespace {

// What is not where kernels can use it goes through the device's memory in slices of about this.
constexpr std::int64_t kSliceBytes = std::int64_t{32} << 20;
// Of sources that are used where they are: what one launch's grid surely takes.
constexpr std::int64_t kLaunchBytes = std::int64_t{1} << 34;

// The error of a runtime call, which the runtime then forgets.
Error device_error(std::string_view op, cudaError_t error) {
  static_cast<void>(cudaGetLastError());
  return Error{error == cudaErrorMemoryAllocation ? Errc::out_of_memory : Errc::device,
               std::string(op) + ": " + error_words(error)};
}
#define QMLP_CUDA_TRY(op, call)                                                                \
  do {                                                                                         \
    if (const auto cuda_error_ = static_cast<cudaError_t>(call); cuda_error_ != cudaSuccess) { \
      return device_error(op, cuda_error_);                                                    \
    }                                                                                          \
  } while (false)

// Memory of the current device.
Result<DeviceBytes> allocate(std::string_view op, std::int64_t bytes) {
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 16));
  if (const cudaError_t e = cudaMalloc(&data, size); e != cudaSuccess) {
    Error error = device_error(op, e);
    error.message += ", " + std::to_string(size) + " bytes were asked for";
    return error;
  }
  return DeviceBytes(static_cast<std::uint8_t*>(data));
}
std::byte* bytes_of(const DeviceBytes& memory) noexcept {
  return reinterpret_cast<std::byte*>(memory.get());
}

// A stream of its own, which waits for no other, of the current device.
class OwnStream {
 public:
  OwnStream() = default;
  ~OwnStream() {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  cudaError_t create() noexcept {
    return cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  }
  cudaStream_t get() const noexcept { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Waits for a stream before memory that it uses is freed, on error paths too.
class Waits {
 public:
  explicit Waits(cudaStream_t stream) noexcept : stream_(stream) {}
  ~Waits() { cudaStreamSynchronize(stream_); }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;

 private:
  cudaStream_t stream_;
};

// Whether kernels of the current device, `ordinal`, can use memory where it is.
bool is_usable(const void* data, int ordinal, std::size_t alignment) noexcept {
  if (reinterpret_cast<std::uintptr_t>(data) % alignment != 0) return false;
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return attributes.type == cudaMemoryTypeManaged ||
         (attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal);
}

std::int64_t row_bytes(const QuantSpec& spec, std::int64_t K) noexcept {
  return spec.is_dense() ? K * static_cast<std::int64_t>(size_of(spec.scale_dtype))
                         : packed_row_bytes(K, spec.bits);
}
// Rows of a slice: whole tiles.
std::int64_t slice_rows(std::int64_t N, std::int64_t bytes_a_row, std::int64_t slice_bytes) {
  const std::int64_t fit = slice_bytes / std::max<std::int64_t>(bytes_a_row, 1);
  return std::min(round_up(N, kTileRows), std::max<std::int64_t>(fit / kTileRows, 1) * kTileRows);
}

DeviceTilesPtr make_tiles(DeviceBytes data, const TileLayout& layout, int ordinal,
                          bool first_non_finite, bool second_non_finite) {
  auto tiles = std::make_shared<DeviceTiles>();
  tiles->ordinal = ordinal;
  tiles->data = std::move(data);
  tiles->layout = layout;
  for (int h = 0; h < 2; ++h) tiles->unscale[h] = std::ldexp(1.0f, layout.prescale[h]);
  tiles->non_finite[0] = first_non_finite;
  tiles->non_finite[1] = second_non_finite;
  return tiles;
}

// What kernels find out on the way.
struct Findings {
  ScaleRange range[2];
  std::uint32_t non_finite[2] = {};
};

// One call of pack_on_device.
class Packing {
 public:
  Packing(std::span<const QuantizedTensorView> sources, DType activation, int ordinal,
          cudaStream_t stream)
      : sources_(sources), activation_(activation), ordinal_(ordinal), stream_(stream) {}

  Result<DeviceTilesPtr> run() {
    DeviceBytes tiles;
    const Waits waits(stream_);
    QMLP_ASSIGN(found_, allocate(kOp, sizeof(Findings)));
    Findings findings;
    QMLP_CUDA_TRY(kOp, copy(found_.get(), &findings, sizeof findings));
    bool scales_decide = false;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      QMLP_TRY(bring_scales(i));
      scales_decide |= needs_scale_range(sources_[i].spec, activation_);
    }
    if (scales_decide) QMLP_TRY(read(findings));
    HalfChoice choices[2] = {};
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      choices[i] = choose_half(sources_[i].spec, activation_, findings.range[i]);
    }
    QMLP_ASSIGN(const TileLayout layout, lay_out_tiles(sources_[0].N, sources_[0].K, choices,
                                                       sources_.size() == 2, activation_));
    QMLP_ASSIGN(tiles, allocate(kOp, layout.bytes()));
    for (std::size_t i = 0; i < sources_.size(); ++i) QMLP_TRY(pack_codes(i, layout, tiles.get()));
    QMLP_TRY(read(findings));
    return make_tiles(std::move(tiles), layout, ordinal_, findings.non_finite[0] != 0,
                      findings.non_finite[1] != 0);
  }

 private:
  static constexpr std::string_view kOp = "pack";

  cudaError_t copy(void* to, const void* from, std::size_t bytes) noexcept {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_);
  }
  Status read(Findings& findings) {
    QMLP_CUDA_TRY(kOp, copy(&findings, found_.get(), sizeof findings));
    QMLP_CUDA_TRY(kOp, cudaStreamSynchronize(stream_));
    return {};
  }

  Result<const std::byte*> bring(std::span<const std::byte> data, std::size_t alignment,
                                 DeviceBytes& memory) {
    if (data.empty() || is_usable(data.data(), ordinal_, alignment)) return data.data();
    QMLP_ASSIGN(memory, allocate(kOp, static_cast<std::int64_t>(data.size())));
    QMLP_CUDA_TRY(kOp, copy(memory.get(), data.data(), data.size()));
    return static_cast<const std::byte*>(bytes_of(memory));
  }
  Status bring_scales(std::size_t i) {
    const QuantizedTensorView& source = sources_[i];
    const std::size_t element = size_of(source.spec.scale_dtype);
    QMLP_ASSIGN(scales_[i], bring(source.scales, element, own_scales_[i]));
    QMLP_ASSIGN(biases_[i], bring(source.biases, element, own_biases_[i]));
    if (!needs_scale_range(source.spec, activation_) || source.scales.empty()) return {};
    auto* found = reinterpret_cast<Findings*>(found_.get());
    QMLP_CUDA_TRY(kOp, launch_scale_range(scales_[i], biases_[i],
                                          static_cast<std::int64_t>(source.scales.size() / element),
                                          &found->range[i], stream_));
    return {};
  }

  Status pack_codes(std::size_t i, const TileLayout& layout, std::uint8_t* tiles) {
    const QuantizedTensorView& source = sources_[i];
    const QuantSpec& spec = source.spec;
    if (source.N == 0 || source.K == 0) return {};
    const std::int64_t bytes_a_row = row_bytes(spec, source.K);
    const std::int64_t scales_a_row =
        spec.is_dense()
            ? 0
            : source.K / spec.group_size * static_cast<std::int64_t>(size_of(spec.scale_dtype));
    const std::size_t alignment = spec.is_dense() ? size_of(spec.scale_dtype) : 4;
    const bool usable = is_usable(source.codes.data(), ordinal_, alignment);
    const std::int64_t step =
        slice_rows(source.N, bytes_a_row, usable ? kLaunchBytes : kSliceBytes);
    if (!usable && slice_ == nullptr) {
      // Enough for the other matrix's slices too.
      std::int64_t most = 0;
      for (const QuantizedTensorView& any : sources_) {
        const std::int64_t a_row = row_bytes(any.spec, any.K);
        most = std::max(most, slice_rows(any.N, a_row, kSliceBytes) * a_row);
      }
      QMLP_ASSIGN(slice_, allocate(kOp, most));
    }
    for (std::int64_t row = 0; row < source.N; row += step) {
      const std::int64_t rows = std::min(step, source.N - row);
      const std::byte* codes = source.codes.data() + row * bytes_a_row;
      if (!usable) {
        QMLP_CUDA_TRY(kOp, copy(slice_.get(), codes, static_cast<std::size_t>(rows * bytes_a_row)));
        codes = bytes_of(slice_);
      }
      const auto scales_at = [&](const std::byte* scales) {
        return spec.is_dense() ? nullptr : scales + row * scales_a_row;
      };
      const PackRows args = {layout,
                             tiles,
                             {codes, scales_at(scales_[i]), scales_at(biases_[i]), rows, source.K,
                              spec.bits, spec.group_size, spec.scale_dtype},
                             row,
                             static_cast<int>(i),
                             &reinterpret_cast<Findings*>(found_.get())->non_finite[i]};
      QMLP_CUDA_TRY(kOp, launch_pack(args, stream_));
    }
    return {};
  }

  std::span<const QuantizedTensorView> sources_;
  DType activation_;
  int ordinal_;
  cudaStream_t stream_;
  DeviceBytes found_, own_scales_[2], own_biases_[2], slice_;
  const std::byte* scales_[2] = {};
  const std::byte* biases_[2] = {};
};

// Rows of one of unpack's outputs: written where they are, or through a slice of device memory.
struct Output {
  std::byte* to;
  std::int64_t bytes_a_row;
  bool usable;
  DeviceBytes slice;

  std::byte* at(std::int64_t row) const noexcept {
    return usable ? to + row * bytes_a_row : bytes_of(slice);
  }
};

}  // namespace

void FreeDeviceMemory::operator()(std::uint8_t* data) const noexcept { cudaFree(data); }

Result<DeviceTilesPtr> pack_on_device(std::span<const QuantizedTensorView> sources,
                                      DType activation, const Stream& stream) {
  const auto& cuda = *static_cast<const CudaStream*>(stream.handle);
  if (cuda.record != nullptr) {
    return Error{Errc::invalid_argument, "pack: stream is a recorder, needs a CUDA stream"};
  }
  const DeviceScope scope(stream.device.ordinal);
  QMLP_CUDA_TRY("pack", scope.status());
  const auto cuda_stream = static_cast<cudaStream_t>(cuda.cuda_stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  QMLP_CUDA_TRY("pack", cudaStreamIsCapturing(cuda_stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return Error{Errc::invalid_argument,
                 "pack: stream is being captured, needs one that runs what it is given"};
  }
  return Packing(sources, activation, stream.device.ordinal, cuda_stream).run();
}

Result<DeviceTilesPtr> copy_part(const DeviceTiles& tiles, int index, const QuantSpec& spec) {
  constexpr std::string_view kOp = "part";
  const int bits = tiles.layout.format.half[index].bits;
  const HalfChoice choice = {bits,
                             bits == kDenseBits ? kChunkK : std::min(spec.group_size, kChunkK),
                             tiles.layout.prescale[index]};
  QMLP_ASSIGN(const TileLayout layout, lay_out_tiles(tiles.layout.N, tiles.layout.K, &choice, false,
                                                     tiles.layout.activation));
  const DeviceScope scope(tiles.ordinal);
  QMLP_CUDA_TRY(kOp, scope.status());
  QMLP_ASSIGN(DeviceBytes memory, allocate(kOp, layout.bytes()));
  OwnStream stream;
  QMLP_CUDA_TRY(kOp, stream.create());
  const Waits waits(stream.get());
  if (layout.bytes() != 0) {
    const PartCopy args = {tiles.layout, layout, tiles.data.get(), memory.get(), index};
    QMLP_CUDA_TRY(kOp, launch_part(args, stream.get()));
  }
  QMLP_CUDA_TRY(kOp, cudaStreamSynchronize(stream.get()));
  return make_tiles(std::move(memory), layout, tiles.ordinal, tiles.non_finite[index], false);
}

Status unpack_device_rows(const PackedWeight& weight, int part, std::int64_t row_begin,
                          std::int64_t row_count, std::byte* codes, std::byte* scales,
                          std::byte* biases) noexcept {
  constexpr std::string_view kOp = "unpack_rows";
  const DeviceTiles& tiles = tiles_of(weight);
  const QuantSpec& spec = weight.spec[part];
  const bool decoded = tiles.layout.format.half[part].bits == kDenseBits;
  if (decoded && !(spec.is_dense() && spec.scale_dtype == weight.activation)) {
    return plan::codes_not_kept();
  }
  if (weight.K == 0) return {};
  const DeviceScope scope(tiles.ordinal);
  QMLP_CUDA_TRY(kOp, scope.status());
  const std::int64_t codes_a_row = row_bytes(spec, weight.K);
  const std::int64_t scales_a_row = spec.is_dense() ? 0 : weight.K / spec.group_size * 2;
  Output outputs[3] = {{codes, codes_a_row, false, {}},
                       {scales, scales_a_row, false, {}},
                       {biases, scales_a_row, false, {}}};
  bool all_usable = true;
  for (Output& output : outputs) {
    output.usable = output.bytes_a_row == 0 || is_usable(output.to, tiles.ordinal, 1);
    all_usable &= output.usable;
  }
  const std::int64_t step =
      all_usable ? row_count : slice_rows(row_count, codes_a_row, kSliceBytes);
  for (Output& output : outputs) {
    if (output.usable) continue;
    QMLP_ASSIGN(output.slice, allocate(kOp, step * output.bytes_a_row));
  }
  OwnStream stream;
  QMLP_CUDA_TRY(kOp, stream.create());
  const Waits waits(stream.get());
  for (std::int64_t row = 0; row < row_count; row += step) {
    const std::int64_t rows = std::min(step, row_count - row);
    const UnpackRows args = {tiles.layout,       tiles.data.get(),   part,
                             spec.group_size,    row_begin + row,    rows,
                             outputs[0].at(row), outputs[1].at(row), outputs[2].at(row)};
    QMLP_CUDA_TRY(kOp, launch_unpack(args, stream.get()));
    for (const Output& output : outputs) {
      if (output.usable) continue;
      QMLP_CUDA_TRY(kOp, cudaMemcpyAsync(output.to + row * output.bytes_a_row, output.slice.get(),
                                         static_cast<std::size_t>(rows * output.bytes_a_row),
                                         cudaMemcpyDefault, stream.get()));
    }
  }
  QMLP_CUDA_TRY(kOp, cudaStreamSynchronize(stream.get()));
  return {};
}

Status decode_device_row(const PackedWeight& weight, std::int64_t row, std::byte* out,
                         const Stream& stream) noexcept {
  constexpr std::string_view kOp = "decode_row";
  const DeviceTiles& tiles = tiles_of(weight);
  if (weight.K == 0) return {};
  const DeviceScope scope(tiles.ordinal);
  QMLP_CUDA_TRY(kOp, scope.status());
  DecodeRow args = {tiles.layout, tiles.data.get(), row, out};
  if (stream.handle != nullptr) {
    QMLP_CUDA_TRY(kOp, launch_decode_row(args, *static_cast<const CudaStream*>(stream.handle)));
    return {};
  }
  OwnStream own;
  QMLP_CUDA_TRY(kOp, own.create());
  CudaStream target;
  target.cuda_stream = own.get();
  DeviceBytes staging;
  const Waits waits(own.get());
  const bool usable = is_usable(out, tiles.ordinal, 2);
  if (!usable) {
    QMLP_ASSIGN(staging, allocate(kOp, weight.K * 2));
    args.out = staging.get();
  }
  QMLP_CUDA_TRY(kOp, launch_decode_row(args, target));
  if (!usable) {
    QMLP_CUDA_TRY(kOp, cudaMemcpyAsync(out, staging.get(), static_cast<std::size_t>(weight.K) * 2,
                                       cudaMemcpyDefault, own.get()));
  }
  QMLP_CUDA_TRY(kOp, cudaStreamSynchronize(own.get()));
  return {};
}

Status activate_on_device(const MatrixView& gate, const MatrixView& up,
                          const MutableMatrixView& out, const Stream& stream) noexcept {
  constexpr std::string_view kOp = "swiglu_activation";
  if (out.dtype == DType::f32) {
    return Error{Errc::unsupported, "swiglu_activation: out is f32, CUDA takes bf16 and f16"};
  }
  if (out.rows == 0 || out.cols == 0) return {};
  const DeviceScope scope(stream.device.ordinal);
  QMLP_CUDA_TRY(kOp, scope.status());
  const ActivationArgs args = {gate.data,     up.data,        out.data, gate.row_stride,
                               up.row_stride, out.row_stride, out.rows, out.cols};
  QMLP_CUDA_TRY(
      kOp, launch_swiglu_activation(out.dtype == DType::bf16 ? Element::bf16 : Element::f16, args,
                                    *static_cast<const CudaStream*>(stream.handle)));
  return {};
}

}  // namespace qmlp::cuda
