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

struct Case {
  const char* shape;
  const char* op;  // "swiglu", or a linear's name in a model
  std::int64_t K, N;
};
constexpr Case kCases[] = {
    {"SmolLM2", "swiglu", 576, 1536},    {"MiniCPM5", "swiglu", 1536, 4608},
    {"Llama-8B", "swiglu", 4096, 14336}, {"Llama-70B", "swiglu", 8192, 28672},
    {"SmolLM2", "q", 576, 576},          {"SmolLM2", "k", 576, 192},
    {"SmolLM2", "down", 1536, 576},      {"SmolLM2", "head", 576, 49152},
    {"MiniCPM5", "q", 1536, 1536},       {"MiniCPM5", "k", 1536, 256},
    {"MiniCPM5", "down", 4608, 1536},    {"Llama-8B", "q", 4096, 4096},
    {"Llama-8B", "k", 4096, 1024},       {"Llama-8B", "down", 14336, 4096},
    {"Llama-8B", "head", 4096, 128256},  {"Llama-70B", "q", 8192, 8192},
    {"Llama-70B", "k", 8192, 1024},      {"Llama-70B", "down", 28672, 8192},
    {"Llama-70B", "head", 8192, 128256},
};

// key=value arguments.
struct Options {
  std::vector<int> bits = {4}, groups = {64};
  std::vector<std::int64_t> tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
  std::string shape, op;  // empty: all; op "linear": all but swiglu
  std::vector<int> segments = {1};
  bool dense = false;
  // Kernels of the table beside the chosen one, and their bits compared: those whose names have one
  // of these in them, or every one.
  std::optional<std::vector<std::string>> all;
};
template <class T>
std::vector<T> numbers(const std::string& text) {
  std::vector<T> list;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t used = 0;
    list.push_back(static_cast<T>(std::stoll(text.substr(at), &used)));
    at += used + 1;
  }
  return list;
}
Options parse(const std::vector<const char*>& arguments) {
  Options options;
  for (const std::string text : arguments) {
    const std::size_t equals = text.find('=');
    const std::string key = text.substr(0, equals);
    const std::string word = equals == std::string::npos ? "" : text.substr(equals + 1);
    if (key == "bits") {
      options.bits = numbers<int>(word);
    } else if (key == "group") {
      options.groups = numbers<int>(word);
    } else if (key == "m") {
      options.tokens = numbers<std::int64_t>(word);
    } else if (key == "shape") {
      options.shape = word;
    } else if (key == "op") {
      options.op = word;
    } else if (key == "segments") {
      options.segments = numbers<int>(word);
    } else if (key == "dense") {
      options.dense = true;
    } else if (key == "all") {
      options.all.emplace();
      for (std::size_t at = 0; at < word.size();) {
        const std::size_t end = std::min(word.find(',', at), word.size());
        options.all->push_back(word.substr(at, end - at));
        at = end + 1;
      }
    } else {
      std::fprintf(stderr, "bench: unknown argument %s\n", text.c_str());
      std::exit(2);
    }
  }
  return options;
}
bool is_named(const std::vector<std::string>& pieces, const std::string& name) {
  return pieces.empty() || std::any_of(pieces.begin(), pieces.end(), [&](const std::string& piece) {
           return name.find(piece) != std::string::npos;
         });
}
bool wanted(const Options& options, const Case& c) {
  if (!options.shape.empty() && options.shape != c.shape) return false;
  if (options.op.empty() || options.op == c.op) return true;
  return options.op == "linear" && std::string(c.op) != "swiglu";
}

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

// One weight of a case, in as many copies as pass the L2 three times.
struct Problem {
  Plan plan;
  std::vector<PackedWeightPtr> copies;
  std::size_t bytes = 0;

  Problem(const Case& c, const QuantSpec& spec, std::int64_t most, int segments,
          const DeviceFacts& facts, const Stream& stream, Rng& rng)
      : plan(value(make(c, spec, most, segments, facts))) {
    const bool swiglu = std::string(c.op) == "swiglu";
    const QuantizedTensor first = random_weight(rng, c.N, c.K, spec);
    const QuantizedTensor second = swiglu ? random_weight(rng, c.N, c.K, spec) : QuantizedTensor();
    const auto add = [&] {
      copies.push_back(value(swiglu ? pack(plan, first.view(), second.view(), stream)
                                    : pack(plan, first.view(), stream)));
    };
    add();
    bytes = packed_info(*copies[0]).bytes;
    const int count = std::max(2, static_cast<int>(1.9e8 / static_cast<double>(bytes)) + 1);
    while (static_cast<int>(copies.size()) < count) add();
  }

  static Result<Plan> make(const Case& c, const QuantSpec& spec, std::int64_t most, int segments,
                           const DeviceFacts& facts, const PlanOptions& options = {}) {
    if (std::string(c.op) == "swiglu") {
      return make_plan(SwigluProblem{most, c.K, c.N, spec, spec, DType::bf16, Precision::match,
                                     Accumulation::tensor, segments},
                       facts, options);
    }
    return make_plan(
        LinearProblem{most, c.N, c.K, spec, DType::bf16, Accumulation::tensor, segments}, facts,
        options);
  }
};

// The least of several launch shapes of a kernel that only reads that many bytes.
double read_time(cudaStream_t stream, std::size_t bytes, int copies, int calls, std::byte* sink) {
  const Buffer pool(bytes * static_cast<std::size_t>(copies));
  GPU_CHECK(cudaMemset(pool.data, 0x5A, pool.bytes));
  double least = 1e9;
  for (const int grid : {132, 264, 528, 1056}) {
    for (const int threads : {256, 512, 1024}) {
      least = std::min(least, time_graph(stream, calls, [&](int i) {
                         launch_read(pool.at(bytes * static_cast<std::size_t>(i % copies)), bytes,
                                     sink, grid, threads, stream);
                       }));
    }
  }
  return least;
}

// [M, K] x [N, K] in bf16, and for a SwiGLU (N both halves) the kernel that follows.
double dense_time(const Blas& blas, cudaStream_t stream, const Case& c, std::int64_t M,
                  const Buffer& weights, int copies, const Buffer& x, const Buffer& product,
                  const Buffer& out, int calls) {
  const bool swiglu = std::string(c.op) == "swiglu";
  const auto N = static_cast<int>(swiglu ? 2 * c.N : c.N), K = static_cast<int>(c.K);
  const std::size_t bytes = static_cast<std::size_t>(N) * static_cast<std::size_t>(K) * 2;
  const float one = 1.0f, zero = 0.0f;
  constexpr int kBf16 = 14, kCompute32 = 68, kTranspose = 1, kPlain = 0, kDefault = -1;
  return time_graph(stream, calls, [&](int i) {
    blas.gemm(blas.handle, kTranspose, kPlain, N, static_cast<int>(M), K, &one,
              weights.at(static_cast<std::size_t>(i % copies) * bytes), kBf16, K, x.data, kBf16, K,
              &zero, product.data, kBf16, N, kCompute32, kDefault);
    if (swiglu) launch_silu_mul(product.data, out.data, M, c.N, stream);
  });
}

void bench_case(const Case& c, int bits, int group, int segments, const Options& options,
                const DeviceFacts& facts, cudaStream_t raw, const Blas* blas) {
  const std::int64_t most = *std::max_element(options.tokens.begin(), options.tokens.end());
  const CudaStream cuda{raw};
  const Stream stream = stream_of(cuda);
  const Device device{DeviceKind::cuda, 0};
  const bool swiglu = std::string(c.op) == "swiglu";
  Rng rng(7);
  const Problem problem(c, {bits, group, DType::bf16}, most, segments, facts, stream, rng);
  const auto copies = static_cast<int>(problem.copies.size());
  const std::vector<std::uint16_t> host_x = random_rows(rng, most * c.K, DType::bf16);
  const Buffer x(host_x.size() * 2), out(static_cast<std::size_t>(most * c.N) * 2);
  GPU_CHECK(cudaMemcpy(x.data, host_x.data(), x.bytes, cudaMemcpyHostToDevice));
  // Some 3 ms a replay, whole rounds of the copies.
  const auto calls_for = [&](double microseconds) {
    return std::max(1, std::min(1000, static_cast<int>(3000 / microseconds)) / copies) * copies;
  };
  const double read = read_time(raw, problem.bytes, copies,
                                calls_for(static_cast<double>(problem.bytes) / 4e6 + 2), out.at());
  std::optional<Buffer> dense_weights, product;
  int dense_copies = 0;
  if (blas != nullptr) {
    const std::int64_t N = swiglu ? 2 * c.N : c.N;
    const auto bytes = static_cast<std::size_t>(N * c.K) * 2;
    dense_copies = std::max(2, static_cast<int>(1.9e8 / static_cast<double>(bytes)) + 1);
    dense_weights.emplace(bytes * static_cast<std::size_t>(dense_copies));
    product.emplace(static_cast<std::size_t>(most * N) * 2);
    fill_random(dense_weights->data, dense_weights->bytes / 2, raw);
    GPU_CHECK(cudaStreamSynchronize(raw));
  }
  for (const std::int64_t M : options.tokens) {
    const double flops = (swiglu ? 4.0 : 2.0) * static_cast<double>(M * c.K * c.N);
    const int calls = calls_for(std::max(read, flops / 6e8));
    const MatrixView in{x.at(), M, c.K, c.K, DType::bf16, device};
    const MutableMatrixView to{out.at(), M, c.N, c.N, DType::bf16, device};
    const auto time_plan = [&](const Plan& plan) {
      const Buffer workspace(plan.workspace_bytes(M));
      return time_graph(raw, calls, [&](int i) {
        const PackedWeight& weight = *problem.copies[static_cast<std::size_t>(i % copies)];
        const Workspace space{{workspace.at(), workspace.bytes}};
        value(swiglu ? fused_swiglu(plan, weight, in, to, space, stream)
                     : quantized_linear(plan, weight, in, to, space, stream));
      });
    };
    const double us = time_plan(problem.plan);
    std::printf(
        "{\"shape\": \"%s\", \"op\": \"%s\", \"segments\": %d, \"K\": %lld, \"N\": %lld, \"bits\": "
        "%d, \"group\": "
        "%d, "
        "\"M\": %lld, \"us\": %.2f, \"read_us\": %.2f, \"bytes\": %zu, \"kernel\": \"%s\"",
        c.shape, c.op, problem.plan.segments(), (long long)c.K, (long long)c.N, bits, group,
        (long long)M, us, read, problem.bytes, std::string(problem.plan.kernel_name(M)).c_str());
    if (blas != nullptr) {
      std::printf(", \"dense_us\": %.2f",
                  dense_time(*blas, raw, c, M, *dense_weights, dense_copies, x, *product, out,
                             std::max(dense_copies, calls / 2)));
    }
    if (options.all) {
      std::vector<std::uint16_t> first, again(out.bytes / 2);
      int different = 0;
      std::printf(", \"all\": {");
      for (const KernelInfo& kernel : kernel_table()) {
        const std::string name(kernel.name);
        if (kernel.device != DeviceKind::cuda || name.find(swiglu ? "swiglu_" : "linear_") != 0 ||
            name.find("_bf16_") == std::string::npos || !is_named(*options.all, name)) {
          continue;
        }
        PlanOptions force;
        force.force_kernel = kernel.name;
        const auto plan =
            Problem::make(c, {bits, group, DType::bf16}, most, segments, facts, force);
        if (!plan) continue;  // not of so many segments
        GPU_CHECK(cudaMemset(out.data, 0x7A, out.bytes));
        const double time = time_plan(*plan);
        GPU_CHECK(cudaMemcpy(again.data(), out.data, out.bytes, cudaMemcpyDeviceToHost));
        std::printf("%s\"%s\": %.2f", first.empty() ? "" : ", ", name.c_str(), time);
        if (first.empty()) first = again;
        different += first != again;
      }
      std::printf("}, \"different\": %d", different);
    }
    std::printf("}\n");
  }
}

}  // namespace

// One line of JSON a point: cold weights, replayed graphs, medians.
int run_bench(const std::vector<const char*>& arguments) {
  const Options options = parse(arguments);
  const DeviceFacts facts = value(cuda_facts(0));
  cudaStream_t stream;
  GPU_CHECK(cudaStreamCreate(&stream));
  std::optional<Blas> blas;
  if (options.dense) {
    blas.emplace(stream);
    if (blas->gemm == nullptr) return 3;
  }
  for (const Case& c : kCases) {
    if (!wanted(options, c)) continue;
    for (const int bits : options.bits) {
      for (const int group : options.groups) {
        if (c.K % group != 0) continue;
        for (const int segments : options.segments) {
          bench_case(c, bits, group, segments, options, facts, stream, blas ? &*blas : nullptr);
        }
      }
    }
  }
  return 0;
}

}  // namespace gpu
