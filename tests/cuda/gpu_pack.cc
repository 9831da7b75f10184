// Packing on the GPU and its inverses against the host's reference, byte for byte, and their times.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "base/float16.h"
#include "cuda/device_tiles.h"
#include "cuda/kernels/pack.h"
#include "gpu_problem.h"
#include "host_tiles.h"
#include "plan/packed_weight.h"

namespace gpu {
namespace {

using namespace qmlp;
using cuda::tiles_of;

struct Totals {
  long long cases = 0, bytes = 0, wrong = 0;
};

// Counts bytes that differ, and names the first case that has any.
void compare(Totals& totals, const std::string& what, const void* got, const void* want,
             std::size_t bytes) {
  const auto* a = static_cast<const unsigned char*>(got);
  const auto* b = static_cast<const unsigned char*>(want);
  long long wrong = 0;
  std::size_t first = bytes;
  if (bytes != 0 && std::memcmp(a, b, bytes) != 0) {
    for (std::size_t i = 0; i < bytes; ++i) {
      if (a[i] == b[i]) continue;
      if (wrong++ == 0) first = i;
    }
    if (totals.wrong < 100) {
      std::printf("WRONG %s: %lld of %zu bytes, first at %zu: %02x, must be %02x\n", what.c_str(),
                  wrong, bytes, first, a[first], b[first]);
    }
  }
  totals.bytes += static_cast<long long>(bytes);
  totals.wrong += wrong;
}
void expect(Totals& totals, bool good, const std::string& what) {
  if (good) return;
  ++totals.wrong;
  std::printf("WRONG %s\n", what.c_str());
}

// Where a source is when it is packed.
enum class Place { host, pinned, device, device_odd, mixed };
constexpr Place kPlaces[] = {Place::host, Place::pinned, Place::device, Place::device_odd,
                             Place::mixed};
const char* name_of(Place place) {
  constexpr const char* kNames[] = {"host", "pinned", "device", "odd device address", "mixed"};
  return kNames[static_cast<int>(place)];
}

// A copy of a weight in some memory.
class Placed {
 public:
  Placed(const QuantizedTensor& from, Place place) : view_(from.view()) {
    const Place scales = place == Place::mixed ? Place::device : place;
    view_.codes = put(view_.codes, place == Place::mixed ? Place::host : place);
    view_.scales = put(view_.scales, scales);
    view_.biases = put(view_.biases, scales);
  }
  ~Placed() {
    for (void* p : device_) cudaFree(p);
    for (void* p : pinned_) cudaFreeHost(p);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;
  const QuantizedTensorView& view() const { return view_; }

 private:
  std::span<const std::byte> put(std::span<const std::byte> data, Place place) {
    if (data.empty() || place == Place::host) return data;
    void* memory = nullptr;
    if (place == Place::pinned) {
      GPU_CHECK(cudaMallocHost(&memory, data.size()));
      pinned_.push_back(memory);
    } else {
      GPU_CHECK(cudaMalloc(&memory, data.size() + 1));
      device_.push_back(memory);
    }
    auto* to = static_cast<std::byte*>(memory) + (place == Place::device_odd ? 1 : 0);
    GPU_CHECK(cudaMemcpy(to, data.data(), data.size(), cudaMemcpyDefault));
    return {to, data.size()};
  }

  QuantizedTensorView view_;
  std::vector<void*> device_, pinned_;
};

// What scales and biases are like.
enum class Kind { usual, special, prescale, huge };
constexpr Kind kKinds[] = {Kind::usual, Kind::special, Kind::prescale, Kind::huge};

QuantizedTensor make_weight(Rng& rng, std::int64_t N, std::int64_t K, const QuantSpec& spec,
                            Kind kind) {
  QuantizedTensor w = random_weight(rng, N, K, spec);
  const DType type = spec.scale_dtype;
  const auto special = [&](std::vector<std::byte>& values, bool is_scale) {
    const auto count = static_cast<std::int64_t>(values.size() / size_of(type));
    for (std::int64_t i = 0; i < count; ++i) {
      const double uniform = static_cast<double>(rng() % 2000) / 1000.0 - 1.0;
      if (kind == Kind::special && type != DType::f32) {
        // Any bit pattern: subnormals, infinities, NaNs, zeros of both signs.
        auto bits = static_cast<std::uint16_t>(rng());
        if (rng() % 8 == 0) bits &= 0x8000;
        if (type == DType::bf16 && is_scale && (bits & 0x7F80) != 0x7F80) {
          bits = static_cast<std::uint16_t>((bits & 0x8000) | (bits & 0x7FFF) % ((127 - 5) << 7));
        }
        std::memcpy(values.data() + 2 * i, &bits, 2);
      } else if (kind == Kind::special) {
        store_float(values.data(), type, i, rng() % 64 == 0 ? HUGE_VALF : 0x1p-130f);
      } else if (kind == Kind::prescale) {
        store_float(values.data(), type, i,
                    std::ldexp(static_cast<float>(uniform), static_cast<int>(rng() % 20) - 4));
      } else if (kind == Kind::huge) {
        store_float(values.data(), type, i, std::ldexp(static_cast<float>(uniform), 21));
      }
    }
  };
  if (spec.is_dense()) {
    if (kind == Kind::special) special(w.codes, false);
  } else if (kind != Kind::usual) {
    special(w.scales, true);
    special(w.biases, false);
  }
  return w;
}

std::string describe(const QuantizedTensor& w) {
  return std::to_string(w.spec.bits) + " bits, group " + std::to_string(w.spec.group_size) + ", " +
         to_string(w.spec.scale_dtype) + ", [" + std::to_string(w.N) + ", " + std::to_string(w.K) +
         "]";
}

std::vector<std::byte> read_back(const void* data, std::size_t bytes) {
  std::vector<std::byte> host(bytes);
  GPU_CHECK(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDefault));
  return host;
}

void check_tiles(Totals& totals, const std::string& what, const PackedWeight& weight,
                 const test::HostTiles& want) {
  const cuda::DeviceTiles& got = tiles_of(weight);
  ++totals.cases;
  const bool same = static_cast<std::size_t>(got.layout.bytes()) == want.bytes.size() &&
                    got.layout.num_tiles == want.layout.num_tiles &&
                    got.unscale[0] == want.unscale[0] && got.unscale[1] == want.unscale[1] &&
                    got.layout.format.half[0].bits == want.layout.format.half[0].bits &&
                    got.layout.format.half[1].bits == want.layout.format.half[1].bits;
  expect(totals, same, what + ": another format or size");
  if (!same) return;
  const auto bytes = read_back(got.data.get(), want.bytes.size());
  compare(totals, what, bytes.data(), want.bytes.data(), bytes.size());
}

std::vector<std::uint16_t> decoded(const QuantizedTensor& w, std::int64_t row, DType type) {
  std::vector<std::uint16_t> out(static_cast<std::size_t>(w.K));
  for (std::int64_t k = 0; k < w.K; ++k) {
    store_float(out.data(), type, k, exact_element(w.view(), row, k, type));
  }
  return out;
}

// decode_row to device memory on a stream, and to host memory.
void check_rows(Totals& totals, const std::string& what, const PackedWeight& weight,
                const QuantizedTensor& source) {
  const DType type = weight.activation;
  const std::int64_t K = weight.K;
  const Buffer device_row(static_cast<std::size_t>(K) * 2);
  const CudaStream cuda{};
  for (const std::int64_t row : {std::int64_t{0}, weight.N / 2, weight.N - 1}) {
    const std::vector<std::uint16_t> want = decoded(source, row, type);
    std::vector<std::uint16_t> on_stream(want.size()), on_host(want.size());
    value(decode_row(weight, row, {device_row.at(), 1, K, K, type, {DeviceKind::cuda, 0}},
                     stream_of(cuda)));
    GPU_CHECK(
        cudaMemcpy(on_stream.data(), device_row.data, device_row.bytes, cudaMemcpyDeviceToHost));
    value(
        decode_row(weight, row, {reinterpret_cast<std::byte*>(on_host.data()), 1, K, K, type, {}}));
    for (std::size_t k = 0; k < want.size(); ++k) {
      totals.bytes += 4;
      if (same(on_stream[k], want[k], type) && same(on_host[k], want[k], type)) continue;
      if (totals.wrong++ < 100) {
        std::printf("WRONG %s: decode_row %lld at %zu: %04x and %04x, must be %04x\n", what.c_str(),
                    (long long)row, k, on_stream[k], on_host[k], want[k]);
      }
    }
  }
}

void check_unpack(Totals& totals, const std::string& what, const PackedWeight& weight, int part,
                  const QuantizedTensor& source) {
  const bool kept = tiles_of(weight).layout.format.half[part].bits != cuda::kDenseBits ||
                    (source.spec.is_dense() && source.spec.scale_dtype == weight.activation);
  const std::int64_t N = weight.N;
  const std::pair<std::int64_t, std::int64_t> ranges[] = {{0, N}, {N / 3, N - N / 3}, {N - 1, 1}};
  for (const auto& range : ranges) {
    const std::int64_t begin = range.first, count = range.second;
    const QuantSizes sizes = value(quant_sizes(count, source.K, source.spec));
    const auto skip = [&](const std::vector<std::byte>& all) {
      return all.data() + static_cast<std::int64_t>(all.size()) / N * begin;
    };
    const std::size_t bytes[3] = {sizes.codes_bytes, sizes.scales_bytes, sizes.scales_bytes};
    const std::byte* want[3] = {skip(source.codes), skip(source.scales), skip(source.biases)};
    // Host memory, device memory at an odd address, and both kinds in one call.
    for (int kind = 0; kind < 3; ++kind) {
      std::vector<std::byte> host[3];
      std::vector<std::unique_ptr<Buffer>> device;
      std::span<std::byte> spans[3];
      for (int i = 0; i < 3; ++i) {
        host[i].assign(bytes[i], std::byte{0xEE});
        device.push_back(std::make_unique<Buffer>(bytes[i] + 1));
        const bool to_host = kind == 0 || (kind == 2 && i == 1);
        spans[i] = to_host ? std::span<std::byte>(host[i])
                           : std::span<std::byte>(device.back()->at(1), bytes[i]);
      }
      const Status status = unpack_rows(weight, part, begin, count, spans[0], spans[1], spans[2]);
      if (kept) {
        value(status);
        for (int i = 0; i < 3; ++i) {
          const auto got = read_back(spans[i].data(), bytes[i]);
          compare(totals, what + ": unpacked", got.data(), want[i], bytes[i]);
        }
      } else {
        expect(totals, !status && status.error().code == Errc::unsupported,
               what + ": unpack_rows took a decoded weight");
      }
    }
  }
}

void check_info(Totals& totals, const std::string& what, const PackedWeight& weight,
                const std::vector<QuantizedTensor>& sources) {
  bool non_finite = false;
  std::int64_t exact = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const QuantizedTensor& w = sources[i];
    const bool decoded_half =
        test::host_choice(w.view(), weight.activation).bits == cuda::kDenseBits;
    if (decoded_half && !w.spec.is_dense()) exact += (w.N + 15) / 16;
    for (std::int64_t row = 0; row < w.N && !non_finite; ++row) {
      for (const std::uint16_t bits : decoded(w, row, weight.activation)) {
        const float v = widened(bits, weight.activation);
        non_finite |= !(v - v == 0.0f);
      }
    }
  }
  const PackedInfo info = packed_info(weight);
  expect(totals, info.non_finite == non_finite, what + ": non_finite");
  expect(totals, info.exact_blocks == exact, what + ": exact_blocks");
}

Plan plan_for(const std::vector<QuantizedTensor>& sources, DType type, const DeviceFacts& facts) {
  const QuantizedTensor& w = sources[0];
  if (sources.size() == 2) {
    return value(make_plan(SwigluProblem{8, w.K, w.N, w.spec, sources[1].spec, type,
                                         Precision::match, Accumulation::tensor, 1},
                           facts));
  }
  return value(make_plan(LinearProblem{8, w.N, w.K, w.spec, type, Accumulation::tensor, 1}, facts));
}

// One weight, or gate and up, from every memory; then everything that can be asked of it.
void check_case(Totals& totals, const DeviceFacts& facts, DType type,
                const std::vector<QuantizedTensor>& sources) {
  const Plan plan = plan_for(sources, type, facts);
  const CudaStream cuda{};
  const Stream stream = stream_of(cuda);
  const int count = static_cast<int>(sources.size());
  std::vector<QuantizedTensorView> views;
  std::string what = to_string(type);
  for (const QuantizedTensor& source : sources) {
    views.push_back(source.view());
    what += " " + describe(source);
  }
  const test::HostTiles want = test::pack_tiles(views.data(), count, type);
  PackedWeightPtr weight;
  for (const Place place : kPlaces) {
    const Placed first(sources[0], place), second(sources.back(), place);
    weight = value(count == 2 ? pack(plan, first.view(), second.view(), stream)
                              : pack(plan, first.view(), stream));
    check_tiles(totals, what + " from " + name_of(place), *weight, want);
  }
  check_info(totals, what, *weight, sources);
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    check_unpack(totals, what, *weight, i, sources[at]);
    const PackedWeightPtr half = value(part(weight, i));
    if (count == 2) {
      check_tiles(totals, what + " part " + std::to_string(i), *half,
                  test::pack_tiles(&views[at], 1, type));
    }
    check_info(totals, what + " part " + std::to_string(i), *half, {sources[at]});
    check_rows(totals, what, *half, sources[at]);
  }
}

template <class T>
T any(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[rng() % values.size()];
}

// Stops after some seconds where a sanitizer makes each case slow.
void check_formats(Totals& totals, const DeviceFacts& facts, double seconds) {
  Rng rng(2026);
  const auto start = std::chrono::steady_clock::now();
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
      for (const int group : {32, 64, 128}) {
        for (const Kind kind : kKinds) {
          const auto N = any<std::int64_t>(rng, {1, 7, 16, 37, 70});
          const auto K = group * any<std::int64_t>(rng, {1, 3, 11});
          std::vector<QuantizedTensor> one;
          one.push_back(make_weight(rng, N, K, {bits, group, type}, kind));
          check_case(totals, facts, type, one);
        }
        // A coded half beside one of any form.
        for (int i = 0; i < 4; ++i) {
          const std::int64_t N = any<std::int64_t>(rng, {1, 8, 11, 40, 67});
          const std::int64_t K = 128 * any<std::int64_t>(rng, {1, 2, 9}) + (group == 32 ? 32 : 0);
          const int other_group = group == 32 ? 32 : any(rng, {32, 64, 128});
          QuantSpec other{any(rng, {2, 3, 4, 5, 6, 8}), other_group, type};
          if (i == 2) other.scale_dtype = any(rng, {DType::f32, DType::f16, DType::bf16});
          if (i == 3) other = QuantSpec::dense(any(rng, {DType::f32, DType::f16, DType::bf16}));
          std::vector<QuantizedTensor> two;
          two.push_back(make_weight(rng, N, K, {bits, group, type}, kKinds[rng() % 4]));
          two.push_back(make_weight(rng, N, K, other, kKinds[rng() % 4]));
          if (rng() % 2 == 0) std::swap(two[0], two[1]);
          check_case(totals, facts, type, two);
        }
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        if (spent.count() > seconds) {
          std::printf("pack: formats: cut off after %.0f s at %s, %d bits, group %d\n",
                      spent.count(), to_string(type), bits, group);
          return;
        }
      }
    }
    for (const DType stored : {DType::f32, DType::f16, DType::bf16}) {
      for (const std::int64_t K : {1, 50, 64, 200}) {
        std::vector<QuantizedTensor> one;
        one.push_back(make_weight(rng, 21, K, QuantSpec::dense(stored), kKinds[K % 2]));
        check_case(totals, facts, type, one);
      }
    }
  }
}

// Larger than a slice of the staging buffer, with rows that do not divide it.
void check_slices(Totals& totals, const DeviceFacts& facts) {
  Rng rng(7);
  std::vector<QuantizedTensor> two;
  two.push_back(random_weight(rng, 9001, 4096, {8, 64, DType::bf16}));
  two.push_back(random_weight(rng, 9001, 4096, {3, 32, DType::bf16}));
  check_case(totals, facts, DType::bf16, two);
}

// A CPU's results for every gate, and one kernel a call through a recorder.
void check_activation(Totals& totals) {
  auto pool = value(ThreadPool::create(4));
  const Stream cpu = cpu_stream(*pool);
  const Device device{DeviceKind::cuda, 0};
  Rng rng(5);
  for (const DType type : {DType::bf16, DType::f16}) {
    // Strides and addresses that take whole words, and ones that do not.
    struct Shape {
      std::int64_t N, stride, shift;
    };
    for (const auto [N, stride, shift] :
         {Shape{4096, 4096, 0}, Shape{4096, 4104, 8}, Shape{4096, 4099, 1}, Shape{4093, 4093, 0}}) {
      const std::int64_t M = 17;  // every gate at least once
      const auto count = static_cast<std::size_t>(M * stride + shift);
      std::vector<std::uint16_t> gate(count), up(count), want(count, 0x1234);
      for (std::size_t i = 0; i < count; ++i) gate[i] = static_cast<std::uint16_t>(i);
      for (std::size_t i = 0; i < count; ++i) {
        up[i] = i % 5 == 0 ? static_cast<std::uint16_t>(rng()) : random_rows(rng, 1, type)[0];
      }
      const auto view = [skip = shift](std::vector<std::uint16_t>& v) {
        return reinterpret_cast<std::byte*>(v.data() + skip);
      };
      value(swiglu_activation({view(gate), M, N, stride, type, {}},
                              {view(up), M, N, stride, type, {}},
                              {view(want), M, N, stride, type, {}}, cpu));
      const Buffer dgate(count * 2), dup(count * 2), dout(count * 2);
      const auto at = static_cast<std::size_t>(shift) * 2;
      cudaStream_t handle;
      GPU_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
      CudaStream cuda;
      cuda.cuda_stream = handle;
      for (const bool in_place : {false, true}) {
        std::vector<std::uint16_t> got(count, 0x1234);
        GPU_CHECK(cudaMemcpy(dgate.data, gate.data(), count * 2, cudaMemcpyDefault));
        GPU_CHECK(cudaMemcpy(dup.data, up.data(), count * 2, cudaMemcpyDefault));
        GPU_CHECK(cudaMemcpy(dout.data, got.data(), count * 2, cudaMemcpyDefault));
        GPU_CHECK(cudaDeviceSynchronize());
        const Buffer& to = in_place ? dup : dout;
        value(swiglu_activation({dgate.at(at), M, N, stride, type, device},
                                {dup.at(at), M, N, stride, type, device},
                                {to.at(at), M, N, stride, type, device}, stream_of(cuda)));
        GPU_CHECK(cudaStreamSynchronize(handle));
        GPU_CHECK(cudaMemcpy(got.data(), to.data, count * 2, cudaMemcpyDefault));
        ++totals.cases;
        for (std::size_t i = 0; i < count; ++i) {
          totals.bytes += 2;
          const std::int64_t n = (static_cast<std::int64_t>(i) - shift) % stride;
          const bool inside = static_cast<std::int64_t>(i) >= shift && n < N;
          if (inside ? same(got[i], want[i], type) : got[i] == (in_place ? up[i] : 0x1234)) {
            continue;
          }
          if (totals.wrong++ < 100) {
            std::printf(
                "WRONG swiglu_activation %s stride %lld shift %lld: gate %04x up %04x is %04x, "
                "must be %04x\n",
                to_string(type), (long long)stride, (long long)shift, gate[i], up[i], got[i],
                want[i]);
          }
        }
      }
      cudaStreamDestroy(handle);
    }
  }
  // A recorder gets the kernels instead.
  static long long launches = 0;
  CudaStream recorder;
  recorder.record = [](void*, const CudaLaunch& launch) {
    const bool whole = launch.function != nullptr && launch.params != nullptr &&
                       launch.grid[0] != 0 && launch.block[0] != 0;
    launches += whole ? 1 : 1000;
    return launches != 2;
  };
  const Buffer rows(4096);
  const MutableMatrixView out{rows.at(), 4, 64, 64, DType::bf16, device};
  const MatrixView in{rows.at(), 4, 64, 64, DType::bf16, device};
  value(swiglu_activation(in, in, out, stream_of(recorder)));
  const Status refused = swiglu_activation(in, in, out, stream_of(recorder));
  expect(totals, launches == 2 && !refused, "swiglu_activation through a recorder");
  if (!refused) std::printf("pack: a recorder that refuses: %s\n", refused.error().message.c_str());
}

std::size_t free_bytes() {
  std::size_t free = 0, total = 0;
  GPU_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

// A packed weight and one source matrix are all that packing takes; less is one clear error.
void check_memory(Totals& totals, const DeviceFacts& facts) {
  Rng rng(3);
  std::vector<QuantizedTensor> two;
  for (int i = 0; i < 2; ++i) two.push_back(random_weight(rng, 14336, 4096, {4, 64, DType::bf16}));
  const Plan plan = plan_for(two, DType::bf16, facts);
  const CudaStream cuda{};
  const auto pack_both = [&] { return pack(plan, two[0].view(), two[1].view(), stream_of(cuda)); };
  std::size_t packed = 0;
  {
    const PackedWeightPtr weight = value(pack_both());
    packed = packed_info(*weight).bytes;
  }
  const std::size_t source = two[0].codes.size() + 2 * two[0].scales.size();
  const std::size_t before = free_bytes();
  for (int i = 0; i < 20; ++i) value(pack_both());
  expect(totals, free_bytes() == before, "memory: packing twenty times leaks");
  constexpr std::size_t kLittle = std::size_t{16} << 20;
  {
    const Buffer filler(before - packed - source - kLittle);
    const auto weight = pack_both();
    expect(totals, weight.has_value(), "memory: " + (weight ? "" : weight.error().message));
  }
  {
    const Buffer filler(before - packed);
    const std::size_t left = free_bytes();
    const auto weight = pack_both();
    expect(totals, !weight && weight.error().code == Errc::out_of_memory, "memory: too little");
    if (!weight) std::printf("pack: too little memory: %s\n", weight.error().message.c_str());
    const std::size_t after = free_bytes();  // more where the driver let go of what it had kept
    expect(totals, after >= left,
           "memory: a failed packing leaks, free bytes " + std::to_string(left) + " before, " +
               std::to_string(after) + " after");
  }
  expect(totals, pack_both().has_value(), "memory: packing after a failure");
  cudaStream_t stream;
  GPU_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  GPU_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  CudaStream captured;
  captured.cuda_stream = stream;
  const auto weight = pack(plan, two[0].view(), two[1].view(), stream_of(captured));
  expect(totals, !weight, "packing on a stream that is captured");
  if (!weight) std::printf("pack: %s\n", weight.error().message.c_str());
  cudaGraph_t graph;
  GPU_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  totals.cases += 5;
}

// Packing for one GPU from another's memory while a third is current.
void check_ordinals(Totals& totals) {
  int count = 0;
  GPU_CHECK(cudaGetDeviceCount(&count));
  if (count < 2) {
    std::printf("pack: sources on another GPU: not run, there is one GPU\n");
    return;
  }
  Rng rng(9);
  std::vector<QuantizedTensor> one;
  one.push_back(random_weight(rng, 100, 512, {4, 64, DType::bf16}));
  const QuantizedTensorView view = one[0].view();
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    GPU_CHECK(cudaSetDevice((ordinal + 1) % count));
    const Placed source(one[0], Place::device);
    const Plan plan = plan_for(one, DType::bf16, value(cuda_facts(ordinal)));
    const CudaStream cuda{};
    const PackedWeightPtr weight = value(pack(plan, source.view(), stream_of(cuda, ordinal)));
    int current = -1;
    GPU_CHECK(cudaGetDevice(&current));
    expect(totals, current == (ordinal + 1) % count, "the current device was changed");
    check_tiles(totals, "from another GPU", *weight, test::pack_tiles(&view, 1, DType::bf16));
    check_unpack(totals, "to another GPU", *weight, 0, one[0]);
  }
  GPU_CHECK(cudaSetDevice(0));
}

template <class Call>
double milliseconds(const Call& call) {
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A gate and up of Llama-8B: calls from host and device memory, and the kernels alone.
void time_packing(const DeviceFacts& facts) {
  Rng rng(1);
  const CudaStream cuda{};
  const Stream stream = stream_of(cuda);
  for (const int bits : {2, 3, 4, 5, 6, 8, 16}) {
    const QuantSpec spec =
        bits == 16 ? QuantSpec::dense(DType::bf16) : QuantSpec{bits, 64, DType::bf16};
    std::vector<QuantizedTensor> two(2);
    for (QuantizedTensor& w : two) {
      w.N = 14336;
      w.K = 4096;
      w.spec = spec;
      const QuantSizes sizes = value(quant_sizes(w.N, w.K, spec));
      w.codes.resize(sizes.codes_bytes);
      w.scales.assign(sizes.scales_bytes, std::byte{0x3C});  // 0.0115
      w.biases.assign(sizes.scales_bytes, std::byte{0x3C});
      auto* words = reinterpret_cast<std::uint32_t*>(w.codes.data());
      for (std::size_t i = 0; i < w.codes.size() / 4; ++i) {
        words[i] = static_cast<std::uint32_t>(rng()) & 0x3FFF3FFFu;
      }
    }
    const Plan plan = plan_for(two, DType::bf16, facts);
    const Placed gate(two[0], Place::device), up(two[1], Place::device);
    PackedWeightPtr weight;
    const double host_ms =
        milliseconds([&] { weight = value(pack(plan, two[0].view(), two[1].view(), stream)); });
    const double device_ms =
        milliseconds([&] { weight = value(pack(plan, gate.view(), up.view(), stream)); });
    const double part_ms = milliseconds([&] { static_cast<void>(value(part(weight, 1))); });
    const Buffer codes(two[0].codes.size()), scales(two[0].scales.size()),
        biases(two[0].scales.size());
    const double unpack_ms = milliseconds([&] {
      value(unpack_rows(*weight, 0, 0, 14336, {codes.at(), codes.bytes},
                        {scales.at(), scales.bytes}, {biases.at(), biases.bytes}));
    });
    // The kernels of both matrices.
    const cuda::DeviceTiles& tiles = tiles_of(*weight);
    const Buffer found(256);
    const auto kernels = [&] {
      for (int i = 0; i < 2; ++i) {
        const QuantizedTensorView& view = i == 0 ? gate.view() : up.view();
        if (bits != 16) {
          GPU_CHECK(static_cast<cudaError_t>(
              cuda::launch_scale_range(view.scales.data(), view.biases.data(),
                                       static_cast<std::int64_t>(view.scales.size()) / 2,
                                       static_cast<cuda::ScaleRange*>(found.data), nullptr)));
        }
        const cuda::PackRows args = {tiles.layout,
                                     tiles.data.get(),
                                     {view.codes.data(), view.scales.data(), view.biases.data(),
                                      view.N, view.K, spec.bits, spec.group_size, spec.scale_dtype},
                                     0,
                                     i,
                                     static_cast<std::uint32_t*>(found.data) + 16};
        GPU_CHECK(static_cast<cudaError_t>(cuda::launch_pack(args, nullptr)));
      }
    };
    kernels();
    cudaEvent_t begin, end;
    GPU_CHECK(cudaEventCreate(&begin));
    GPU_CHECK(cudaEventCreate(&end));
    GPU_CHECK(cudaEventRecord(begin));
    for (int i = 0; i < 10; ++i) kernels();
    GPU_CHECK(cudaEventRecord(end));
    GPU_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    GPU_CHECK(cudaEventElapsedTime(&ms, begin, end));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    const double source_bytes =
        2.0 * static_cast<double>(two[0].codes.size() + 2 * two[0].scales.size());
    const double all_bytes = source_bytes + static_cast<double>(packed_info(*weight).bytes);
    std::printf(
        "{\"op\": \"pack\", \"bits\": %d, \"K\": 4096, \"N\": 14336, \"host_ms\": %.2f, "
        "\"device_ms\": %.2f, \"kernels_us\": %.1f, \"GB_per_s\": %.0f, \"part_ms\": %.2f, "
        "\"unpack_ms\": %.2f}\n",
        bits, host_ms, device_ms, ms * 100.0, all_bytes / (ms * 1e5), part_ms, unpack_ms);
  }
}

}  // namespace

int run_pack(const std::vector<const char*>& arguments) {
  const DeviceFacts facts = value(cuda_facts(0));
  Totals totals;
  const double seconds = arguments.empty() ? 0.0 : std::atof(arguments[0]);
  check_formats(totals, facts, seconds > 0.0 ? seconds : 1e9);
  std::printf("pack: formats: %lld weights, %lld bytes, %lld wrong\n", totals.cases, totals.bytes,
              totals.wrong);
  check_activation(totals);
  if (seconds == 0.0) {
    check_slices(totals, facts);
    check_memory(totals, facts);
    check_ordinals(totals);
  }
  std::printf("pack: %lld weights and calls, %lld bytes compared, %lld wrong\n", totals.cases,
              totals.bytes, totals.wrong);
  if (seconds == 0.0) time_packing(facts);
  return totals.wrong == 0 ? 0 : 1;
}

}  // namespace gpu
