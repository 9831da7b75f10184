// dump_weights MODEL MODULE f32|f16|bf16 OUT: the weights that a kernel multiplies with, as [K, N]
// elements of that type. x is the identity, so each output is one weight.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "qmlp/exceptions.h"
#include "qmlp/qmlp.h"

namespace {

qmlp::DType parse_dtype(std::string_view name) {
  if (name == "f32") return qmlp::DType::f32;
  if (name == "f16") return qmlp::DType::f16;
  if (name == "bf16") return qmlp::DType::bf16;
  throw std::runtime_error("unknown type " + std::string(name));
}

// The bytes of 1.0.
std::vector<std::byte> one(qmlp::DType dtype) {
  std::vector<std::byte> bytes(qmlp::size_of(dtype));
  if (dtype == qmlp::DType::f32) {
    const float value = 1.0f;
    std::memcpy(bytes.data(), &value, sizeof value);
  } else {
    const std::uint16_t value = dtype == qmlp::DType::f16 ? 0x3C00 : 0x3F80;
    std::memcpy(bytes.data(), &value, sizeof value);
  }
  return bytes;
}

void dump(const char* path, const char* module, qmlp::DType dtype, const char* out_path) {
  const auto checkpoint = value_or_throw(qmlp::Checkpoint::open(path));
  const auto weight = value_or_throw(checkpoint->weight(module));
  const std::int64_t N = weight.N, K = weight.K;
  const auto element = static_cast<std::int64_t>(qmlp::size_of(dtype));
  const auto pool = value_or_throw(qmlp::ThreadPool::create(qmlp::default_num_threads()));
  const qmlp::Stream stream = cpu_stream(*pool);
  const qmlp::LinearProblem problem{
      .M_max = K, .N = N, .K = K, .weight = weight.spec, .activation = dtype};
  const auto plan = value_or_throw(make_plan(problem, qmlp::host_facts()));
  const auto packed = value_or_throw(pack(plan, weight, stream));

  std::vector<std::byte> x(static_cast<std::size_t>(K * K * element));
  const std::vector<std::byte> unit = one(dtype);
  for (std::int64_t k = 0; k < K; ++k) {
    std::memcpy(x.data() + k * (K + 1) * element, unit.data(), unit.size());
  }
  std::vector<std::byte> out(static_cast<std::size_t>(K * N * element));
  struct alignas(qmlp::Workspace::kAlignment) Block {
    std::byte bytes[qmlp::Workspace::kAlignment];
  };
  std::vector<Block> scratch(plan.workspace_bytes(K) / sizeof(Block) + 1);
  value_or_throw(quantized_linear(plan, *packed, {x.data(), K, K, K, dtype},
                                  {out.data(), K, N, N, dtype},
                                  {std::as_writable_bytes(std::span(scratch))}, stream));
  std::ofstream file(out_path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(out.data()), static_cast<std::streamsize>(out.size()));
  if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + out_path);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fputs("usage: dump_weights MODEL MODULE f32|f16|bf16 OUT\n", stderr);
    return 2;
  }
  try {
    dump(argv[1], argv[2], parse_dtype(argv[3]), argv[4]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dump_weights: %s\n", error.what());
    return 1;
  }
}
