#include "bench_case.h"

#include <gtest/gtest.h>

#include "context.h"
#include "ops/fault_hook.h"
#include "progress.h"

namespace qmlp::cli {
namespace {

class BenchCase : public ::testing::Test {
 protected:
  void SetUp() override {
    pool_ = value_or_throw(ThreadPool::create(1));
    shape_ = {128, 96, {4, 32, DType::bf16}, {3, 64, DType::bf16}};
    settings_.M = {1, 9};
    settings_.rotate_bytes = 1 << 20;
    settings_.seconds = 0.0;
    settings_.min_runs = 3;
    limits_ = {1, 1e10, 1e11};
  }
  void TearDown() override { qmlp::testing::clear_kernel_fault(); }

  BenchCaseResult run() {
    Progress progress(false);
    return run_bench_case(shape_, settings_, host_facts(), limits_, *pool_, progress);
  }

  std::unique_ptr<ThreadPool> pool_;
  BenchShape shape_;
  BenchSettings settings_;
  MachineLimits limits_;
};

TEST_F(BenchCase, CountsBytesAndOperations) {
  const BenchCaseResult result = run();
  ASSERT_EQ(result.rows.size(), 6u);
  EXPECT_GE(result.rotated_bytes, settings_.rotate_bytes);
  const BenchRow& fused = result.rows[3];  // M = 9
  EXPECT_EQ(fused.variant, "fused");
  EXPECT_EQ(fused.runs, 3);
  const double weights = 128 * 96 * (4 + 3) / 8.0;
  const double scales = 2 * 2 * (128 * 96 / 32 + 128 * 96 / 64);
  EXPECT_EQ(fused.bytes, weights + scales + 9 * (128 + 96) * 2);
  EXPECT_EQ(fused.flops, 2.0 * 2 * 9 * 128 * 96);
  EXPECT_DOUBLE_EQ(fused.limit_us, 1e6 * std::max(fused.bytes / 1e10, fused.flops / 1e11));
  EXPECT_EQ(result.rows[5].variant, "dense bf16");
  EXPECT_EQ(result.rows[5].bytes, 2.0 * 128 * 96 * 2 + 9 * (128 + 96) * 2);
}

TEST_F(BenchCase, AWrongBitIsFound) {
  qmlp::testing::plant_kernel_fault(qmlp::testing::FaultSite::swiglu, 0);
  EXPECT_THROW(run(), CheckFailed);
}

TEST_F(BenchCase, Quantiles) {
  EXPECT_EQ(quantile({3.0, 1.0, 2.0}, 0.5), 2.0);
  EXPECT_EQ(quantile({1.0, 2.0}, 0.5), 1.5);
  EXPECT_EQ(quantile({4.0, 1.0}, 0.0), 1.0);
  EXPECT_EQ(quantile({4.0, 1.0}, 1.0), 4.0);
  EXPECT_EQ(quantile({}, 0.5), 0.0);
}

}  // namespace
}  // namespace qmlp::cli
