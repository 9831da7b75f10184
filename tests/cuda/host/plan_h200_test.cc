// Plans for an H200 and an A100 that are not here.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "cuda/choice.h"
#include "cuda/run.h"
#include "plan/kernel.h"
#include "qmlp/plan.h"

namespace qmlp {
namespace {

DeviceFacts machine(std::string_view name) {
  const auto facts = machine_facts(name);
  EXPECT_TRUE(facts) << name;
  return *facts;
}

struct Shape {
  std::int64_t hidden, intermediate;
};
constexpr Shape kShapes[] = {{576, 1536}, {1536, 4608}, {4096, 14336}, {8192, 28672}, {96, 1}};

SwigluProblem swiglu_of(Shape shape, DType type, std::int64_t M_max) {
  const int group = shape.hidden % 64 == 0 ? 64 : 32;
  return {M_max,
          shape.hidden,
          shape.intermediate,
          {4, group, type},
          {8, 32, type},
          type,
          Precision::match,
          {},
          0};
}
LinearProblem linear_of(Shape shape, DType type, std::int64_t M_max) {
  const int group = shape.hidden % 64 == 0 ? 64 : 32;
  return {M_max, shape.intermediate, shape.hidden, {4, group, type}, type, {}, 0};
}

std::string stream_name(const char* op, DType type) {
  return std::string(op) + "_" + to_string(type) + "_any_m16n8k16_sm90a";
}

std::uint8_t body_of(std::string_view name) {
  for (const plan::Kernel& kernel : plan::kernels(DeviceKind::cuda)) {
    if (name == kernel.name) return kernel.body;
  }
  ADD_FAILURE() << "no kernel " << name;
  return 0;
}

// The body that is meant for M rows of a shape.
int expected_body(std::int64_t M, Shape shape, bool is_swiglu, const DeviceFacts& device,
                  int segments = 1) {
  const std::int64_t num_tiles = cuda::tiles_of(shape.intermediate, is_swiglu);
  if (M <= 8) return cuda::kStreamSm90;
  const int bits = is_swiglu ? 0 : 4;  // swiglu_of mixes two widths
  // A plan asks once in every kPreferenceStep rows.
  const std::int64_t asked = std::min(
      std::max<std::int64_t>(9, (M - 1) / plan::kPreferenceStep * plan::kPreferenceStep + 1),
      (plan::kPreferenceEnd - 1) / plan::kPreferenceStep * plan::kPreferenceStep + 1);
  return cuda::kTileSm90 +
         static_cast<int>(cuda::choose_tile(
             {asked, num_tiles, ceil_div(shape.hidden, std::int64_t{cuda::kChunkK}), segments,
              bits},
             device));
}

TEST(H200Plan, StreamsForFewRowsAndTilesAbove) {
  const DeviceFacts device = machine("h200");
  EXPECT_FALSE(device.present);
  EXPECT_EQ(device.num_sms, 132);
  EXPECT_EQ(device.smem_bytes, 232448u);
  for (const DType type : {DType::bf16, DType::f16}) {
    for (const Shape shape : kShapes) {
      const auto swiglu = make_plan(swiglu_of(shape, type, 6000), device);
      const auto linear = make_plan(linear_of(shape, type, 6000), device);
      ASSERT_TRUE(swiglu) << swiglu.error().message;
      ASSERT_TRUE(linear) << linear.error().message;
      EXPECT_EQ(swiglu->accumulation(), Accumulation::tensor);
      EXPECT_EQ(swiglu->segments(), 1);
      for (std::int64_t M = 0; M <= 8; ++M) {
        EXPECT_EQ(swiglu->kernel_name(M), stream_name("swiglu", type)) << M;
        EXPECT_EQ(linear->kernel_name(M), stream_name("linear", type)) << M;
      }
      for (std::int64_t M = 9; M <= 6000; M += M < 600 ? 1 : 97) {
        const std::string_view name = swiglu->kernel_name(M);
        const std::string start = std::string("swiglu_") + to_string(type) + "_any_m";
        EXPECT_TRUE(name.starts_with(start + "128n") || name.starts_with(start + "256n")) << name;
        EXPECT_TRUE(name.ends_with("_sm90a")) << name;
        ASSERT_EQ(body_of(name), expected_body(M, shape, true, device)) << name << " at M " << M;
        ASSERT_EQ(body_of(linear->kernel_name(M)), expected_body(M, shape, false, device))
            << linear->kernel_name(M) << " at M " << M;
      }
    }
  }
}

TEST(H200Plan, ALongChainIsCarriedByARelay) {
  LinearProblem problem = linear_of({14336, 4096}, DType::bf16, 64);
  problem.segments = 1;
  const auto plan = make_plan(problem, machine("h200"));
  ASSERT_TRUE(plan);
  for (std::int64_t M = 0; M <= 8; ++M) {
    EXPECT_EQ(plan->kernel_name(M), "linear_bf16_any_m16n8k512_sm90a") << M;
  }
  EXPECT_GE(body_of(plan->kernel_name(9)), cuda::kTileSm90);
}

TEST(H200Plan, APlanOfOneRowIsAStreamPlan) {
  const auto plan = make_plan(swiglu_of({4096, 14336}, DType::bf16, 1), machine("h200"));
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->kernel_name(1), stream_name("swiglu", DType::bf16));
}

// K of several segments: the stream kernel for few rows, above it the tiles that have such an
// instance.
TEST(H200Plan, CutsK) {
  const DeviceFacts device = machine("h200");
  for (const int segments : {2, 4, 8}) {
    constexpr Shape kDown = {14336, 4096};
    LinearProblem problem = linear_of(kDown, DType::bf16, 512);
    problem.segments = segments;
    EXPECT_TRUE(supports(problem, device));
    const auto plan = make_plan(problem, device);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->segments(), segments);
    EXPECT_EQ(plan->kernel_name(1), stream_name("linear", DType::bf16));
    EXPECT_EQ(plan->kernel_name(8), stream_name("linear", DType::bf16));
    for (const std::int64_t M : {9, 64, 512}) {
      EXPECT_EQ(body_of(plan->kernel_name(M)), expected_body(M, kDown, false, device, segments))
          << plan->kernel_name(M);
    }
    for (const KernelVerdict& verdict : explain(problem, device)) {
      const int config = body_of(verdict.kernel) - cuda::kTileSm90;
      if (config >= 0 && !cuda::splits_k(static_cast<cuda::TileConfig>(config))) {
        EXPECT_EQ(to_string(verdict.support),
                  "segments is " + std::to_string(segments) + ", needs 1 with this kernel");
        EXPECT_FALSE(make_plan(problem, device, {verdict.kernel}));
      } else if (verdict.kernel.starts_with("linear_bf16_")) {
        EXPECT_TRUE(verdict.support) << verdict.kernel << ": " << to_string(verdict.support);
      }
    }
  }
}

TEST(H200Plan, ExplainNamesEveryKernelAndReason) {
  const SwigluProblem problem = swiglu_of({576, 1536}, DType::bf16, 64);
  const auto verdicts = explain(problem, machine("h200"));
  std::size_t takers = 0;
  std::map<std::string_view, std::string> said;
  for (const KernelVerdict& verdict : verdicts) {
    EXPECT_TRUE(verdict.kernel.starts_with("swiglu_")) << verdict.kernel;
    said[verdict.kernel] = to_string(verdict.support);
    if (verdict.support) ++takers;
  }
  // The stream kernels of both architectures, the relay and every tile.
  EXPECT_EQ(takers, 3u + cuda::kNumTileConfigs);
  EXPECT_EQ(said.at("swiglu_bf16_any_m16n8k16_sm90a"), "supported");
  EXPECT_EQ(said.at("swiglu_f16_any_m16n8k16_sm90a"), "activation is bf16, needs f16");
  for (const auto& [kernel, text] : said) {
    if (kernel.starts_with("swiglu_f16_")) {
      EXPECT_EQ(text, "activation is bf16, needs f16");
    }
  }
  SwigluProblem wide = problem;
  wide.accumulation = Accumulation::f32;
  for (const KernelVerdict& verdict : explain(wide, machine("h200"))) {
    EXPECT_FALSE(verdict.support) << verdict.kernel;
  }
}

// Forced on a kernel, a plan keeps to it at every M.
TEST(H200Plan, ForcedTiles) {
  const SwigluProblem problem = swiglu_of({4096, 14336}, DType::f16, 300);
  std::set<std::uint8_t> bodies;
  for (const KernelVerdict& verdict : explain(problem, machine("h200"))) {
    if (!verdict.support) continue;
    const auto plan = make_plan(problem, machine("h200"), {verdict.kernel});
    ASSERT_TRUE(plan) << plan.error().message;
    for (const std::int64_t M : {0, 1, 9, 300}) EXPECT_EQ(plan->kernel_name(M), verdict.kernel);
    EXPECT_TRUE(bodies.insert(body_of(verdict.kernel)).second) << verdict.kernel;
  }
  EXPECT_EQ(bodies.size(), 3u + cuda::kNumTileConfigs);
}

// sm_80 has one family at every M, and it cuts K too.
TEST(A100Plan, OneKernelAtEveryM) {
  for (const int segments : {1, 8}) {
    LinearProblem problem = linear_of({4096, 14336}, DType::bf16, 2000);
    problem.segments = segments;
    const auto plan = make_plan(problem, machine("a100"));
    ASSERT_TRUE(plan) << plan.error().message;
    for (const std::int64_t M : {0, 1, 8, 9, 17, 2000}) {
      EXPECT_EQ(plan->kernel_name(M), "linear_bf16_any_m16n16k16_sm80");
    }
  }
  for (const KernelVerdict& verdict :
       explain(linear_of({4096, 14336}, DType::bf16, 1), machine("a100"))) {
    if (!verdict.kernel.ends_with("_sm90a")) continue;
    EXPECT_EQ(to_string(verdict.support), "device.isa is sm80, needs sm90a") << verdict.kernel;
  }
}

}  // namespace
}  // namespace qmlp
