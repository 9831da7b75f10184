#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/checked.h"
#include "model/kernel_fixture.h"
#include "qmlp/attention.h"
#include "qmlp/cpu.h"

namespace qmlp::test {
namespace {

struct Shape {
  std::int64_t num_heads, num_kv_heads, head_dim, tokens;
  std::int64_t query_width() const { return num_heads * head_dim; }
  std::int64_t kv_width() const { return num_kv_heads * head_dim; }
};
constexpr Shape kShapes[] = {{3, 1, 64, 40}, {4, 4, 40, 17}, {9, 3, 64, 300}, {6, 2, 24, 33}};

MatrixView rows_of(const Values& values, std::int64_t width, std::int64_t first,
                   std::int64_t count) {
  const auto row = width * static_cast<std::int64_t>(size_of(values.dtype));
  return {values.bytes.data() + first * row, count, width, width, values.dtype, Device{}};
}
MutableMatrixView output_rows(Values& values, std::int64_t width, std::int64_t first,
                              std::int64_t count) {
  const auto row = width * static_cast<std::int64_t>(size_of(values.dtype));
  return {values.bytes.data() + first * row, count, width, width, values.dtype, Device{}};
}

class Problem {
 public:
  Problem(DType dtype, const Shape& shape, std::uint64_t seed)
      : shape_(shape),
        q_(dtype, shape.tokens * shape.query_width()),
        k_(dtype, shape.tokens * shape.kv_width()),
        v_(dtype, shape.tokens * shape.kv_width()) {
    Random random(seed);
    for (Values* values : {&q_, &k_, &v_}) values->fill_normal(random);
  }

  std::unique_ptr<AttentionCache> make() const {
    auto cache = AttentionCache::create(shape_.num_kv_heads, shape_.head_dim, q_.dtype);
    EXPECT_TRUE(cache);
    return *std::move(cache);
  }
  void append(AttentionCache& cache, std::int64_t first, std::int64_t count) const {
    const Status status = cache.append(first, rows_of(k_, shape_.kv_width(), first, count),
                                       rows_of(v_, shape_.kv_width(), first, count));
    ASSERT_TRUE(status) << status.error().message;
  }
  // Attention of the last `count` positions, into the rows of those positions.
  void attend(const AttentionCache& cache, std::int64_t count, ThreadPool& pool,
              Values& out) const {
    std::vector<std::byte> workspace(
        attention_workspace_bytes(cache, cache.length(), pool.num_threads()), std::byte{0xFF});
    const std::int64_t first = cache.length() - count;
    const Status status = attention(cache, rows_of(q_, shape_.query_width(), first, count),
                                    output_rows(out, shape_.query_width(), first, count), scale(),
                                    Workspace{workspace}, cpu_stream(pool));
    ASSERT_TRUE(status) << status.error().message;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  // In double: what one element of the output is, to within the bound that is returned too.
  double reference(std::int64_t m, std::int64_t head, std::int64_t d, double* bound) const {
    const std::int64_t kv = head / (shape_.num_heads / shape_.num_kv_heads);
    const auto key = [&](std::int64_t p, std::int64_t i) {
      return static_cast<double>(k_.at(p * shape_.kv_width() + kv * shape_.head_dim + i));
    };
    std::vector<double> scores;
    double largest = -1e300;
    for (std::int64_t p = 0; p <= m; ++p) {
      double dot = 0.0;
      for (std::int64_t i = 0; i < shape_.head_dim; ++i) {
        dot += static_cast<double>(q_.at(m * shape_.query_width() + head * shape_.head_dim + i)) *
               key(p, i);
      }
      scores.push_back(dot * static_cast<double>(scale()));
      largest = std::max(largest, scores.back());
    }
    double total = 0.0;
    double sum = 0.0;
    double magnitude = 0.0;
    for (std::int64_t p = 0; p <= m; ++p) {
      const double e = std::exp(scores[static_cast<std::size_t>(p)] - largest);
      const double value =
          static_cast<double>(v_.at(p * shape_.kv_width() + kv * shape_.head_dim + d));
      total += e;
      sum += e * value;
      magnitude += e * std::abs(value);
    }
    // Scores of some tens err by some 1e-6 each; the sums by one rounding a term.
    *bound = magnitude / total * (2e-5 + static_cast<double>(m) * 0x1p-23) +
             std::abs(sum / total) * unit_roundoff(q_.dtype) + least_half(q_.dtype);
    return sum / total;
  }

  const Shape& shape() const { return shape_; }
  Values output() const {
    Values out(q_.dtype, q_.count);
    out.fill(-7.0f);
    return out;
  }

 private:
  Shape shape_;
  Values q_, k_, v_;
};

TEST(AttentionCache, MatchesAReferenceHoweverThePositionsArrive) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape : kShapes) {
      const Problem problem(dtype, shape, 5);
      Values whole = problem.output();
      auto pool = *ThreadPool::create(1);
      {
        const auto cache = problem.make();
        problem.append(*cache, 0, shape.tokens);
        problem.attend(*cache, shape.tokens, *pool, whole);
      }
      for (std::int64_t m = 0; m < shape.tokens; m += 7) {
        for (std::int64_t i = 0; i < shape.query_width(); i += 13) {
          double bound = 0.0;
          const double want = problem.reference(m, i / shape.head_dim, i % shape.head_dim, &bound);
          ASSERT_NEAR(whole.at(m * shape.query_width() + i), want, bound) << m << " " << i;
        }
      }
      // In pieces, on other numbers of threads, past positions that were dropped: the same bits.
      for (const int threads : {1, 3}) {
        auto other = *ThreadPool::create(threads);
        Values pieces = problem.output();
        const auto cache = problem.make();
        std::int64_t at = 0;
        for (const std::int64_t step : {5, 1, 1, 9, 16, 400}) {
          const std::int64_t count = std::min(step, shape.tokens - at);
          if (count <= 0) break;
          if (at >= 7) {  // again from earlier
            problem.append(*cache, at - 3, 3);
          }
          problem.append(*cache, at, count);
          problem.attend(*cache, count, *other, pieces);
          at += count;
        }
        ASSERT_EQ(at, shape.tokens);
        ASSERT_EQ(pieces.bytes, whole.bytes);
      }
    }
  }
}

TEST(AttentionCache, GivesItsRowsBack) {
  for (const DType dtype : kTypes) {
    const Shape& shape = kShapes[2];
    const Problem problem(dtype, shape, 9);
    const auto cache = problem.make();
    problem.append(*cache, 0, shape.tokens);
    const std::int64_t stride = (shape.tokens + 3) * shape.head_dim;
    Values keys(dtype, shape.num_kv_heads * stride);
    Values values(dtype, keys.count);
    keys.fill(1.0f);
    values.fill(1.0f);
    ASSERT_TRUE(cache->load(shape.tokens, keys.bytes.data(), values.bytes.data(), stride));
    const auto copy = problem.make();
    ASSERT_TRUE(copy->store(shape.tokens, keys.bytes.data(), values.bytes.data(), stride));
    auto pool = *ThreadPool::create(2);
    Values from_first = problem.output();
    Values from_copy = problem.output();
    problem.attend(*cache, shape.tokens, *pool, from_first);
    problem.attend(*copy, shape.tokens, *pool, from_copy);
    EXPECT_EQ(from_first.bytes, from_copy.bytes);
    // The gap between heads is nobody's.
    EXPECT_EQ(keys.at(shape.tokens * shape.head_dim), 1.0f);
    Values again(dtype, keys.count);
    ASSERT_TRUE(copy->load(shape.tokens, again.bytes.data(), nullptr, stride));
    for (std::int64_t i = 0; i < shape.tokens * shape.head_dim; ++i) {
      ASSERT_EQ(again.at(i), keys.at(i));
    }
  }
}

TEST(AttentionCache, Refusals) {
  const auto message = [](const Status& status) {
    EXPECT_FALSE(status);
    return status ? std::string() : status.error().message;
  };
  EXPECT_EQ(AttentionCache::create(0, 64, DType::f32).error().message,
            "num_kv_heads: is 0, must be from 1 to 1048576");
  EXPECT_EQ(AttentionCache::create(2, -1, DType::f32).error().message,
            "head_dim: is -1, must be from 1 to 1048576");
  const Shape shape = {4, 2, 16, 8};
  const Problem problem(DType::f32, shape, 3);
  const auto cache = problem.make();
  problem.append(*cache, 0, 4);
  Values rows(DType::f32, 64);
  EXPECT_EQ(message(cache->append(5, rows_of(rows, 32, 0, 1), rows_of(rows, 32, 0, 1))),
            "position: is 5, must be from 0 to 4, the cache's length");
  EXPECT_EQ(message(cache->append(4, rows_of(rows, 16, 0, 1), rows_of(rows, 32, 0, 1))),
            "k: is 1 x 16 of f32, needs 1 x 32 of f32 on the CPU, without gaps");
  EXPECT_EQ(message(cache->append(4, rows_of(rows, 32, 0, 1), rows_of(rows, 32, 0, 2))),
            "v: is 2 x 32 of f32, needs 1 x 32 of f32 on the CPU, without gaps");
  Values halves(DType::f16, 64);
  EXPECT_EQ(message(cache->append(4, rows_of(halves, 32, 0, 1), rows_of(rows, 32, 0, 1))),
            "k: is 1 x 32 of f16, needs 1 x 32 of f32 on the CPU, without gaps");
  EXPECT_EQ(cache->length(), 4);
  EXPECT_EQ(message(cache->load(5, rows.bytes.data(), rows.bytes.data(), 80)),
            "count: is 5, must be from 0 to 4");
  EXPECT_EQ(message(cache->load(2, rows.bytes.data(), rows.bytes.data(), 31)),
            "head_stride: is 31, needs at least 2 rows of 16");
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(message(cache->load(2, rows.bytes.data(), rows.bytes.data(), kHuge)),
            "head_stride: is " + std::to_string(kHuge) + ", too large for 2 heads");
  MatrixView bad = rows_of(rows, 32, 0, 1);
  bad.data = nullptr;
  EXPECT_EQ(message(cache->append(4, bad, rows_of(rows, 32, 0, 1))), "k: is null");
  EXPECT_EQ(message(cache->append(4, rows_of(rows, 32, 0, 1), bad)), "v: is null");
  bad.data = rows.bytes.data() + 1;
  EXPECT_EQ(message(cache->append(4, bad, rows_of(rows, 32, 0, 1))),
            "k: is not aligned to its elements");
  bad = rows_of(rows, 32, 0, -1);
  EXPECT_EQ(message(cache->append(4, bad, bad)), "k: has -1 rows, must have at least 0");
  EXPECT_EQ(cache->length(), 4);
  EXPECT_EQ(attention_workspace_bytes(*cache, kHuge, 1), 0u);

  auto pool = *ThreadPool::create(1);
  Values out(DType::f32, 64 * 8);
  std::vector<std::byte> workspace(attention_workspace_bytes(*cache, 4, 1));
  const auto attend = [&](std::int64_t width, std::int64_t count, std::size_t bytes) {
    return message(attention(*cache, rows_of(out, width, 0, count),
                             output_rows(out, width, 0, count), 1.0f,
                             Workspace{{workspace.data(), bytes}}, cpu_stream(*pool)));
  };
  EXPECT_EQ(attend(48, 1, workspace.size()),
            "attention: q is 1 x 48 of f32, needs 1 x a multiple of 32 of f32 on the CPU, without "
            "gaps");
  EXPECT_EQ(attend(64, 5, workspace.size()),
            "attention: q has 5 rows, must have at most 4, the cache's length");
  EXPECT_EQ(attend(64, 1, 8),
            "attention: workspace holds 8 bytes, needs " + std::to_string(workspace.size()));
  const auto attend_rows = [&](const MatrixView& q, const MutableMatrixView& to) {
    return message(attention(*cache, q, to, 1.0f, Workspace{workspace}, cpu_stream(*pool)));
  };
  MatrixView no_q = rows_of(out, 64, 0, 1);
  no_q.data = nullptr;
  EXPECT_EQ(attend_rows(no_q, output_rows(out, 64, 0, 1)), "attention: q: is null");
  MutableMatrixView no_out = output_rows(out, 64, 0, 1);
  no_out.data = nullptr;
  EXPECT_EQ(attend_rows(rows_of(out, 64, 0, 1), no_out), "attention: out: is null");
  no_out.data = workspace.data();
  EXPECT_EQ(attend_rows(rows_of(out, 64, 0, 1), no_out),
            "attention: out overlaps the workspace, must be apart");
  EXPECT_EQ(message(attention(*cache, rows_of(out, 64, 0, 1), output_rows(out, 64, 0, 1), 1.0f,
                              Workspace{workspace}, Stream{})),
            "attention: stream is no CPU stream, needs one");
}

}  // namespace
}  // namespace qmlp::test
