// What a launch promises besides its bits: graphs, streams, threads, big problems, several GPUs.
#include <atomic>
#include <string>
#include <thread>

#include "gpu_problem.h"

namespace gpu {
namespace {

using namespace qmlp;

// A SwiGLU with its packed weight, rows and results on one device.
struct Setup {
  Setup(std::int64_t M_, std::int64_t K_, std::int64_t N_, int bits, int ordinal,
        std::uint64_t seed)
      : M(M_),
        K(K_),
        N(N_),
        device{DeviceKind::cuda, ordinal},
        stream_handle(make_stream(ordinal)),
        cuda{stream_handle},
        stream(make(cuda, ordinal)),
        plan(value(make_plan(
            SwigluProblem{M, K, N, QuantSpec{bits, 64, DType::bf16}, QuantSpec{4, 64, DType::bf16},
                          DType::bf16, Precision::match, Accumulation::tensor, 1},
            value(cuda_facts(ordinal))))),
        x(static_cast<std::size_t>(M * K) * 2),
        out(static_cast<std::size_t>(M * N) * 2),
        workspace(plan.workspace_bytes(M)) {
    Rng rng(seed);
    const QuantizedTensor gate = random_weight(rng, N, K, {bits, 64, DType::bf16});
    const QuantizedTensor up = random_weight(rng, N, K, {4, 64, DType::bf16});
    weight = value(pack(plan, gate.view(), up.view(), stream));
    const std::vector<std::uint16_t> rows = random_rows(rng, M * K, DType::bf16);
    GPU_CHECK(cudaMemcpy(x.data, rows.data(), x.bytes, cudaMemcpyHostToDevice));
  }
  ~Setup() { cudaStreamDestroy(stream_handle); }

  static cudaStream_t make_stream(int ordinal) {
    GPU_CHECK(cudaSetDevice(ordinal));
    cudaStream_t handle;
    GPU_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    return handle;
  }
  static Stream make(const CudaStream& cuda, int ordinal) {
    Stream stream = stream_of(cuda);
    stream.device.ordinal = ordinal;
    return stream;
  }
  // Rows first .. first + rows - 1 on a stream, into `to` (all of out's rows) with a workspace.
  void call(cudaStream_t on, std::int64_t first, std::int64_t rows, const Buffer& to,
            const Buffer& space) const {
    CudaStream handle;
    handle.cuda_stream = on;
    const Stream s = make(handle, device.ordinal);
    value(fused_swiglu(
        plan, *weight,
        {x.at(static_cast<std::size_t>(first * K) * 2), rows, K, K, DType::bf16, device},
        {to.at(static_cast<std::size_t>(first * N) * 2), rows, N, N, DType::bf16, device},
        {{space.at(), space.bytes}}, s));
  }
  std::vector<std::uint16_t> read(const Buffer& from) const {
    std::vector<std::uint16_t> host(from.bytes / 2);
    GPU_CHECK(cudaMemcpy(host.data(), from.data, from.bytes, cudaMemcpyDeviceToHost));
    return host;
  }
  std::vector<std::uint16_t> reference() const {
    call(stream_handle, 0, M, out, workspace);
    GPU_CHECK(cudaStreamSynchronize(stream_handle));
    return read(out);
  }

  std::int64_t M, K, N;
  Device device;
  cudaStream_t stream_handle;
  CudaStream cuda;
  Stream stream;
  Plan plan;
  PackedWeightPtr weight;
  Buffer x, out, workspace;
};

int report(const char* what, long long wrong, long long of) {
  std::printf("robust: %s: %lld of %lld wrong\n", what, wrong, of);
  return wrong == 0 ? 0 : 1;
}

// Many threads, each with a stream of its own: direct calls of random rows, and a graph of several
// calls replayed. One packed weight for all.
int threads_and_graphs() {
  const Setup setup(200, 1024, 1536, 6, 0, 11);
  const std::vector<std::uint16_t> expected = setup.reference();
  std::atomic<long long> wrong = 0, compared = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      Rng rng(static_cast<std::uint64_t>(t) + 100);
      cudaStream_t stream;
      GPU_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      const Buffer out(setup.out.bytes), space(setup.workspace.bytes);
      const auto check = [&](std::int64_t first, std::int64_t rows) {
        const std::vector<std::uint16_t> got = setup.read(out);
        const auto begin = static_cast<std::size_t>(first * setup.N);
        for (std::size_t i = begin; i < begin + static_cast<std::size_t>(rows * setup.N); ++i) {
          wrong += got[i] != expected[i];
        }
        compared += rows * setup.N;
      };
      for (int i = 0; i < 60; ++i) {
        const auto rows = 1 + static_cast<std::int64_t>(rng() % (i % 3 == 0 ? 8 : 200));
        const auto first =
            static_cast<std::int64_t>(rng() % (201 - static_cast<std::uint64_t>(rows)));
        GPU_CHECK(cudaMemsetAsync(out.data, 0xFF, out.bytes, stream));
        setup.call(stream, first, rows, out, space);
        GPU_CHECK(cudaStreamSynchronize(stream));
        check(first, rows);
      }
      // Captured once, replayed often; pieces that cover all rows.
      cudaGraph_t graph;
      cudaGraphExec_t executable;
      GPU_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (std::int64_t first = 0; first < 200;) {
        const std::int64_t rows = std::min<std::int64_t>(200 - first, 1 + first / 2);
        setup.call(stream, first, rows, out, space);
        first += rows;
      }
      GPU_CHECK(cudaStreamEndCapture(stream, &graph));
      GPU_CHECK(cudaGraphInstantiate(&executable, graph, 0));
      for (int i = 0; i < 20; ++i) {
        GPU_CHECK(cudaMemsetAsync(out.data, 0xFF, out.bytes, stream));
        GPU_CHECK(cudaGraphLaunch(executable, stream));
        GPU_CHECK(cudaStreamSynchronize(stream));
        check(0, 200);
      }
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return report("12 threads, 12 streams, direct calls and replayed graphs", wrong, compared);
}

// A thread whose first use of CUDA is an op: every kind of kernel, on the default stream.
int fresh_threads() {
  long long wrong = 0, compared = 0;
  for (const std::int64_t M : {1, 7, 16, 200}) {
    const Setup setup(M, 1024, 1536, 6, 0, 13);
    const std::vector<std::uint16_t> expected = setup.reference();
    GPU_CHECK(cudaMemset(setup.out.data, 0xFF, setup.out.bytes));
    GPU_CHECK(cudaDeviceSynchronize());
    std::thread([&] { setup.call(nullptr, 0, M, setup.out, setup.workspace); }).join();
    GPU_CHECK(cudaDeviceSynchronize());
    const std::vector<std::uint16_t> got = setup.read(setup.out);
    for (std::size_t i = 0; i < expected.size(); ++i) wrong += got[i] != expected[i];
    compared += static_cast<long long>(expected.size());
  }
  return report("threads that have not used CUDA", wrong, compared);
}

// Eighty calls in a row, each reading what the one before wrote, with no synchronization between.
int chain() {
  const Setup setup(9, 512, 512, 4, 0, 12);
  long long wrong = 0, compared = 0;
  for (const bool slow : {true, false}) {
    static std::vector<std::uint16_t> expected;
    const Buffer a(setup.out.bytes), b(setup.out.bytes);
    GPU_CHECK(cudaMemcpy(a.data, setup.x.data, a.bytes, cudaMemcpyDeviceToDevice));
    for (int i = 0; i < 80; ++i) {
      const Buffer& from = i % 2 == 0 ? a : b;
      const Buffer& to = i % 2 == 0 ? b : a;
      const std::int64_t rows = 1 + i % 9;
      value(fused_swiglu(setup.plan, *setup.weight,
                         {from.at(), rows, 512, 512, DType::bf16, setup.device},
                         {to.at(), rows, 512, 512, DType::bf16, setup.device},
                         {{setup.workspace.at(), setup.workspace.bytes}}, setup.stream));
      if (slow) GPU_CHECK(cudaStreamSynchronize(setup.stream_handle));
    }
    GPU_CHECK(cudaStreamSynchronize(setup.stream_handle));
    const std::vector<std::uint16_t> got = setup.read(a);
    if (slow) {
      expected = got;
    } else {
      for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
      compared += static_cast<long long>(got.size());
    }
  }
  return report("80 chained calls against the same with a synchronization after each", wrong,
                compared);
}

// More outputs than 2^31: the last rows equal themselves alone.
int large() {
  const std::int64_t M = 150000, N = 14400, K = 64;
  const Setup setup(M, K, N, 4, 0, 13);
  setup.call(setup.stream_handle, 0, M, setup.out, setup.workspace);
  const Buffer alone(static_cast<std::size_t>(8 * N) * 2);
  value(fused_swiglu(
      setup.plan, *setup.weight,
      {setup.x.at(static_cast<std::size_t>((M - 8) * K) * 2), 8, K, K, DType::bf16, setup.device},
      {alone.at(), 8, N, N, DType::bf16, setup.device},
      {{setup.workspace.at(), setup.workspace.bytes}}, setup.stream));
  GPU_CHECK(cudaStreamSynchronize(setup.stream_handle));
  std::vector<std::uint16_t> got(static_cast<std::size_t>(8 * N)), expected = setup.read(alone);
  GPU_CHECK(cudaMemcpy(got.data(), setup.out.at(static_cast<std::size_t>((M - 8) * N) * 2),
                       got.size() * 2, cudaMemcpyDeviceToHost));
  long long wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != expected[i];
  return report("2.16e9 outputs, the last rows", wrong, static_cast<long long>(got.size()));
}

// Every GPU by its ordinal while another one is current.
int ordinals() {
  int count = 0;
  GPU_CHECK(cudaGetDeviceCount(&count));
  std::vector<std::uint16_t> first;
  long long wrong = 0, compared = 0;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const Setup setup(70, 512, 768, 5, ordinal, 14);
    GPU_CHECK(cudaSetDevice((ordinal + 1) % count));
    for (const std::int64_t rows : {std::int64_t{70}, std::int64_t{3}}) {
      setup.call(setup.stream_handle, 0, rows, setup.out, setup.workspace);
    }
    GPU_CHECK(cudaStreamSynchronize(setup.stream_handle));
    int current = -1;
    GPU_CHECK(cudaGetDevice(&current));
    wrong += current != (ordinal + 1) % count;
    const std::vector<std::uint16_t> got = setup.read(setup.out);
    if (ordinal == 0) {
      first = got;
      continue;
    }
    for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != first[i];
    compared += static_cast<long long>(got.size());
  }
  GPU_CHECK(cudaSetDevice(0));
  if (count < 2) std::printf("robust: another GPU than the first: not run, there is one\n");
  const Result<DeviceFacts> absent = cuda_facts(count);
  std::printf("robust: ordinal %d: %s\n", count,
              absent ? "accepted" : absent.error().message.c_str());
  return report("other GPUs beside the first", wrong + (absent ? 1 : 0), compared);
}

}  // namespace

int run_robust() { return fresh_threads() + threads_and_graphs() + chain() + large() + ordinals(); }

}  // namespace gpu
