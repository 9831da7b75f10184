// The planted fault that `verify` must find: it strikes the named call, once, in one element.
#include "ops/fault_hook.h"

#include <gtest/gtest.h>

#include "kernels/fixture.h"

namespace qmlp::test {
namespace {

int differences(const std::vector<float>& a, const std::vector<float>& b) {
  int count = 0;
  for (std::size_t i = 0; i < a.size(); ++i) count += !same_bits(a[i], b[i]);
  return count;
}

TEST(Fault, StrikesOneElementOfOneCall) {
  Random random(800);
  const QuantSpec spec{4, 32, DType::bf16};
  const auto weight = random_weight(33, 64, spec, WeightKind::quantized, random);
  const Matrix x = matrix_of(random_x(5, 64, DType::bf16, random), 5, 64, DType::bf16);
  Linear linear({{5, 33, 64, spec, DType::bf16, {}, 0}, "", 2}, weight.view());
  Swiglu swiglu({{5, 64, 33, spec, spec, DType::bf16, Precision::match, {}, 0}, "", 2},
                weight.view(), weight.view());
  const auto clean_linear = linear.checked(x, 5);
  const auto clean_swiglu = swiglu.checked(x, 5);
  Matrix out(5, 33, DType::bf16);

  testing::plant_kernel_fault(testing::FaultSite::swiglu, 1);
  ASSERT_TRUE(linear.run(x.view(), out.out()));
  EXPECT_EQ(differences(out.values(), clean_linear), 0);  // another op's call
  ASSERT_TRUE(swiglu.run(x.view(), out.out()));
  EXPECT_EQ(differences(out.values(), clean_swiglu), 0);  // call 0
  EXPECT_FALSE(testing::kernel_fault_struck());
  ASSERT_TRUE(swiglu.run(x.view(), out.out()));
  EXPECT_EQ(differences(out.values(), clean_swiglu), 1);  // call 1
  EXPECT_TRUE(testing::kernel_fault_struck());
  ASSERT_TRUE(swiglu.run(x.view(), out.out()));
  EXPECT_EQ(differences(out.values(), clean_swiglu), 0);  // over

  testing::plant_kernel_fault(testing::FaultSite::linear, 0);
  testing::clear_kernel_fault();
  ASSERT_TRUE(linear.run(x.view(), out.out()));
  EXPECT_EQ(differences(out.values(), clean_linear), 0);
}

}  // namespace
}  // namespace qmlp::test
