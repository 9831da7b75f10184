// Proves the CUDA kernels on a GPU: random problems against the CPU verifier, bit for bit.
//   gpu_check table | exact [problems] [seed] [seconds] [segments] | robust | pack [seconds] |
//   vectors FILE... | bench [key=value...]
#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "base/float16.h"
#include "gpu_problem.h"

namespace {

using namespace qmlp;
using gpu::Buffer;
using gpu::Rng;
using gpu::same;
using gpu::value;
using gpu::widened;

template <class T>
T pick(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[rng() % values.size()];
}

struct Totals {
  long long problems = 0, outputs = 0, wrong = 0, moved = 0;
};

struct HostWorkspace {
  explicit HostWorkspace(std::size_t n) : storage(n + 256) {}
  Workspace view() {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    const std::size_t skip = (256 - address % 256) % 256;
    return {{storage.data() + skip, storage.size() - skip}};
  }
  std::vector<std::byte> storage;
};

// One random problem: every kernel of the device's table, all rows at once and the last row alone.
void check_problem(Rng& rng, ThreadPool& pool, const DeviceFacts& cpu, const DeviceFacts& gpu_facts,
                   Totals& totals, bool large, int only_segments) {
  const DType type = pick(rng, {DType::bf16, DType::f16});
  const bool is_swiglu = rng() % 2 == 0;
  const auto spec = [&] {
    const int kind = static_cast<int>(rng() % 20);
    if (kind == 0) return QuantSpec::dense(pick(rng, {DType::f32, DType::f16, DType::bf16}));
    QuantSpec s{pick(rng, {2, 3, 4, 5, 6, 8}), pick(rng, {32, 64, 128}), type};
    if (kind == 1) s.scale_dtype = pick(rng, {DType::f32, DType::f16, DType::bf16});
    return s;
  };
  const QuantSpec specs[2] = {spec(), rng() % 2 == 0 ? spec() : QuantSpec{4, 32, type}};
  const std::int64_t group = std::max({specs[0].group_size, specs[1].group_size, 32});
  const std::int64_t K = group * (1 + static_cast<std::int64_t>(rng() % (large ? 40 : 9)));
  const std::int64_t N = 1 + static_cast<std::int64_t>(rng() % (large ? 700 : 150));
  const std::int64_t M = pick<std::int64_t>(
      rng, {1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 40, 64, 65, 100, 129, 257, 300});
  const int any_segments = pick(rng, {1, 1, 1, 1, 2, 4, 8});
  const int segments = only_segments != 0 ? only_segments : any_segments;
  const Precision precision = rng() % 4 == 0 ? Precision::wide : Precision::match;

  const QuantizedTensor weights[2] = {gpu::random_weight(rng, N, K, specs[0]),
                                      gpu::random_weight(rng, N, K, specs[1])};
  const std::int64_t x_stride = K + (rng() % 3 == 0 ? static_cast<std::int64_t>(rng() % 9) : 0);
  const std::int64_t out_stride = N + static_cast<std::int64_t>(rng() % 3);
  const std::size_t x_shift = rng() % 4 == 0 ? 1 : 0;  // elements: 2-byte alignment only
  std::vector<std::uint16_t> x = gpu::random_rows(rng, M * x_stride + 1, type);
  if (rng() % 16 == 0)
    x[rng() % x.size()] = pick<std::uint16_t>(rng, {0x7FFF, 0x7F80, 0x7C00, 0xFF80});
  const std::vector<std::uint16_t> bias = gpu::random_rows(rng, N, type);
  const std::vector<std::uint16_t> residual = gpu::random_rows(rng, M * out_stride, type);
  const bool has_bias = rng() % 3 == 0, has_residual = !is_swiglu && rng() % 3 == 0;
  const bool has_tap = is_swiglu && rng() % 3 == 0;

  // The CPU verifier.
  std::vector<std::uint16_t> expected(static_cast<std::size_t>(M * out_stride), 0x1234);
  std::vector<std::uint16_t> expected_tap = expected;
  const Stream cpu_stream_ = cpu_stream(pool);
  const auto host = [](std::vector<std::uint16_t>& v, std::size_t shift = 0) {
    return reinterpret_cast<std::byte*>(v.data() + shift);
  };
  const auto host_const = [](const std::vector<std::uint16_t>& v) {
    return reinterpret_cast<const std::byte*>(v.data());
  };
  const auto make = [&](const DeviceFacts& device, std::string_view force) {
    if (is_swiglu) {
      return make_plan(SwigluProblem{M, K, N, specs[0], specs[1], type, precision,
                                     Accumulation::tensor, segments},
                       device, {force});
    }
    return make_plan(LinearProblem{M, N, K, specs[0], type, Accumulation::tensor, segments}, device,
                     {force});
  };
  const auto packed_for = [&](const Plan& plan, const Stream& stream) {
    return value(is_swiglu ? pack(plan, weights[0].view(), weights[1].view(), stream)
                           : pack(plan, weights[0].view(), stream));
  };
  const auto run = [&](const Plan& plan, const PackedWeight& weight, const MatrixView& in,
                       const MutableMatrixView& out, const Workspace& workspace,
                       const Stream& stream, const std::byte* bias_at, const std::byte* residual_at,
                       std::byte* tap_at) {
    const Device device = in.device;
    if (is_swiglu) {
      SwigluEpilogue epilogue;
      epilogue.gate_bias = bias_at;
      if (tap_at != nullptr) epilogue.gate_tap = {tap_at, in.rows, N, out_stride, type, device};
      return fused_swiglu(plan, weight, in, out, workspace, stream, epilogue);
    }
    LinearEpilogue epilogue;
    epilogue.linear_bias = bias_at;
    if (residual_at != nullptr)
      epilogue.residual = {residual_at, in.rows, N, out_stride, type, device};
    return quantized_linear(plan, weight, in, out, workspace, stream, epilogue);
  };
  {
    const Plan plan = value(make(cpu, {}));
    const PackedWeightPtr weight = packed_for(plan, cpu_stream_);
    HostWorkspace workspace(plan.workspace_bytes(M));
    value(run(plan, *weight, {host(x, x_shift), M, K, x_stride, type, {}},
              {host(expected), M, N, out_stride, type, {}}, workspace.view(), cpu_stream_,
              has_bias ? host_const(bias) : nullptr, has_residual ? host_const(residual) : nullptr,
              has_tap ? host(expected_tap) : nullptr));
  }

  // The device.
  const CudaStream cuda{};
  const Stream stream = stream_of(cuda);
  const Device device{DeviceKind::cuda, 0};
  const Buffer dx(x.size() * 2), dbias(bias.size() * 2), dresidual(residual.size() * 2);
  const Buffer dout(expected.size() * 2), dtap(expected.size() * 2);
  GPU_CHECK(cudaMemcpy(dx.data, x.data(), dx.bytes, cudaMemcpyHostToDevice));
  GPU_CHECK(cudaMemcpy(dbias.data, bias.data(), dbias.bytes, cudaMemcpyHostToDevice));
  GPU_CHECK(cudaMemcpy(dresidual.data, residual.data(), dresidual.bytes, cudaMemcpyHostToDevice));
  PackedWeightPtr weight;
  for (const KernelInfo& kernel : kernel_table()) {
    if (kernel.device != DeviceKind::cuda) continue;
    const auto plan = make(gpu_facts, kernel.name);
    if (!plan) continue;
    if (weight == nullptr) weight = packed_for(*plan, stream);
    const Buffer workspace(plan->workspace_bytes(M));
    for (const std::int64_t rows : {M, std::int64_t{1}}) {
      const std::int64_t first = M - rows;
      std::vector<std::uint16_t> got(expected.size(), 0x1234), got_tap = got;
      GPU_CHECK(cudaMemcpy(dout.data, got.data(), dout.bytes, cudaMemcpyHostToDevice));
      GPU_CHECK(cudaMemcpy(dtap.data, got.data(), dtap.bytes, cudaMemcpyHostToDevice));
      // The second call finds what the first one left.
      if (rows == M) {
        GPU_CHECK(cudaMemset(workspace.data, 0xFF, std::max<std::size_t>(workspace.bytes, 16)));
      }
      const std::size_t out_at = static_cast<std::size_t>(first * out_stride) * 2;
      const Status status =
          run(*plan, *weight,
              {dx.at((x_shift + static_cast<std::size_t>(first * x_stride)) * 2), rows, K, x_stride,
               type, device},
              {dout.at(out_at), rows, N, out_stride, type, device},
              {{workspace.at(), workspace.bytes}}, stream, has_bias ? dbias.at() : nullptr,
              has_residual ? dresidual.at(out_at) : nullptr, has_tap ? dtap.at(out_at) : nullptr);
      value(status);
      GPU_CHECK(cudaDeviceSynchronize());
      GPU_CHECK(cudaMemcpy(got.data(), dout.data, dout.bytes, cudaMemcpyDeviceToHost));
      GPU_CHECK(cudaMemcpy(got_tap.data(), dtap.data, dtap.bytes, cudaMemcpyDeviceToHost));
      long long wrong = 0;
      std::string where;
      for (std::int64_t m = first; m < M; ++m) {
        for (std::int64_t n = 0; n < N; ++n) {
          const auto i = static_cast<std::size_t>(m * out_stride + n);
          const bool bad = !same(got[i], expected[i], type) ||
                           (has_tap && !same(got_tap[i], expected_tap[i], type));
          if (bad && wrong++ == 0) {
            where = "m=" + std::to_string(m) + " n=" + std::to_string(n) + " got " +
                    std::to_string(widened(got[i], type)) + " expected " +
                    std::to_string(widened(expected[i], type));
          }
        }
        for (std::int64_t n = N; n < out_stride && m < M; ++n) {
          if (got[static_cast<std::size_t>(m * out_stride + n)] != 0x1234) ++totals.moved;
        }
      }
      totals.outputs += rows * N;
      totals.wrong += wrong;
      ++totals.problems;
      if (wrong != 0) {
        std::printf(
            "WRONG %s %s S=%d N=%lld K=%lld M=%lld rows=%lld bits %d/%d group %d/%d scales %s/%s: "
            "%lld, first %s\n",
            std::string(kernel.name).c_str(), to_string(precision), segments, (long long)N,
            (long long)K, (long long)M, (long long)rows, specs[0].bits, specs[1].bits,
            specs[0].group_size, specs[1].group_size, to_string(specs[0].scale_dtype),
            to_string(specs[1].scale_dtype), wrong, where.c_str());
        if (totals.wrong > 100000 && totals.problems > 50) std::exit(1);
      }
    }
  }
}

int check_exact(long long problems, std::uint64_t seed, double seconds, int segments) {
  const DeviceFacts gpu_facts = value(cuda_facts(0));
  DeviceFacts cpu = host_facts();
  auto pool = value(ThreadPool::create(cpu.num_threads));
  Totals totals;
  Rng rng(seed);
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  while (totals.problems < problems && elapsed() < seconds) {
    check_problem(rng, *pool, cpu, gpu_facts, totals, rng() % 5 == 0, segments);
  }
  std::printf(
      "exact: seed %llu, %lld problems, %lld outputs, %lld wrong, %lld written outside, %.0f s\n",
      (unsigned long long)seed, totals.problems, totals.outputs, totals.wrong, totals.moved,
      elapsed());
  return totals.wrong == 0 && totals.moved == 0 ? 0 : 1;
}

// sigmoid_T for every bit pattern: gates through a one-feature problem's bias, against the CPU's
// table.
int check_table() {
  const DeviceFacts gpu_facts = value(cuda_facts(0));
  const DeviceFacts cpu = host_facts();
  auto pool = value(ThreadPool::create(cpu.num_threads));
  long long wrong = 0;
  for (const DType type : {DType::bf16, DType::f16}) {
    // Row m's gate is x[m] itself: one dense weight of 1. up is 1.
    const std::int64_t M = 65536, K = 32, N = 1;
    QuantizedTensor gate, up;
    gate.N = up.N = N;
    gate.K = up.K = K;
    gate.spec = up.spec = QuantSpec::dense(type);
    gate.codes.resize(K * 2);
    up.codes.resize(K * 2);
    store_float(gate.codes.data(), type, 0, 1.0f);
    store_float(up.codes.data(), type, 1, 1.0f);
    std::vector<std::uint16_t> x(M * K, 0);
    for (std::int64_t m = 0; m < M; ++m) {
      x[static_cast<std::size_t>(m * K)] = static_cast<std::uint16_t>(m);
      store_float(x.data(), type, m * K + 1, 1.0f);
    }
    const SwigluProblem problem{
        M, K, N, gate.spec, up.spec, type, Precision::match, Accumulation::tensor, 1};
    std::vector<std::uint16_t> expected(M), got(M);
    {
      const Plan plan = value(make_plan(problem, cpu));
      const Stream stream = cpu_stream(*pool);
      const PackedWeightPtr weight = value(pack(plan, gate.view(), up.view(), stream));
      HostWorkspace workspace(plan.workspace_bytes(M));
      value(fused_swiglu(plan, *weight, {reinterpret_cast<std::byte*>(x.data()), M, K, K, type, {}},
                         {reinterpret_cast<std::byte*>(expected.data()), M, N, N, type, {}},
                         workspace.view(), stream));
    }
    const Plan plan = value(make_plan(problem, gpu_facts));
    const CudaStream cuda{};
    const Stream stream = stream_of(cuda);
    const Device device{DeviceKind::cuda, 0};
    const PackedWeightPtr weight = value(pack(plan, gate.view(), up.view(), stream));
    const Buffer dx(x.size() * 2), dout(M * 2), workspace(plan.workspace_bytes(M));
    GPU_CHECK(cudaMemcpy(dx.data, x.data(), dx.bytes, cudaMemcpyHostToDevice));
    value(fused_swiglu(plan, *weight, {dx.at(), M, K, K, type, device},
                       {dout.at(), M, N, N, type, device}, {{workspace.at(), workspace.bytes}},
                       stream));
    GPU_CHECK(cudaMemcpy(got.data(), dout.data, dout.bytes, cudaMemcpyDeviceToHost));
    for (std::int64_t m = 0; m < M; ++m)
      wrong += !same(got[static_cast<std::size_t>(m)], expected[static_cast<std::size_t>(m)], type);
    std::printf("silu table %s: %lld of %lld wrong so far\n", to_string(type), wrong, (long long)M);
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string mode = argc > 1 ? argv[1] : "exact";
  const std::vector<const char*> rest(argv + std::min(argc, 2), argv + argc);
  if (mode == "bench") return gpu::run_bench(rest);
  if (mode == "table") return check_table();
  if (mode == "robust") return gpu::run_robust();
  if (mode == "pack") return gpu::run_pack(rest);
  if (mode == "vectors") return gpu::run_vectors(rest);
  const long long problems = !rest.empty() ? std::atoll(rest[0]) : 1000;
  const std::uint64_t seed = rest.size() > 1 ? std::strtoull(rest[1], nullptr, 10) : 1;
  const double seconds = rest.size() > 2 ? std::atof(rest[2]) : 400.0;
  const int segments = rest.size() > 3 ? std::atoi(rest[3]) : 0;  // 0: any
  return check_exact(problems, seed, seconds, segments);
}
