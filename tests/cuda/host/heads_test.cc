// The kernel between a layer's projections and its attention, thread by thread on a CPU, against
// loops that say what it is for.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "heads_items.h"

namespace qmlp_mlx {
namespace {

using Bits = std::uint16_t;
constexpr Bits kPoison = 0x7E01;  // a NaN
constexpr int kRoom = 48;

struct F16 {
  using Type = Bits;
  static float wide(Bits v) { return qmlp::f16_to_f32(v); }
  static Bits narrow(float v) { return qmlp::f32_to_f16(v); }
};

std::vector<Bits> random_rows(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> values(-2.0f, 2.0f);
  std::vector<Bits> rows(count);
  for (Bits& v : rows) v = F16::narrow(values(random));
  return rows;
}

struct Case {
  int batch, length, num_heads, num_kv_heads, head_dim, rotated;
  bool traditional, cached, by_periods;
  int heads_each;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const int batch : {1, 3}) {
    for (const int length : {1, 5}) {
      for (const int kv_heads : {1, 2}) {
        for (const int rotated : {0, 16, 64}) {
          for (int flags = 0; flags < 8; ++flags) {
            for (const int each : {1, 4}) {
              const bool by_periods = (flags & 4) != 0 && rotated != 0;
              cases.push_back({batch, length, 4, kv_heads, 64, rotated, (flags & 1) != 0,
                               (flags & 2) != 0, by_periods, each});
            }
          }
        }
      }
    }
  }
  return cases;
}

// x [batch, length, heads, head_dim] rotated, in doubles.
std::vector<double> rotated(const std::vector<Bits>& x, const Case& c, int heads, int offset,
                            const std::vector<float>& periods, double scale, double base) {
  std::vector<double> out(x.begin(), x.end());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = F16::wide(x[i]);
  const int pairs = c.rotated / 2;
  for (int row = 0; row < c.batch * c.length; ++row) {
    const double position = scale * (offset + row % c.length);
    for (int h = 0; h < heads; ++h) {
      const std::size_t at = (static_cast<std::size_t>(row) * heads + h) * c.head_dim;
      for (int p = 0; p < pairs; ++p) {
        const double frequency =
            c.by_periods ? 1.0 / periods[p] : std::pow(base, -static_cast<double>(p) / pairs);
        const double angle = position * frequency;
        const std::size_t i1 = at + (c.traditional ? 2 * p : p);
        const std::size_t i2 = c.traditional ? i1 + 1 : i1 + pairs;
        const double x1 = F16::wide(x[i1]), x2 = F16::wide(x[i2]);
        out[i1] = x1 * std::cos(angle) - x2 * std::sin(angle);
        out[i2] = x1 * std::sin(angle) + x2 * std::cos(angle);
      }
    }
  }
  return out;
}

TEST(Heads, RotatesAndStores) {
  constexpr double kScale = 0.5, kBase = 10000.0;
  int number = 0;
  for (const Case& c : all_cases()) {
    SCOPED_TRACE("case " + std::to_string(number));
    const int offset = c.cached ? 37 : 0;
    const int rows = c.batch * c.length, kv_width = c.num_kv_heads * c.head_dim;
    const auto seed = static_cast<unsigned>(100 * number++);
    const std::vector<Bits> q = random_rows(rows * c.num_heads * c.head_dim, seed);
    const std::vector<Bits> k = random_rows(rows * kv_width, seed + 1);
    const std::vector<Bits> v = random_rows(rows * kv_width, seed + 2);
    std::vector<float> periods(c.rotated / 2);
    for (std::size_t p = 0; p < periods.size(); ++p) periods[p] = 1.5f + 3.0f * p;

    // In place, or to [batch, heads, length, head_dim].
    const bool turns = number % 2 == 0;
    std::vector<Bits> q_now = q, k_now = k, q_turned(q.size(), kPoison);
    std::vector<Bits> keys(c.batch * kRoom * kv_width, kPoison), values = keys;
    HeadsArgs a = {};
    a.q = q_now.data();
    a.k = k_now.data();
    a.v = v.data();
    a.queries = turns ? q_turned.data() : q_now.data();
    a.keys = c.cached ? keys.data() : k_now.data();
    a.values = c.cached ? values.data() : nullptr;
    const std::int64_t D = c.head_dim;
    const std::int64_t in_room[] = {kRoom * kv_width, kRoom * D, D};
    const std::int64_t in_rows[] = {c.length * kv_width, D, kv_width};
    const std::int64_t q_width = c.num_heads * D;
    const std::int64_t q_as_is[] = {c.length * q_width, D, q_width};
    const std::int64_t q_by_heads[] = {c.length * q_width, c.length * D, D};
    for (int axis = 0; axis < 3; ++axis) {
      a.query_strides[axis] = turns ? q_by_heads[axis] : q_as_is[axis];
      a.key_strides[axis] = c.cached ? in_room[axis] : in_rows[axis];
      a.value_strides[axis] = in_room[axis];
    }
    if (c.by_periods) a.periods = periods.data();
    a.period_stride = 1;
    a.scale = kScale;
    a.base_log2 = std::log2(static_cast<float>(kBase));
    a.length = c.length;
    a.num_heads = c.num_heads;
    a.num_kv_heads = c.num_kv_heads;
    a.head_dim = c.head_dim;
    a.rotated = c.rotated;
    a.traditional = c.traditional ? 1 : 0;
    a.offset = offset;
    a.first_head = c.rotated == 0 ? c.num_heads : 0;
    a.heads_each = c.heads_each;
    const int heads = c.num_heads + c.num_kv_heads * (c.cached ? 2 : 1) - a.first_head;
    const int threads = (heads + c.heads_each - 1) / c.heads_each * (c.head_dim / 2);
    for (int row = 0; row < rows; ++row) {
      for (int at = 0; at < threads + static_cast<int>(kHeadsBlock); ++at) {
        heads_item<F16>(a, row, at);
      }
    }

    // f16 of at most 4: half a unit in the last place, and the angles' error.
    constexpr double kBound = 2e-3;
    const std::vector<double> want_q = rotated(q, c, c.num_heads, offset, periods, kScale, kBase);
    for (std::size_t i = 0; i < q.size() && a.first_head == 0; ++i) {
      const auto row = static_cast<std::int64_t>(i) / q_width;
      const std::int64_t head = static_cast<std::int64_t>(i) % q_width / D;
      const std::size_t to = row / c.length * q_by_heads[0] + head * q_by_heads[1] +
                             row % c.length * D + static_cast<std::int64_t>(i) % D;
      ASSERT_NEAR(F16::wide(turns ? q_turned[to] : q_now[i]), want_q[i], kBound) << "q " << i;
    }
    const std::vector<double> want_k =
        rotated(k, c, c.num_kv_heads, offset, periods, kScale, kBase);
    std::size_t written = 0;
    for (int row = 0; row < rows; ++row) {
      const int b = row / c.length, position = offset + row % c.length;
      for (int i = 0; i < kv_width; ++i) {
        const std::size_t from = static_cast<std::size_t>(row) * kv_width + i;
        const std::size_t to =
            c.cached ? b * in_room[0] + i / D * in_room[1] + position * D + i % D : from;
        ASSERT_NEAR(F16::wide(c.cached ? keys[to] : k_now[to]), want_k[from], kBound) << "k " << i;
        if (!c.cached) continue;
        ASSERT_EQ(values[to], v[from]) << "v " << i;
        ++written;
      }
    }
    if (!c.cached) continue;
    for (const auto& room : {keys, values}) {
      std::size_t other = 0;
      for (const Bits bits : room) other += bits != kPoison ? 1 : 0;
      ASSERT_EQ(other, written) << "something else was written";
    }
  }
}

TEST(Heads, NewRoomsTakeOverTheOldOnes) {
  struct Unit {
    std::uint64_t a, b;
    bool operator==(const Unit& o) const { return a == o.a && b == o.b; }
  };
  constexpr Unit kOther = {~0ull, ~0ull};
  for (const int batch : {1, 2}) {
    for (const int heads : {1, 3}) {
      for (const int kept : {0, 7}) {
        for (const bool by_rows : {false, true}) {  // the old one in another order
          constexpr int kWidth = 2, kOld = 9, kNew = 20, kZeroed = 11;
          std::vector<Unit> old(batch * heads * kOld * kWidth),
              room(batch * heads * kNew * kWidth, kOther);
          for (std::size_t i = 0; i < old.size(); ++i) old[i] = {i, i * i};
          CarryArgs a = {};
          a.from[1] = old.data();
          a.to[1] = room.data();
          const std::int64_t by_heads[] = {heads * kOld * kWidth, kOld * kWidth, kWidth};
          const std::int64_t by_position[] = {heads * kOld * kWidth, kWidth, heads * kWidth};
          const std::int64_t* const s = by_rows ? by_position : by_heads;
          for (int axis = 0; axis < 3; ++axis) a.from_strides[1][axis] = s[axis];
          a.batch = batch;
          a.heads = heads;
          a.room = kNew;
          a.width = kWidth;
          a.kept = kept;
          a.zeroed = kZeroed;
          for (std::size_t i = 0; i < room.size(); ++i) carry_item<Unit>(a, 1, i);
          std::size_t i = 0;
          for (int b = 0; b < batch; ++b) {
            for (int h = 0; h < heads; ++h) {
              for (int position = 0; position < kNew; ++position) {
                for (int column = 0; column < kWidth; ++column, ++i) {
                  Unit want = kOther;
                  if (position < kept) want = old[b * s[0] + h * s[1] + position * s[2] + column];
                  if (position >= kZeroed) want = {0, 0};
                  ASSERT_TRUE(room[i] == want) << i;
                }
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace qmlp_mlx
