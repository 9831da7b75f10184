// Cold-weight times of the ops in replayed graphs, beside a kernel-free floor (a copy of the same
// bytes is not one) and dense cuBLAS.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>

#include <dlfcn.h>

#include "base/float16.h"
#include "gpu_kernels.h"
#include "gpu_problem.h"

namespace gpu {
namespace {

using namespace qmlp;

struct Shape {
  const char* name;
  std::int64_t hidden, intermediate;
};
constexpr Shape kShapes[] = {{"SmolLM2", 576, 1536},
                             {"MiniCPM5", 1536, 4608},
                             {"Llama-8B", 4096, 14336},
                             {"Llama-70B", 8192, 28672}};

// Median microseconds a call of a graph of `calls` calls.
double time_graph(cudaStream_t stream, int calls, const std::function<void(int)>& call) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  GPU_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) call(i);
  GPU_CHECK(cudaStreamEndCapture(stream, &graph));
  GPU_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin, end;
  GPU_CHECK(cudaEventCreate(&begin));
  GPU_CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    GPU_CHECK(cudaEventRecord(begin, stream));
    GPU_CHECK(cudaGraphLaunch(executable, stream));
    GPU_CHECK(cudaEventRecord(end, stream));
    GPU_CHECK(cudaStreamSynchronize(stream));
    float ms = 0;
    GPU_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1000.0 / calls);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// cuBLAS of the machine the program runs on, so that it need not be carried: QMLP_CUBLAS names the
// file.
struct Blas {
  using Create = int (*)(void**);
  using SetStream = int (*)(void*, cudaStream_t);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int,
                       const void*, int, int, const void*, void*, int, int, int, int);
  void* handle = nullptr;
  Gemm gemm = nullptr;
  explicit Blas(cudaStream_t stream) {
    const char* path = std::getenv("QMLP_CUBLAS");
    void* library = dlopen(path != nullptr ? path : "libcublas.so.13", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) {
      std::fprintf(stderr, "no cuBLAS: %s\n", dlerror());
      return;
    }
    reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"))(&handle);
    reinterpret_cast<SetStream>(dlsym(library, "cublasSetStream_v2"))(handle, stream);
    gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
  }
};

}  // namespace

int run_bench(const std::vector<const char*>& arguments) {
  const int bits = !arguments.empty() ? std::atoi(arguments[0]) : 4;
  const int group = arguments.size() > 1 ? std::atoi(arguments[1]) : 64;
  const bool dense = arguments.size() > 2 && std::string(arguments[2]) == "dense";
  const std::string only = arguments.size() > 3 ? arguments[3] : "";
  const DeviceFacts facts = value(cuda_facts(0));
  cudaStream_t raw;
  GPU_CHECK(cudaStreamCreate(&raw));
  const CudaStream cuda{raw};
  const Stream stream = stream_of(cuda);
  const Device device{DeviceKind::cuda, 0};
  std::optional<Blas> blas;
  if (dense) blas.emplace(raw);
  Rng rng(7);
  for (const Shape& shape : kShapes) {
    if (!only.empty() && only != shape.name) continue;
    const std::int64_t H = shape.hidden, I = shape.intermediate;
    const QuantSpec spec{bits, group, DType::bf16};
    const QuantizedTensor gate = random_weight(rng, I, H, spec),
                          up = random_weight(rng, I, H, spec);
    constexpr std::int64_t kMost = 1024;
    const SwigluProblem problem{
        kMost, H, I, spec, spec, DType::bf16, Precision::match, Accumulation::tensor, 1};
    const Plan plan = value(make_plan(problem, facts));
    std::vector<PackedWeightPtr> weights = {value(pack(plan, gate.view(), up.view(), stream))};
    const std::size_t bytes = packed_info(*weights[0]).bytes;
    const int copies = std::max(2, static_cast<int>(2.0e8 / static_cast<double>(bytes)) + 1);
    while (static_cast<int>(weights.size()) < copies) {
      weights.push_back(value(pack(plan, gate.view(), up.view(), stream)));
    }
    const std::vector<std::uint16_t> x = random_rows(rng, kMost * H, DType::bf16);
    const Buffer dx(x.size() * 2), dout(static_cast<std::size_t>(kMost * I) * 2),
        workspace(plan.workspace_bytes(kMost));
    GPU_CHECK(cudaMemcpy(dx.data, x.data(), dx.bytes, cudaMemcpyHostToDevice));
    const Buffer pool(bytes * static_cast<std::size_t>(copies));
    GPU_CHECK(cudaMemset(pool.data, 0x5A, pool.bytes));
    const int calls =
        std::max(copies,
                 std::min(1000, static_cast<int>(
                                    3000 / std::max(2.0, static_cast<double>(bytes) / 4e6)))) /
        copies * copies;
    double floor = 1e9;
    for (const int grid : {132, 264, 528, 1056}) {
      for (const int threads : {256, 512, 1024}) {
        floor = std::min(floor, time_graph(raw, calls, [&](int i) {
                           launch_read(pool.at(bytes * static_cast<std::size_t>(i % copies)), bytes,
                                       dout.at(), grid, threads, raw);
                         }));
      }
    }
    std::printf("%s %lldx%lld %d bits g%d: %.2f MB, %d copies, read %.2f us\n", shape.name,
                (long long)H, (long long)I, bits, group, static_cast<double>(bytes) / 1e6, copies,
                floor);
    Buffer* dense_w = nullptr;
    Buffer* dense_out = nullptr;
    if (dense) {
      dense_w = new Buffer(static_cast<std::size_t>(2 * I * H) * 2 * 2);
      dense_out = new Buffer(static_cast<std::size_t>(kMost * 2 * I) * 2);
      fill_random(dense_w->data, dense_w->bytes / 2, raw);
      GPU_CHECK(cudaStreamSynchronize(raw));
    }
    for (const std::int64_t M : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) {
      const int n = std::max(
          2, std::min(calls, static_cast<int>(4000.0 / std::max(2.0, static_cast<double>(M) * H *
                                                                         I * 4 / 6e8))));
      const double us = time_graph(raw, n, [&](int i) {
        value(fused_swiglu(plan, *weights[static_cast<std::size_t>(i % copies)],
                           {dx.at(), M, H, H, DType::bf16, device},
                           {dout.at(), M, I, I, DType::bf16, device},
                           {{workspace.at(), workspace.bytes}}, stream));
      });
      std::printf("  M %4lld: %8.2f us  %.2f x read  %6.0f GB/s  %4.0f TFLOP/s  %s", (long long)M,
                  us, us / floor, static_cast<double>(bytes) / us / 1e3,
                  4.0 * static_cast<double>(M * H * I) / us / 1e6,
                  std::string(plan.kernel_name(M)).c_str());
      if (dense && blas->gemm != nullptr) {
        const float one = 1.0f, zero = 0.0f;
        const double dense_us = time_graph(raw, std::max(2, n / 2), [&](int i) {
          const auto* w = dense_w->at(static_cast<std::size_t>(i % 2) *
                                      static_cast<std::size_t>(2 * I * H) * 2);
          constexpr int kBf16 = 14, kCompute32 = 68, kTranspose = 1, kPlain = 0, kDefault = -1;
          blas->gemm(blas->handle, kTranspose, kPlain, static_cast<int>(2 * I), static_cast<int>(M),
                     static_cast<int>(H), &one, w, kBf16, static_cast<int>(H), dx.data, kBf16,
                     static_cast<int>(H), &zero, dense_out->data, kBf16, static_cast<int>(2 * I),
                     kCompute32, kDefault);
          launch_silu_mul(dense_out->data, dout.data, M, I, raw);
        });
        std::printf("  dense + silu*mul %.2f us", dense_us);
      }
      std::printf("\n");
    }
    delete dense_w;
    delete dense_out;
  }
  return 0;
}

}  // namespace gpu
