// The cap on fused calls (--fused-max-calls) finds the call in which a fused kernel went wrong.
#include <gtest/gtest.h>

#include "model/synthetic.h"
#include "ops/fault_hook.h"
#include "qmlp/model.h"

namespace qmlp::test {
namespace {

std::vector<float> run(const std::shared_ptr<const Model>& model, ThreadPool& pool,
                       const std::vector<std::int32_t>& tokens, std::int64_t max_calls) {
  SessionOptions options;
  options.max_tokens = 64;
  options.fusion.fused_max_calls = max_calls;
  auto session = Session::create(model, options, pool);
  EXPECT_TRUE(session) << session.error().message;
  const auto vocab = static_cast<std::size_t>(model->config().vocab_size);
  std::vector<float> all(tokens.size() * vocab);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Status status = (*session)->forward({&tokens[i], 1}, Logits::last,
                                              std::span<float>(all).subspan(i * vocab, vocab));
    EXPECT_TRUE(status) << status.error().message;
  }
  return all;
}

TEST(Bisect, CapFindsThePlantedCall) {
  const SyntheticModel files(mixed_tied());
  const auto pool = make_pool(2);
  const auto model = load_model(files, ModelOptions{}, *pool);
  const auto tokens = some_tokens(files.spec(), 4);
  const std::int64_t calls = files.spec().layers * static_cast<std::int64_t>(tokens.size());
  const std::vector<float> good = run(model, *pool, tokens, 0);
  ASSERT_EQ(run(model, *pool, tokens, -1), good);

  for (const std::int64_t fault : {std::int64_t{0}, std::int64_t{5}, calls - 1}) {
    const auto is_bad = [&](std::int64_t cap) {
      testing::plant_kernel_fault(testing::FaultSite::swiglu, fault);
      const bool differs = run(model, *pool, tokens, cap) != good;
      testing::clear_kernel_fault();
      return differs;
    };
    std::int64_t low = 0;  // good with this many fused calls
    std::int64_t high = calls;
    ASSERT_FALSE(is_bad(low));
    ASSERT_TRUE(is_bad(high));
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (is_bad(middle) ? high : low) = middle;
    }
    EXPECT_EQ(low, fault);  // the call with this index, counted from 0, is the first bad one
  }
}

}  // namespace
}  // namespace qmlp::test
