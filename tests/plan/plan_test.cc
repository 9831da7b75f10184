// Selection without a device: reasons, choices for machines that are not here, names, workspaces.
#include "qmlp/plan.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "plan/kernel.h"

namespace qmlp {
namespace {

LinearProblem good_linear() { return {64, 100, 256, {4, 64, DType::bf16}, DType::bf16, {}, 0}; }
SwigluProblem good_swiglu() {
  return {64, 256, 100, {4, 64, DType::bf16}, {8, 32, DType::f16}, DType::bf16, Precision::match,
          {}, 0};
}
DeviceFacts machine(std::string_view name) {
  const auto facts = machine_facts(name);
  EXPECT_TRUE(facts) << name;
  return *facts;
}

template <class Problem>
void expect_reason(const Problem& problem, const DeviceFacts& device, Reason reason,
                   const std::string& text) {
  const Support support = supports(problem, device);
  EXPECT_EQ(support.reason, reason) << to_string(support.reason) << ": " << to_string(support);
  EXPECT_EQ(to_string(support), text);
  const auto plan = make_plan(problem, device);
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, Errc::unsupported);
  EXPECT_NE(plan.error().message.find(text), std::string::npos) << plan.error().message;
}

TEST(Supports, GoodProblems) {
  for (const char* name : {"portable", "avx2", "avx512", "a100", "h200"}) {
    EXPECT_TRUE(supports(good_linear(), machine(name))) << name;
    EXPECT_TRUE(supports(good_swiglu(), machine(name))) << name;
  }
  EXPECT_EQ(to_string(supports(good_linear(), machine("avx2"))), "supported");
}

TEST(Supports, EveryReasonThatAProblemCanGive) {
  const DeviceFacts avx2 = machine("avx2");
  LinearProblem linear = good_linear();
  linear.weight.bits = 7;
  expect_reason(linear, avx2, Reason::bits, "weight.bits is 7, needs 2, 3, 4, 5, 6 or 8");
  linear = good_linear();
  linear.weight = {16, 0, DType::f32};
  expect_reason(
      linear, avx2, Reason::bits,
      "weight.bits is 16, needs 16 or 32 as the stored floats have, when group_size is 0");
  linear = good_linear();
  linear.weight.group_size = 48;
  expect_reason(linear, avx2, Reason::group_size, "weight.group_size is 48, needs 32, 64 or 128");
  SwigluProblem swiglu = good_swiglu();
  swiglu.up.group_size = 16;
  expect_reason(swiglu, avx2, Reason::group_size, "up.group_size is 16, needs 32, 64 or 128");
  swiglu = good_swiglu();
  swiglu.up.bits = 1;
  expect_reason(swiglu, avx2, Reason::bits, "up.bits is 1, needs 2, 3, 4, 5, 6 or 8");

  linear = good_linear();
  linear.K = 96;
  expect_reason(linear, avx2, Reason::shape, "K is 96, needs a multiple of the group size");
  linear.K = 0;
  expect_reason(linear, avx2, Reason::shape, "K is 0, needs at least 1");
  linear = good_linear();
  linear.N = -1;
  expect_reason(linear, avx2, Reason::shape, "N is -1, needs at least 1");
  linear.N = (std::int64_t{1} << 31) + 1;
  expect_reason(linear, avx2, Reason::shape, "N is 2147483649, needs at most 2147483648");
  linear = good_linear();
  linear.M_max = -3;
  expect_reason(linear, avx2, Reason::shape, "M_max is -3, needs at least 0");

  linear = good_linear();
  linear.activation = DType::f32;
  linear.accumulation = Accumulation::tensor;
  expect_reason(linear, avx2, Reason::dtype,
                "activation is f32, needs bf16 or f16, which the tensor contract is defined for");
  linear = good_linear();
  linear.accumulation = Accumulation::tensor;
  linear.segments = 3;
  expect_reason(linear, avx2, Reason::accumulation, "segments is 3, needs 1, 2, 4 or 8");
  linear.accumulation = Accumulation::f32;
  linear.segments = 2;
  expect_reason(linear, avx2, Reason::accumulation, "segments is 2, needs 1 with f32 accumulation");
  linear.segments = -1;
  expect_reason(linear, avx2, Reason::accumulation,
                "segments is -1, needs 1 with f32 accumulation");
  linear = good_linear();
  linear.accumulation = Accumulation::f32;
  const Support on_gpu = supports(linear, machine("h200"));
  EXPECT_EQ(on_gpu.reason, Reason::accumulation) << to_string(on_gpu);

  DeviceFacts nowhere;
  nowhere.kind = DeviceKind::metal;
  EXPECT_EQ(supports(good_linear(), nowhere).reason, Reason::no_device);
  EXPECT_EQ(supports(good_swiglu(), nowhere).reason, Reason::no_device);
  EXPECT_FALSE(make_plan(good_linear(), nowhere));
}

// A kernel says why it refuses, even where another takes the problem.
TEST(Explain, EveryKernelAnswers) {
  const auto on_portable = explain(good_linear(), machine("portable"));
  std::map<std::string_view, Support> by_name;
  for (const KernelVerdict& verdict : on_portable) by_name[verdict.kernel] = verdict.support;
  EXPECT_TRUE(by_name.at("linear_bf16_any_m6n16_portable"));
  EXPECT_EQ(by_name.at("linear_f16_any_m6n16_portable").reason, Reason::dtype);
  EXPECT_EQ(to_string(by_name.at("linear_f16_any_m6n16_portable")),
            "activation is bf16, needs f16");
  EXPECT_EQ(by_name.at("linear_bf16_any_m1n16k16_portable").reason, Reason::accumulation);
  if (by_name.count("linear_bf16_any_m6n16_avx2") != 0) {
    EXPECT_EQ(by_name.at("linear_bf16_any_m6n16_avx2").reason, Reason::no_isa);
    EXPECT_EQ(to_string(by_name.at("linear_bf16_any_m6n16_avx2")),
              "device.isa is portable, needs avx2");
  }
  for (const KernelVerdict& verdict : on_portable) {
    EXPECT_TRUE(verdict.kernel.starts_with("linear_")) << verdict.kernel;
  }
  // On the best machine some kernel of each instruction set takes it.
  std::set<std::string> takers;
  for (const KernelVerdict& verdict : explain(good_swiglu(), machine("avx512"))) {
    if (!verdict.support) continue;
    takers.insert(std::string(verdict.kernel.substr(verdict.kernel.rfind('_') + 1)));
  }
  EXPECT_EQ(takers.count("portable"), 1u);
#if defined(__x86_64__)
  EXPECT_EQ(takers, (std::set<std::string>{"portable", "avx2", "avx512"}));
#endif
}

TEST(MakePlan, ChoosesForMachinesThatAreNotHere) {
  struct Expectation {
    const char* machine;
    const char* isa;
    Accumulation accumulation;
  };
  const Expectation expectations[] = {
    {"portable", "portable", Accumulation::f32},
#if defined(__x86_64__)
    {"avx2", "avx2", Accumulation::f32},
    {"avx512", "avx512", Accumulation::f32},
#endif
    {"a100", "sm80", Accumulation::tensor},
    {"h200", "sm90a", Accumulation::tensor},
  };
  for (const auto& [name, isa, accumulation] : expectations) {
    const DeviceFacts facts = machine(name);
    EXPECT_FALSE(facts.present);
    const auto linear = make_plan(good_linear(), facts);
    const auto swiglu = make_plan(good_swiglu(), facts);
    ASSERT_TRUE(linear) << linear.error().message;
    ASSERT_TRUE(swiglu) << swiglu.error().message;
    for (const std::int64_t M : {1, 2, 5, 17, 64}) {
      const std::string suffix = std::string("_") + isa;
      EXPECT_TRUE(linear->kernel_name(M).starts_with("linear_bf16_")) << name;
      EXPECT_TRUE(linear->kernel_name(M).ends_with(suffix)) << linear->kernel_name(M);
      EXPECT_TRUE(swiglu->kernel_name(M).starts_with("swiglu_bf16_")) << name;
      EXPECT_TRUE(swiglu->kernel_name(M).ends_with(suffix)) << swiglu->kernel_name(M);
    }
    EXPECT_EQ(linear->accumulation(), accumulation);
    EXPECT_EQ(linear->segments(), 1);
    EXPECT_EQ(linear->device().isa, facts.isa);
  }
  EXPECT_FALSE(machine_facts("cray1"));
  EXPECT_NE(machine_facts("cray1").error().message.find("h200"), std::string::npos);
}

// What the plan chooses is a function of N and K: the same for a GPU and the CPU that checks it,
// for a SwiGLU and a linear layer with its gate's weight, for any M and weight.
TEST(MakePlan, ChosenSegments) {
  struct Case {
    std::int64_t N, K;
    int segments;
  };
  for (const Case& of :
       {Case{4096, 14336, 4}, Case{4096, 4096, 4}, Case{1024, 4096, 4}, Case{8192, 28672, 4},
        Case{8192, 4096, 4}, Case{1, 4096, 4}, Case{1536, 4608, 4}, Case{14336, 4096, 1},
        Case{8193, 4096, 1}, Case{28672, 8192, 1}, Case{4096, 4032, 1}, Case{576, 1536, 1}}) {
    for (const char* name : {"h200", "avx2", "portable", "a100"}) {
      const DeviceFacts facts = machine(name);
      const bool measured = facts.isa != Isa::sm80;
      for (const std::int64_t M : {1, 300}) {
        for (const int bits : {3, 8}) {
          LinearProblem linear{
              M, of.N, of.K, {bits, 64, DType::bf16}, DType::bf16, Accumulation::tensor, 0};
          SwigluProblem swiglu{M,
                               of.K,
                               of.N,
                               linear.weight,
                               linear.weight,
                               DType::bf16,
                               Precision::match,
                               Accumulation::tensor,
                               0};
          const auto of_linear = make_plan(linear, facts), asked = [&] {
            linear.segments = 1;
            return make_plan(linear, facts);
          }();
          const auto of_swiglu = make_plan(swiglu, facts);
          ASSERT_TRUE(of_linear && of_swiglu && asked) << name;
          EXPECT_EQ(of_linear->segments(), measured ? of.segments : 1)
              << name << of.N << " " << of.K;
          EXPECT_EQ(of_swiglu->segments(), of_linear->segments()) << name << of.N << " " << of.K;
          EXPECT_EQ(asked->segments(), 1);
        }
      }
    }
    LinearProblem on_cpu{1, of.N, of.K, {4, 64, DType::bf16}, DType::bf16, {}, 0};
    const auto plan = make_plan(on_cpu, machine("avx2"));
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->segments(), 1) << "f32";
  }
}

TEST(MakePlan, AskedContractsAndSegments) {
  LinearProblem problem = good_linear();
  problem.accumulation = Accumulation::tensor;
  for (const int segments : {0, 1, 2, 4, 8}) {
    problem.segments = segments;
    const auto plan = make_plan(problem, machine("avx2"));
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->accumulation(), Accumulation::tensor);
    EXPECT_EQ(plan->segments(), segments == 0 ? 1 : segments);
    EXPECT_NE(plan->kernel_name(1).find("k16_"), std::string_view::npos);
  }
}

TEST(MakePlan, ForcedKernels) {
  const DeviceFacts portable = machine("portable");
  const auto unknown = make_plan(good_linear(), portable, {"linear_bf16_any_m9n9_vax"});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, Errc::invalid_argument);
  EXPECT_NE(unknown.error().message.find("linear_bf16_any_m9n9_vax"), std::string::npos);
  const auto wrong_type = make_plan(good_linear(), portable, {"linear_f16_any_m6n16_portable"});
  ASSERT_FALSE(wrong_type);
  EXPECT_NE(wrong_type.error().message.find("activation is bf16, needs f16"), std::string::npos);
  EXPECT_FALSE(make_plan(good_linear(), portable, {"swiglu_bf16_any_m6n16_portable"}));
#if defined(__x86_64__)
  EXPECT_FALSE(make_plan(good_linear(), portable, {"linear_bf16_any_m6n16_avx2"}));
#endif
  // Forced on every kernel that takes the problem, at every M.
  for (const char* name : {"avx512", "h200"}) {
    for (const KernelVerdict& verdict : explain(good_swiglu(), machine(name))) {
      if (!verdict.support) continue;
      const auto plan = make_plan(good_swiglu(), machine(name), {verdict.kernel});
      ASSERT_TRUE(plan) << plan.error().message;
      for (const std::int64_t M : {0, 1, 6, 64}) EXPECT_EQ(plan->kernel_name(M), verdict.kernel);
    }
  }
}

TEST(MakePlan, WorkspaceIsMonotone) {
  for (const char* name : {"portable", "avx2", "avx512"}) {
    for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
      LinearProblem problem{3000, 4096, 1536, {4, 64, DType::f16}, DType::f16, accumulation, 0};
      const auto plan = make_plan(problem, machine(name));
      ASSERT_TRUE(plan);
      std::size_t last = 0;
      for (std::int64_t M = 0; M <= 3000; ++M) {
        const std::size_t bytes = plan->workspace_bytes(M);
        ASSERT_GE(bytes, last) << name << " M " << M;
        last = bytes;
      }
      EXPECT_LT(last, std::size_t{1} << 30);
    }
  }
}

// <op>_<activation>_<codes>_<tile>_<isa>, each part as the entry has it.
TEST(KernelNames, ParseAndAgreeWithTheirEntries) {
  std::set<std::string_view> seen;
  std::size_t rows = 0;
  for (const DeviceKind kind : {DeviceKind::cpu, DeviceKind::cuda}) {
    for (const plan::Kernel& kernel : plan::kernels(kind)) {
      ++rows;
      const std::string_view name = kernel.name;
      EXPECT_TRUE(seen.insert(name).second) << name << " appears twice";
      std::vector<std::string_view> parts;
      for (std::size_t at = 0; at <= name.size();) {
        const std::size_t end = std::min(name.find('_', at), name.size());
        parts.push_back(name.substr(at, end - at));
        at = end + 1;
      }
      ASSERT_EQ(parts.size(), 5u) << name;
      EXPECT_EQ(parts[0], kernel.op == plan::Op::swiglu ? "swiglu" : "linear") << name;
      EXPECT_EQ(parts[1], to_string(kernel.activation)) << name;
      EXPECT_EQ(parts[2], "any") << name;
      EXPECT_EQ(parts[4], to_string(kernel.isa)) << name;
      // m<rows>n<columns>, and k<depth> where sums go by steps of 16.
      std::map<char, std::int64_t> tile;
      std::string order;
      for (std::size_t i = 0; i < parts[3].size();) {
        const char letter = parts[3][i++];
        std::int64_t value = 0;
        ASSERT_TRUE(i < parts[3].size() && parts[3][i] >= '1' && parts[3][i] <= '9') << name;
        while (i < parts[3].size() && parts[3][i] >= '0' && parts[3][i] <= '9') {
          value = value * 10 + (parts[3][i++] - '0');
        }
        order += letter;
        tile[letter] = value;
      }
      EXPECT_EQ(order, kernel.accumulation == Accumulation::tensor ? "mnk" : "mn") << name;
      if (kernel.accumulation == Accumulation::tensor) {
        EXPECT_EQ(tile['k'] % 16, 0) << name;
      }
      EXPECT_LT(kernel.M_begin, kernel.M_end) << name;
    }
  }
  EXPECT_EQ(kernel_table().size(), rows);
  for (const KernelInfo& info : kernel_table()) EXPECT_EQ(seen.count(info.name), 1u);
}

// The reference comes last and takes what its contract allows at any M.
TEST(KernelTables, EveryTypeAndContractHasAKernelOnEveryMachine) {
  for (const char* name : {"portable", "avx2", "avx512"}) {
    for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
      for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
        if (type == DType::f32 && accumulation == Accumulation::tensor) continue;
        for (const int bits : {2, 3, 4, 5, 6, 8}) {
          for (const int group : {32, 64, 128}) {
            LinearProblem linear{1, 1, 128 * 3, {bits, group, DType::f32}, type, accumulation, 0};
            SwigluProblem swiglu{70000,
                                 384,
                                 1,
                                 {bits, group, DType::f16},
                                 {4, 128, DType::bf16},
                                 type,
                                 Precision::wide,
                                 accumulation,
                                 0};
            EXPECT_TRUE(supports(linear, machine(name)));
            EXPECT_TRUE(supports(swiglu, machine(name)));
          }
        }
      }
    }
  }
}

TEST(Reasons, HaveNames) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(Reason::accumulation); ++i) {
    names.insert(to_string(static_cast<Reason>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Reason::accumulation) + 1);
  EXPECT_EQ(names.count("ok"), 1u);
}

TEST(HostFacts, DescribeThisMachine) {
  const DeviceFacts facts = host_facts();
  EXPECT_EQ(facts.kind, DeviceKind::cpu);
  EXPECT_TRUE(facts.present);
  EXPECT_GE(facts.num_threads, 1);
  const auto plan = make_plan(good_linear(), facts);
  ASSERT_TRUE(plan);
  EXPECT_TRUE(plan->kernel_name(1).ends_with(to_string(facts.isa)));
}

}  // namespace
}  // namespace qmlp
