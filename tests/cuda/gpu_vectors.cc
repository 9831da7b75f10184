// What MLX computed on a GPU (safetensors, layout of tests/data/README.md), run by every kernel
// here: rows of M >= 8 must have MLX's bits.
#include <cstring>
#include <map>
#include <string>

#include "gpu_problem.h"
#include "io/safetensors.h"

namespace gpu {
namespace {

using namespace qmlp;

struct Vectors {
  SafetensorsFile file;
  std::map<std::string, const SafetensorsEntry*> entries;

  explicit Vectors(const std::string& path) : file(value(SafetensorsFile::open(path))) {
    for (const SafetensorsEntry& entry : file.header().entries) entries[entry.name] = &entry;
  }
  const SafetensorsEntry* find(const std::string& name) const {
    const auto at = entries.find(name);
    return at == entries.end() ? nullptr : at->second;
  }
  std::vector<std::byte> data(const SafetensorsEntry& entry) const {
    const auto bytes = file.data(entry);
    return {bytes.begin(), bytes.end()};
  }
};

struct Count {
  long long cases = 0, runs = 0, outputs = 0, wrong = 0;
};

QuantizedTensor weight_of(const Vectors& vectors, const std::string& prefix,
                          const std::string& suffix, std::int64_t K, DType type) {
  const SafetensorsEntry *w = vectors.find(prefix + ".w" + suffix),
                         *scales = vectors.find(prefix + ".scales" + suffix),
                         *biases = vectors.find(prefix + ".biases" + suffix);
  QuantizedTensor weight;
  weight.N = w->shape[0];
  weight.K = K;
  weight.spec = {static_cast<int>(w->shape[1] * 32 / K), static_cast<int>(K / scales->shape[1]),
                 type};
  weight.codes = vectors.data(*w);
  weight.scales = vectors.data(*scales);
  weight.biases = vectors.data(*biases);
  return weight;
}

// Runs every kernel of the GPU's table that takes the problem and compares it with MLX's `y`.
template <class MakePlan, class Call>
void check_kernels(const std::string& name, const SafetensorsEntry& y, const Vectors& vectors,
                   const DeviceFacts& facts, DType type, MakePlan make, Call call, Count& count) {
  const std::vector<std::byte> expected = vectors.data(y);
  const Buffer out(expected.size());
  ++count.cases;
  for (const KernelInfo& kernel : kernel_table()) {
    if (kernel.device != DeviceKind::cuda || kernel.isa != facts.isa) continue;
    const Result<Plan> plan = make(kernel.name);
    if (!plan) continue;
    const Buffer workspace(plan->workspace_bytes(y.shape[0]));
    GPU_CHECK(cudaMemset(out.data, 0xFF, out.bytes));
    call(*plan, out, workspace);
    GPU_CHECK(cudaDeviceSynchronize());
    std::vector<std::uint16_t> got(expected.size() / 2);
    GPU_CHECK(cudaMemcpy(got.data(), out.data, expected.size(), cudaMemcpyDeviceToHost));
    long long wrong = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      std::uint16_t want;
      std::memcpy(&want, expected.data() + 2 * i, 2);
      wrong += !same(got[i], want, type);
    }
    if (wrong != 0) {
      std::printf("vectors: %s by %s: %lld of %zu wrong\n", name.c_str(),
                  std::string(kernel.name).c_str(), wrong, got.size());
    }
    ++count.runs;
    count.outputs += static_cast<long long>(got.size());
    count.wrong += wrong;
  }
}

// `prefix`.x, .w, .scales, .biases with .y, MLX's product; and where .hidden is, a second weight
// .w_up … and silu of the first product times the second.
void check_case(const Vectors& vectors, const std::string& prefix, const DeviceFacts& facts,
                Count& count) {
  const SafetensorsEntry* x = vectors.find(prefix + ".x");
  const auto found = float_dtype(x->dtype);
  if (!found || *found == DType::f32) {
    std::fprintf(stderr, "%s.x has type %s\n", prefix.c_str(), x->dtype.c_str());
    std::exit(2);
  }
  const DType type = *found;
  const std::int64_t M = x->shape[0], K = x->shape[1];
  const std::vector<std::byte> rows = vectors.data(*x);
  const CudaStream cuda{};
  const Stream stream = stream_of(cuda);
  const Device device{DeviceKind::cuda, 0};
  const Buffer dx(rows.size());
  GPU_CHECK(cudaMemcpy(dx.data, rows.data(), rows.size(), cudaMemcpyHostToDevice));
  const MatrixView in{dx.at(), M, K, K, type, device};
  const QuantizedTensor gate = weight_of(vectors, prefix, "", K, type);
  const auto to = [&](const Buffer& out) {
    return MutableMatrixView{out.at(), M, gate.N, gate.N, type, device};
  };
  PackedWeightPtr packed;
  if (const SafetensorsEntry* y = vectors.find(prefix + ".y")) {
    check_kernels(
        prefix, *y, vectors, facts, type,
        [&](std::string_view name) {
          return make_plan(LinearProblem{M, gate.N, K, gate.spec, type, Accumulation::tensor, 1},
                           facts, {name});
        },
        [&](const Plan& plan, const Buffer& out, const Buffer& workspace) {
          if (packed == nullptr) packed = value(pack(plan, gate.view(), stream));
          value(quantized_linear(plan, *packed, in, to(out), {{workspace.at(), workspace.bytes}},
                                 stream));
        },
        count);
  }
  const SafetensorsEntry* hidden = vectors.find(prefix + ".hidden");
  if (hidden == nullptr) return;
  const QuantizedTensor up = weight_of(vectors, prefix, "_up", K, type);
  packed = nullptr;
  check_kernels(
      prefix + " hidden", *hidden, vectors, facts, type,
      [&](std::string_view name) {
        return make_plan(SwigluProblem{M, K, gate.N, gate.spec, up.spec, type, Precision::match,
                                       Accumulation::tensor, 1},
                         facts, {name});
      },
      [&](const Plan& plan, const Buffer& out, const Buffer& workspace) {
        if (packed == nullptr) packed = value(pack(plan, gate.view(), up.view(), stream));
        value(
            fused_swiglu(plan, *packed, in, to(out), {{workspace.at(), workspace.bytes}}, stream));
      },
      count);
}

}  // namespace

int run_vectors(const std::vector<const char*>& arguments) {
  const DeviceFacts facts = value(cuda_facts(0));
  Count count;
  for (const char* path : arguments) {
    const Vectors vectors(path);
    for (const auto& [name, entry] : vectors.entries) {
      constexpr std::string_view kRows = ".x";
      if (!name.ends_with(kRows) || entry->shape[0] < 8) continue;
      check_case(vectors, name.substr(0, name.size() - kRows.size()), facts, count);
    }
  }
  std::printf("vectors: %lld products of MLX, %lld kernel runs, %lld outputs, %lld wrong\n",
              count.cases, count.runs, count.outputs, count.wrong);
  return count.wrong == 0 && count.cases != 0 ? 0 : 1;
}

}  // namespace gpu
