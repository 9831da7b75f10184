// Sizes past the limits that narrow indices and grids have.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/fixture.h"
#include "ref/weight.h"

namespace qmlp::test {
namespace {

constexpr std::int64_t kPeriod = 97;  // distinct rows; prime, so that no tile sees a pattern

// `rows` rows that repeat the first kPeriod of a small weight.
QuantizedTensor repeated(const QuantizedTensor& small, std::int64_t rows) {
  QuantizedTensor big = small;
  big.N = rows;
  const auto repeat = [&](const std::vector<std::byte>& source, std::vector<std::byte>& out) {
    const std::size_t row = source.size() / static_cast<std::size_t>(small.N);
    out.resize(row * static_cast<std::size_t>(rows));
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto from = source.begin() + static_cast<std::ptrdiff_t>(row) * (n % small.N);
      std::copy(from, from + static_cast<std::ptrdiff_t>(row),
                out.begin() + static_cast<std::ptrdiff_t>(row) * n);
    }
  };
  repeat(small.codes, big.codes);
  repeat(small.scales, big.scales);
  repeat(small.biases, big.biases);
  return big;
}

std::vector<float> repeated(const std::vector<float>& rows, std::int64_t K, std::int64_t M) {
  std::vector<float> out;
  out.reserve(static_cast<std::size_t>(M * K));
  for (std::int64_t m = 0; m < M; ++m) {
    const auto from = rows.begin() + (m % kPeriod) * K;
    out.insert(out.end(), from, from + K);
  }
  return out;
}

void check(std::int64_t M_max, std::int64_t N, std::int64_t K, DType type, const QuantSpec& spec,
           std::initializer_list<std::int64_t> calls, std::uint64_t seed) {
  Random random(seed);
  const std::int64_t rows = std::min(M_max, kPeriod);
  const std::int64_t columns = std::min(N, kPeriod);
  const auto small = random_weight(columns, K, spec, WeightKind::quantized, random);
  const auto x_rows = random_x(rows, K, type, random);
  const auto expected = ref::linear(x_rows, ref::decode(small.view(), type), rows, columns, K,
                                    rules_of(type, Accumulation::f32, 1));
  const QuantizedTensor weight = repeated(small, N);
  LinearCase item{{M_max, N, K, spec, type, {}, 0}, "", 2};
  Linear linear(item, weight.view());
  const Matrix x = matrix_of(repeated(x_rows, K, M_max), M_max, K, type);
  for (const std::int64_t M : calls) {
    Matrix out(M, N, type, 0, kOutputGuard);
    const Status status = linear.run(x.view(M), out.out());
    ASSERT_TRUE(status) << status.error().message;
    EXPECT_TRUE(out.untouched_outside(M, kOutputGuard));
    std::int64_t different = 0;
    for (std::int64_t m = 0; m < M; ++m) {
      for (std::int64_t n = 0; n < N; ++n) {
        const float want = expected[static_cast<std::size_t>(m % kPeriod * columns + n % columns)];
        different += !same_bits(out.at(m, n), want);
      }
    }
    EXPECT_EQ(different, 0) << describe(item, M);
  }
}

TEST(Size, VocabularyPast32767Columns) {
  check(33, 73448, 64, DType::f16, {4, 64, DType::f16}, {1, 10, 33}, 700);
}
TEST(Size, RowsPast32767) { check(40000, 17, 64, DType::bf16, {4, 64, DType::bf16}, {40000}, 701); }
TEST(Size, RowsPast65535) {
  check(100000, 20, 32, DType::bf16, {4, 32, DType::bf16}, {100000}, 702);
}
TEST(Size, ColumnsPastAMillion) {
  check(2, 1100000, 32, DType::bf16, {2, 32, DType::bf16}, {1, 2}, 703);
}
TEST(Size, LongRows) { check(3, 20, 57344, DType::bf16, {4, 128, DType::bf16}, {1, 3}, 704); }

TEST(Size, WorkspaceGrowsWithM) {
  const QuantSpec spec{4, 64, DType::bf16};
  for (const Accumulation accumulation : {Accumulation::f32, Accumulation::tensor}) {
    const auto plan = make_plan(
        SwigluProblem{4096, 1536, 4608, spec, spec, DType::bf16, Precision::match, accumulation, 0},
        host_facts());
    ASSERT_TRUE(plan);
    std::size_t last = 0;
    for (std::int64_t M = 0; M <= 4096; M += M < 64 ? 1 : 61) {
      const std::size_t bytes = plan->workspace_bytes(M);
      ASSERT_GE(bytes, last) << M;
      last = bytes;
    }
  }
}

}  // namespace
}  // namespace qmlp::test
