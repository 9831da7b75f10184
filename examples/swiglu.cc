// out = silu(x * gate^T) * (x * up^T) in one call, gate stored with 4 bits and up with 8.
#include <algorithm>
#include <cstdio>
#include <random>

#include "qmlp/exceptions.h"
#include "qmlp/qmlp.h"

int main() {
  constexpr std::int64_t M = 3, hidden = 256, intermediate = 512;
  std::mt19937 random(1);
  const auto fill = [&random](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    std::generate(values.begin(), values.end(), [&] { return float(random() % 2001) / 1000 - 1; });
    return values;
  };
  const auto gate = value_or_throw(
      qmlp::quantize(fill(intermediate * hidden), intermediate, hidden, {4, 64, qmlp::DType::f32}));
  const auto up = value_or_throw(
      qmlp::quantize(fill(intermediate * hidden), intermediate, hidden, {8, 32, qmlp::DType::f32}));

  const auto pool = value_or_throw(qmlp::ThreadPool::create(qmlp::default_num_threads()));
  const qmlp::Stream stream = cpu_stream(*pool);
  const qmlp::SwigluProblem problem{.M_max = M,
                                    .hidden = hidden,
                                    .intermediate = intermediate,
                                    .gate = gate.spec,
                                    .up = up.spec,
                                    .activation = qmlp::DType::f32};
  const auto plan = value_or_throw(make_plan(problem, qmlp::host_facts()));
  const auto weight = value_or_throw(pack(plan, gate.view(), up.view(), stream));

  const std::vector<float> x = fill(M * hidden);
  std::vector<float> out(M * intermediate);
  struct alignas(qmlp::Workspace::kAlignment) Block {
    std::byte bytes[qmlp::Workspace::kAlignment];
  };
  std::vector<Block> scratch(plan.workspace_bytes(M) / sizeof(Block) + 1);
  value_or_throw(fused_swiglu(
      plan, *weight, {std::as_bytes(std::span(x)).data(), M, hidden, hidden, qmlp::DType::f32},
      {std::as_writable_bytes(std::span(out)).data(), M, intermediate, intermediate,
       qmlp::DType::f32},
      {std::as_writable_bytes(std::span(scratch))}, stream));
  std::printf("%s: out[0][0] = %.9g\n", std::string(plan.kernel_name(M)).c_str(), out[0]);
}
