#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/checked.h"
#include "model/kernel_fixture.h"
#include "model/pinned_math.h"

namespace qmlp::test {
namespace {

Values run_norm(const cpu::ModelKernels& kernels, const Values& x, const std::vector<float>& weight,
                std::int64_t rows, std::int64_t cols, float eps) {
  Values out(x.dtype, x.count);
  const cpu::RmsNormArgs args{static_cast<int>(x.dtype),
                              x.bytes.data(),
                              weight.data(),
                              out.bytes.data(),
                              cols,
                              cols,
                              cols,
                              eps};
  kernels.rms_norm(&args, 0, rows);
  return out;
}

TEST(RmsNorm, IsWithinItsBoundOfADoubleReferenceOnEveryInstructionSet) {
  constexpr std::int64_t kRows = 3;
  for (const DType dtype : kTypes) {
    for (const std::int64_t cols : {1, 2, 15, 16, 17, 33, 64, 100, 576}) {
      Random random(31);
      Values x(dtype, kRows * cols);
      x.fill_normal(random, 3.0);
      std::vector<float> weight(static_cast<std::size_t>(cols));
      for (float& w : weight) w = round_to(static_cast<float>(random.uniform(-2.0, 2.0)), dtype);
      constexpr float kEps = 1e-5f;
      const Values want =
          run_norm(*find_model_kernels(Isa::portable), x, weight, kRows, cols, kEps);
      for (const auto& [isa, kernels] : usable_kernels()) {
        ASSERT_EQ(run_norm(*kernels, x, weight, kRows, cols, kEps).bytes, want.bytes)
            << to_string(isa) << " " << to_string(dtype) << " cols " << cols;
      }
      for (std::int64_t r = 0; r < kRows; ++r) {
        double sum = 0.0;
        for (std::int64_t c = 0; c < cols; ++c) {
          sum += static_cast<double>(x.at(r * cols + c)) * x.at(r * cols + c);
        }
        const double scale = 1.0 / std::sqrt(sum / static_cast<double>(cols) + kEps);
        // Half the sum's relative error, and a rounding each for mean, eps, root, inverse,
        // products.
        const double relative = (static_cast<double>(cols) / 32.0 + 12.0) * 0x1p-24;
        for (std::int64_t c = 0; c < cols; ++c) {
          const double reference = x.at(r * cols + c) * scale * weight[static_cast<std::size_t>(c)];
          ASSERT_LE(
              std::abs(want.at(r * cols + c) - reference),
              (unit_roundoff(dtype) + 1.01 * relative) * std::abs(reference) + least_half(dtype))
              << to_string(dtype) << " cols " << cols << " row " << r << " col " << c;
        }
      }
    }
  }
}

TEST(RmsNorm, ARowOfZerosStaysZero) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    Values x(DType::f16, 20);
    x.fill(0.0f);
    const Values out = run_norm(*kernels, x, std::vector<float>(20, 1.5f), 1, 20, 1e-6f);
    for (std::int64_t i = 0; i < 20; ++i) ASSERT_EQ(out.at(i), 0.0f) << to_string(isa);
  }
}

struct RopeShape {
  std::int64_t num_heads, num_kv_heads, head_dim;
  bool interleaved;
  std::int64_t rotary_dim;
};

struct RopeCase {
  RopeCase(DType dtype, const RopeShape& s)
      : shape(s),
        q(dtype, kRows * s.num_heads * s.head_dim),
        k(dtype, kRows * s.num_kv_heads * s.head_dim),
        v(dtype, k.count),
        k_cache(dtype, s.num_kv_heads * kPositions * s.head_dim),
        v_cache(dtype, s.num_kv_heads * kPositions * round_up(s.head_dim, 16)),
        cosines(static_cast<std::size_t>(kPositions * s.rotary_dim / 2)),
        sines(cosines.size()) {
    Random random(32);
    q.fill_normal(random);
    k.fill_normal(random);
    v.fill_normal(random);
    k_cache.fill(9.0f);
    v_cache.fill(9.0f);
    for (std::size_t i = 0; i < cosines.size(); ++i) {
      const double angle = random.uniform(0.0, 100.0);
      cosines[i] = static_cast<float>(std::cos(angle));
      sines[i] = static_cast<float>(std::sin(angle));
    }
  }
  void run(const cpu::ModelKernels& kernels) {
    cpu::RopeArgs args{};
    args.type = static_cast<int>(q.dtype);
    args.interleaved = shape.interleaved ? 1 : 0;
    args.q = q.bytes.data();
    args.k = k.bytes.data();
    args.v = v.bytes.data();
    args.num_heads = shape.num_heads;
    args.num_kv_heads = shape.num_kv_heads;
    args.head_dim = shape.head_dim;
    args.rotary_dim = shape.rotary_dim;
    args.cosines = cosines.data();
    args.sines = sines.data();
    args.position = kStart;
    args.k_cache = k_cache.bytes.data();
    args.v_cache = v_cache.bytes.data();
    args.k_head_stride = kPositions * shape.head_dim;
    args.v_row_stride = round_up(shape.head_dim, 16);
    args.v_head_stride = kPositions * args.v_row_stride;
    kernels.rope_append(&args, 0, 2);
    kernels.rope_append(&args, 2, kRows);
  }

  static constexpr std::int64_t kRows = 5;
  static constexpr std::int64_t kStart = 14;  // the rows cross a block of the key cache
  static constexpr std::int64_t kPositions = 32;
  RopeShape shape;
  Values q, k, v, k_cache, v_cache;
  std::vector<float> cosines, sines;
};

constexpr RopeShape kRopeShapes[] = {
    {9, 3, 64, false, 64}, {2, 1, 40, false, 40},   {2, 2, 2, false, 2},  {4, 2, 64, true, 64},
    {3, 1, 24, true, 24},  {1, 1, 128, false, 128}, {3, 1, 40, true, 30}, {2, 1, 96, false, 72},
    {4, 2, 20, false, 2},  {2, 1, 17, true, 16},    {6, 3, 48, false, 0}, {2, 1, 33, true, 0},
};

TEST(Rope, IsWithinItsBoundOfADoubleReference) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const RopeShape& s : kRopeShapes) {
        const RopeCase before(dtype, s);
        RopeCase after = before;
        after.run(*kernels);
        const std::int64_t half = s.rotary_dim / 2;
        const auto check = [&](const Values& in, const Values& out, std::int64_t heads) {
          for (std::int64_t row = 0; row < RopeCase::kRows; ++row) {
            for (std::int64_t head = 0; head < heads; ++head) {
              for (std::int64_t i = 0; i < half; ++i) {
                const std::int64_t base = (row * heads + head) * s.head_dim;
                const std::int64_t first = base + (s.interleaved ? 2 * i : i);
                const std::int64_t second = base + (s.interleaved ? 2 * i + 1 : half + i);
                const auto cell = static_cast<std::size_t>((RopeCase::kStart + row) * half + i);
                const double c = before.cosines[cell];
                const double sine = before.sines[cell];
                const double a = in.at(first);
                const double b = in.at(second);
                const double bound = 0x1p-23 * (std::abs(a) + std::abs(b)) + least_half(dtype);
                const double u = unit_roundoff(dtype);
                const double want_first = a * c - b * sine;
                const double want_second = a * sine + b * c;
                ASSERT_LE(std::abs(out.at(first) - want_first), u * std::abs(want_first) + bound);
                ASSERT_LE(std::abs(out.at(second) - want_second),
                          u * std::abs(want_second) + bound);
              }
              for (std::int64_t d = s.rotary_dim; d < s.head_dim; ++d) {
                const std::int64_t at = (row * heads + head) * s.head_dim + d;
                ASSERT_EQ(out.at(at), in.at(at)) << "feature " << d << " is not rotated";
              }
            }
          }
        };
        check(before.q, after.q, s.num_heads);
        check(before.k, after.k, s.num_kv_heads);
      }
    }
  }
}

TEST(Rope, AppendsExactlyTheRowsToTheCache) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const RopeShape& s : kRopeShapes) {
        RopeCase run(dtype, s);
        run.run(*kernels);
        const std::int64_t padded = round_up(s.head_dim, 16);
        for (std::int64_t head = 0; head < s.num_kv_heads; ++head) {
          for (std::int64_t p = 0; p < RopeCase::kPositions; ++p) {
            const std::int64_t row = p - RopeCase::kStart;
            const bool written = row >= 0 && row < RopeCase::kRows;
            for (std::int64_t d = 0; d < padded; ++d) {
              const std::int64_t source = (row * s.num_kv_heads + head) * s.head_dim + d;
              const float v = run.v_cache.at((head * RopeCase::kPositions + p) * padded + d);
              ASSERT_EQ(v, written && d < s.head_dim ? run.v.at(source) : 9.0f);
              if (d >= s.head_dim) continue;
              const float k = run.k_cache.at(head * RopeCase::kPositions * s.head_dim +
                                             (p / 16 * s.head_dim + d) * 16 + p % 16);
              ASSERT_EQ(k, written ? run.k.at(source) : 9.0f)
                  << to_string(isa) << " " << to_string(dtype) << " position " << p;
            }
          }
        }
      }
    }
  }
}

TEST(Rope, EveryInstructionSetGivesTheSameBits) {
  for (const DType dtype : kTypes) {
    for (const RopeShape& s : kRopeShapes) {
      RopeCase want(dtype, s);
      want.run(*find_model_kernels(Isa::portable));
      for (const auto& [isa, kernels] : usable_kernels()) {
        RopeCase got(dtype, s);
        got.run(*kernels);
        ASSERT_EQ(got.q.bytes, want.q.bytes) << to_string(isa) << " " << to_string(dtype);
        ASSERT_EQ(got.k_cache.bytes, want.k_cache.bytes) << to_string(isa);
        ASSERT_EQ(got.v_cache.bytes, want.v_cache.bytes) << to_string(isa);
      }
    }
  }
}

TEST(Scale, RoundsTheProductOnceOnEveryInstructionSet) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t count : {1, 15, 16, 17, 64, 100}) {
        for (const float factor : {12.0f, 0.22f, 1.0f / 9.0f, 0x1p-130f}) {
          Random random(33);
          Values x(dtype, count);
          x.fill_normal(random, 3.0);
          Values y(dtype, count);
          y.fill_normal(random, 3.0);
          Values scaled = x;
          kernels->scale(static_cast<int>(dtype), scaled.bytes.data(), count, factor);
          Values added = x;
          kernels->add_scaled(static_cast<int>(dtype), added.bytes.data(), y.bytes.data(), count,
                              factor);
          for (std::int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(scaled.at(i), round_to(x.at(i) * factor, dtype))
                << to_string(isa) << " " << to_string(dtype) << " " << i << " of " << count;
            ASSERT_EQ(added.at(i), round_to(x.at(i) + round_to(y.at(i) * factor, dtype), dtype))
                << to_string(isa) << " " << to_string(dtype) << " " << i << " of " << count;
          }
        }
      }
    }
  }
}

// The norms of q and k run over short rows, in place.
TEST(RmsNorm, InPlaceChangesNoBit) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      for (const std::int64_t cols : {2, 20, 32, 40}) {
        Random random(34);
        Values x(dtype, 7 * cols);
        x.fill_normal(random, 2.0);
        const std::vector<float> weight(static_cast<std::size_t>(cols), 1.25f);
        const Values want = run_norm(*kernels, x, weight, 7, cols, 1e-6f);
        const cpu::RmsNormArgs args{static_cast<int>(dtype),
                                    x.bytes.data(),
                                    weight.data(),
                                    x.bytes.data(),
                                    cols,
                                    cols,
                                    cols,
                                    1e-6f};
        kernels->rms_norm(&args, 0, 7);
        ASSERT_EQ(x.bytes, want.bytes) << to_string(isa) << " " << to_string(dtype);
      }
    }
  }
}

TEST(FindNonFinite, FindsTheFirstAtEveryPlace) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : kTypes) {
      const float largest = dtype == DType::f16 ? 65504.0f : 3.0e38f;
      for (const std::int64_t count : {1, 15, 16, 17, 50}) {
        Values values(dtype, count);
        values.fill(-largest);
        const auto find = [&values, count, scan = kernels->find_non_finite] {
          return scan(static_cast<int>(values.dtype), values.bytes.data(), count);
        };
        ASSERT_EQ(find(), -1) << to_string(isa) << " " << to_string(dtype);
        for (std::int64_t i = count - 1; i >= 0; --i) {
          const float bad[] = {NAN, INFINITY, -INFINITY};
          values.set(i, bad[i % 3]);
          ASSERT_EQ(find(), i) << to_string(isa) << " " << to_string(dtype) << " of " << count;
        }
      }
      ASSERT_EQ(kernels->find_non_finite(static_cast<int>(dtype), nullptr, 0), -1);
    }
  }
}

TEST(Widen, GivesEveryValueOfASixteenBitType) {
  for (const auto& [isa, kernels] : usable_kernels()) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      constexpr std::int64_t kCount = 65536 + 5;  // with a tail
      Values values(dtype, kCount);
      for (std::int64_t i = 0; i < kCount; ++i) {
        const auto bits = static_cast<std::uint16_t>(i);
        std::memcpy(values.bytes.data() + 2 * i, &bits, 2);
      }
      std::vector<float> wide(kCount);
      kernels->widen(static_cast<int>(dtype), values.bytes.data(), wide.data(), kCount);
      for (std::int64_t i = 0; i < kCount; ++i) {
        const float want = values.at(i);
        const float got = wide[static_cast<std::size_t>(i)];
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(got));
        } else {
          ASSERT_EQ(std::memcmp(&got, &want, 4), 0) << to_string(isa) << " bits " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace qmlp::test
