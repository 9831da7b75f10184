#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "model/kernel_fixture.h"

namespace qmlp::test {
namespace {

struct Shape {
  std::int64_t num_heads, num_kv_heads, head_dim;
  std::int64_t position;  // keys before the first query
  std::int64_t M;
  std::int64_t window = 0;
  // Of query m: the first key that it sees.
  std::int64_t first(std::int64_t m) const {
    return window == 0 ? 0 : std::max<std::int64_t>(position + m + 1 - window, 0);
  }
};

// Queries, a cache whose unused cells hold NaN, and the arguments that describe them.
struct Problem {
  Problem(DType dtype, const Shape& s, std::uint64_t seed, double scale = 1.0)
      : shape(s),
        positions(round_up(s.position + s.M, cpu::kCacheBlock)),
        v_row_stride(round_up(s.head_dim, 16)),
        q(dtype, s.M * s.num_heads * s.head_dim),
        keys(dtype, s.num_kv_heads * (s.position + s.M) * s.head_dim),
        values(dtype, keys.count),
        k_cache(dtype, s.num_kv_heads * positions * s.head_dim),
        v_cache(dtype, s.num_kv_heads * positions * v_row_stride) {
    Random random(seed);
    q.fill_normal(random, scale);
    keys.fill_normal(random, scale);
    values.fill_normal(random);
    k_cache.fill(NAN);
    v_cache.fill(NAN);
    const std::int64_t total = s.position + s.M;
    for (std::int64_t head = 0; head < s.num_kv_heads; ++head) {
      for (std::int64_t p = 0; p < total; ++p) {
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          k_cache.set(head * positions * s.head_dim + (p / 16 * s.head_dim + d) * 16 + p % 16,
                      key(head, p, d));
          v_cache.set((head * positions + p) * v_row_stride + d, value(head, p, d));
        }
      }
    }
  }
  float key(std::int64_t head, std::int64_t p, std::int64_t d) const {
    return keys.at((head * (shape.position + shape.M) + p) * shape.head_dim + d);
  }
  float value(std::int64_t head, std::int64_t p, std::int64_t d) const {
    return values.at((head * (shape.position + shape.M) + p) * shape.head_dim + d);
  }

  Values run(const cpu::ModelKernels& kernels, std::int64_t rows_per_call) const {
    Values out(q.dtype, q.count);
    out.fill(-7.0f);
    cpu::AttentionArgs args{};
    args.type = static_cast<int>(q.dtype);
    args.q = q.bytes.data();
    args.out = out.bytes.data();
    args.k_cache = k_cache.bytes.data();
    args.v_cache = v_cache.bytes.data();
    args.num_heads = shape.num_heads;
    args.heads_per_kv = shape.num_heads / shape.num_kv_heads;
    args.head_dim = shape.head_dim;
    args.k_head_stride = positions * shape.head_dim;
    args.v_head_stride = positions * v_row_stride;
    args.v_row_stride = v_row_stride;
    args.score_stride = positions;
    args.position = shape.position;
    args.window = shape.window;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    std::vector<float> scratch(static_cast<std::size_t>(
        cpu::kAttentionRows * (positions + shape.head_dim + v_row_stride)));
    const std::int64_t rows = shape.M * args.heads_per_kv;
    for (std::int64_t head = 0; head < shape.num_kv_heads; ++head) {
      for (std::int64_t row = 0; row < rows; row += rows_per_call) {
        std::fill(scratch.begin(), scratch.end(), NAN);
        kernels.attention(&args, head, row, std::min(rows, row + rows_per_call), scratch.data());
      }
    }
    return out;
  }

  Shape shape;
  std::int64_t positions;
  std::int64_t v_row_stride;
  Values q, keys, values, k_cache, v_cache;
};

constexpr Shape kShapes[] = {
    {1, 1, 2, 0, 1},
    {3, 1, 64, 0, 1},
    {3, 1, 64, 40, 1},
    {9, 3, 64, 5, 7},
    {4, 4, 40, 15, 3},
    {8, 2, 128, 17, 5},
    {6, 1, 24, 0, 33},
    {5, 5, 16, 300, 2},
    {2, 1, 80, 31, 17},
    {7, 1, 8, 1, 2},
    {32, 4, 128, 63, 1},
    // Windows of one key, within a block, across blocks, and wider than what there is.
    {3, 1, 64, 40, 5, 1},
    {6, 2, 24, 0, 33, 7},
    {9, 3, 64, 5, 20, 16},
    {2, 1, 40, 60, 9, 17},
    {5, 5, 16, 300, 3, 33},
    {8, 2, 32, 30, 4, 100},
    {1, 1, 8, 47, 34, 2},
};

// In double, with a bound for what f32 may lose: the scores' error moves each weight by its
// relative size, the sums add one rounding a term, and the store rounds once.
TEST(Attention, IsWithinItsBoundOfADoubleReference) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const Shape& s : kShapes) {
        const Problem problem(dtype, s, 21);
        const Values out = problem.run(*kernels, cpu::kAttentionRows);
        const double scale = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
        for (std::int64_t m = 0; m < s.M; ++m) {
          for (std::int64_t h = 0; h < s.num_heads; ++h) {
            const std::int64_t kv = h / (s.num_heads / s.num_kv_heads);
            const std::int64_t limit = s.position + m + 1;
            const std::int64_t first = s.first(m);
            std::vector<double> scores(static_cast<std::size_t>(limit), -1e300);
            double score_error = 0.0;
            double largest_score = 0.0;
            for (std::int64_t p = first; p < limit; ++p) {
              double dot = 0.0;
              double magnitude = 0.0;
              for (std::int64_t d = 0; d < s.head_dim; ++d) {
                const double product =
                    static_cast<double>(problem.q.at((m * s.num_heads + h) * s.head_dim + d)) *
                    problem.key(kv, p, d);
                dot += product;
                magnitude += std::abs(product);
              }
              scores[static_cast<std::size_t>(p)] = dot * scale;
              score_error = std::max(
                  score_error, static_cast<double>(s.head_dim + 2) * 0x1p-24 * magnitude * scale);
              largest_score = std::max(largest_score, std::abs(dot * scale));
            }
            const double top = *std::max_element(scores.begin(), scores.end());
            double sum = 0.0;
            for (double& score : scores) sum += score = std::exp(score - top);  // 0 before first
            // Errors of both scores in each difference, of the difference, of exp, and of the sums.
            const double relative = 2.0 * (2.0 * score_error + largest_score * 0x1p-23 + 0x1p-22) +
                                    static_cast<double>(2 * limit + 8) * 0x1p-24;
            for (std::int64_t d = 0; d < s.head_dim; ++d) {
              double want = 0.0;
              double magnitude = 0.0;
              for (std::int64_t p = 0; p < limit; ++p) {
                const double term =
                    scores[static_cast<std::size_t>(p)] / sum * problem.value(kv, p, d);
                want += term;
                magnitude += std::abs(term);
              }
              const double got = out.at((m * s.num_heads + h) * s.head_dim + d);
              ASSERT_LE(std::abs(got - want), unit_roundoff(dtype) * std::abs(want) +
                                                  1.01 * relative * magnitude + least_half(dtype))
                  << to_string(isa) << " " << to_string(dtype) << " heads " << s.num_heads
                  << " dim " << s.head_dim << " query " << m << " head " << h << " feature " << d;
            }
          }
        }
      }
    }
  }
}

TEST(Attention, EveryInstructionSetAndEveryTilingGiveTheSameBits) {
  for (const DType dtype : kTypes) {
    for (const Shape& s : kShapes) {
      for (const double scale : {1.0, 6.0}) {
        const Problem problem(dtype, s, 22, scale);
        const Values want = problem.run(*find_model_kernels(Isa::portable), 1);
        for (const auto& [isa, kernels] : usable_kernels()) {
          for (std::int64_t rows = 1; rows <= cpu::kAttentionRows; ++rows) {
            ASSERT_EQ(problem.run(*kernels, rows).bytes, want.bytes)
                << to_string(isa) << " " << to_string(dtype) << " rows " << rows << " heads "
                << s.num_heads << " dim " << s.head_dim << " position " << s.position;
          }
        }
      }
    }
  }
}

// A query's result depends on its own keys alone: the same query as the last of a shorter sequence.
TEST(Attention, LaterKeysChangeNoBit) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      const Shape whole{6, 2, 48, 0, 37};
      Problem problem(dtype, whole, 23);
      // Some values that a product with a masked key's zero would spoil.
      for (std::int64_t i = 0; i < problem.v_cache.count; i += 7) {
        if (!std::isnan(problem.v_cache.at(i))) problem.v_cache.set(i, -0.0f);
      }
      const Values all = problem.run(*kernels, cpu::kAttentionRows);
      const std::int64_t width = whole.num_heads * whole.head_dim;
      for (const std::int64_t m : {0, 1, 14, 15, 16, 17, 35}) {
        Problem one = problem;
        one.shape.position = m;
        one.shape.M = 1;
        for (std::int64_t c = 0; c < width; ++c) one.q.set(c, problem.q.at(m * width + c));
        // Everything after the query's own position is poison.
        for (std::int64_t head = 0; head < whole.num_kv_heads; ++head) {
          for (std::int64_t p = m + 1; p < whole.M; ++p) {
            for (std::int64_t d = 0; d < whole.head_dim; ++d) {
              one.k_cache.set(head * one.positions * whole.head_dim +
                                  (p / 16 * whole.head_dim + d) * 16 + p % 16,
                              INFINITY);
              one.v_cache.set((head * one.positions + p) * one.v_row_stride + d, NAN);
            }
          }
        }
        const Values alone = one.run(*kernels, cpu::kAttentionRows);
        for (std::int64_t c = 0; c < width; ++c) {
          const std::size_t size = size_of(dtype);
          ASSERT_EQ(std::memcmp(alone.bytes.data() + c * size,
                                all.bytes.data() + (m * width + c) * size, size),
                    0)
              << to_string(isa) << " " << to_string(dtype) << " query " << m << " column " << c;
        }
      }
    }
  }
}

// Keys that have left the window are as if they had never been, whatever they hold.
TEST(Attention, KeysBeforeTheWindowChangeNoBit) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t window : {1, 5, 16, 20}) {
        const Shape s{6, 2, 48, 50, 7, window};
        Problem problem(dtype, s, 25);
        const Values want = problem.run(*kernels, cpu::kAttentionRows);
        for (std::int64_t head = 0; head < s.num_kv_heads; ++head) {
          for (std::int64_t p = 0; p < s.first(0); ++p) {
            for (std::int64_t d = 0; d < s.head_dim; ++d) {
              problem.k_cache.set(
                  head * problem.positions * s.head_dim + (p / 16 * s.head_dim + d) * 16 + p % 16,
                  p % 2 == 0 ? NAN : INFINITY);
              problem.v_cache.set((head * problem.positions + p) * problem.v_row_stride + d, NAN);
            }
          }
        }
        ASSERT_EQ(problem.run(*kernels, cpu::kAttentionRows).bytes, want.bytes)
            << to_string(isa) << " " << to_string(dtype) << " window " << window;
        // A window that takes in everything is none.
        problem = Problem(dtype, {6, 2, 48, 50, 7, 0}, 25);
        const Values all = problem.run(*kernels, 3);
        problem.shape.window = 57;
        ASSERT_EQ(problem.run(*kernels, 3).bytes, all.bytes) << to_string(isa);
      }
    }
  }
}

TEST(Attention, ANonFiniteKeyReachesOnlyTheQueriesThatSeeIt) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    const Shape s{2, 1, 16, 0, 8};
    Problem problem(DType::f32, s, 24);
    problem.k_cache.set(3 * 16 + 5, NAN);  // feature 3 of position 5
    const Values out = problem.run(*kernels, 3);
    for (std::int64_t m = 0; m < s.M; ++m) {
      for (std::int64_t c = 0; c < 32; ++c) {
        ASSERT_EQ(std::isnan(out.at(m * 32 + c)), m >= 5) << to_string(isa) << " query " << m;
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::test
