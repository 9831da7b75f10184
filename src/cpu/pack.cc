#include "cpu/pack.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/checked.h"
#include "base/float16.h"
#include "base/try.h"
#include "quant/codes.h"
#include "quant/exact.h"

namespace qmlp::cpu {
namespace {

struct Exponents {
  int top, last;  // of the leading and of the last set binary digit
};
// value is finite and not zero.
Exponents exponents_of(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const int field = static_cast<int>(bits >> 23 & 255u);
  std::uint32_t significand = bits & 0x7FFFFFu;
  if (field != 0) significand |= 0x800000u;
  const int unit = (field != 0 ? field : 1) - 150;
  return {unit + 31 - std::countl_zero(significand), unit + std::countr_zero(significand)};
}

// What decode_inl.h computes for a 16-bit activation type.
float fast_weight(float scale, int code, float bias, DType activation) noexcept {
  const float prescale = activation == DType::bf16 ? 65536.0f : 8192.0f;
  const float keep = 1.0f - 1.0f / prescale;
  const float a = std::fma(scale * prescale, static_cast<float>(code), bias * prescale);
  return a - a * keep;
}

// Whether the fast decoding of every code of a group is the exactly rounded weight, by the ranges
// of docs/numerics.md section 2: the f32 sum s*q + z is exact, or its rounding cannot meet that of
// T.
bool fast_by_range(float scale, float bias, const QuantSpec& spec, DType activation) noexcept {
  const float s = std::fabs(scale), z = std::fabs(bias);
  constexpr float kLeast = 0x1p-60f, kMost = 0x1p60f;
  if (!(s <= kMost && z <= kMost)) return false;  // NaN too
  if ((s != 0.0f && s < kLeast) || (z != 0.0f && z < kLeast)) return false;
  const int max_code = (1 << spec.bits) - 1;
  if (activation == DType::f16 && s * static_cast<float>(max_code) + z >= 65504.0f) return false;
  if (s == 0.0f && z == 0.0f) return true;

  int top = -1000, last = 1000;
  if (s != 0.0f) {
    const Exponents e = exponents_of(s);
    top = e.top + spec.bits;
    last = e.last;
  }
  if (z != 0.0f) {
    const Exponents e = exponents_of(z);
    top = std::max(top, e.top);
    last = std::min(last, e.last);
  }
  // Below 2^-14 f16's grid is 2^-24; a coarser sum needs no rounding there.
  if (activation == DType::f16 && last < -24) return false;
  if (top + 2 - last <= 24) return true;
  if (spec.scale_dtype != activation) return false;
  if (z == 0.0f) return true;
  if (activation == DType::bf16) return z >= 0x1p-15f * s;
  return z >= 0x1p-5f * s && z <= 0x1p13f * s;
}

bool fast_by_trial(const QuantizedTensorView& w, std::int64_t row, std::int64_t group, float scale,
                   float bias, DType activation) noexcept {
  const std::byte* codes = w.codes.data() + row * packed_row_bytes(w.K, w.spec.bits);
  const std::int64_t begin = group * w.spec.group_size;
  for (std::int64_t k = begin; k < begin + w.spec.group_size; ++k) {
    const int code = extract_code(codes, w.spec.bits, k);
    const float exact = exact_weight(scale, code, bias, activation);
    const float fast = fast_weight(scale, code, bias, activation);
    if (!(exact - exact == 0.0f) || exact != fast) return false;
  }
  return true;
}

struct BlockFacts {
  bool fast = true;
  bool non_finite = false;
};

BlockFacts inspect_block(const QuantizedTensorView& w, std::int64_t block,
                         DType activation) noexcept {
  BlockFacts facts;
  const std::int64_t row_end = std::min<std::int64_t>(w.N, (block + 1) * kLanes);
  const std::int64_t groups = w.K / w.spec.group_size;
  for (std::int64_t row = block * kLanes; row < row_end; ++row) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const float s = load_float(w.scales.data(), w.spec.scale_dtype, row * groups + g);
      const float z = load_float(w.biases.data(), w.spec.scale_dtype, row * groups + g);
      if (activation == DType::f32) {
        const float bound = std::fabs(s) * static_cast<float>(1 << w.spec.bits) + std::fabs(z);
        if (!(bound <= 0x1p127f)) facts.non_finite = true;  // or nearly: only speed depends on it
        continue;
      }
      if (fast_by_range(s, z, w.spec, activation)) continue;
      if (fast_by_trial(w, row, g, s, z, activation)) continue;
      facts.fast = false;
      const float top = exact_weight(s, (1 << w.spec.bits) - 1, z, activation);
      const float bottom = exact_weight(s, 0, z, activation);
      if (!(top - top == 0.0f) || !(bottom - bottom == 0.0f)) facts.non_finite = true;
    }
  }
  return facts;
}

std::uint64_t code_block_bytes(const QuantSpec& spec, std::int64_t K) noexcept {
  const std::uint64_t group = 2u * kLanes * size_of(spec.scale_dtype) +
                              static_cast<std::uint64_t>(spec.group_size) / 32u *
                                  static_cast<std::uint64_t>(spec.bits) * 4u * kLanes;
  return static_cast<std::uint64_t>(K / spec.group_size) * group;
}

void fill_code_block(const QuantizedTensorView& w, std::int64_t block,
                     unsigned char* out) noexcept {
  const std::size_t element = size_of(w.spec.scale_dtype);
  const std::int64_t groups = w.K / w.spec.group_size;
  const std::int64_t row_bytes = packed_row_bytes(w.K, w.spec.bits);
  const std::int64_t words_per_group = std::int64_t{w.spec.group_size} / 32 * w.spec.bits;
  const std::int64_t group_bytes =
      static_cast<std::int64_t>(2 * kLanes * element) + words_per_group * 4 * kLanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::int64_t row = block * kLanes + lane;
    if (row >= w.N) break;  // the block was zeroed
    const std::byte* codes = w.codes.data() + row * row_bytes;
    for (std::int64_t g = 0; g < groups; ++g) {
      unsigned char* group = out + g * group_bytes;
      const std::size_t index = static_cast<std::size_t>(row * groups + g) * element;
      std::memcpy(group + lane * element, w.scales.data() + index, element);
      std::memcpy(group + (kLanes + lane) * element, w.biases.data() + index, element);
      unsigned char* words = group + 2 * kLanes * element + 4 * lane;
      for (std::int64_t j = 0; j < words_per_group; ++j) {
        std::memcpy(words + j * 4 * kLanes, codes + 4 * (g * words_per_group + j), 4);
      }
    }
  }
}

void fill_dense_block(const QuantizedTensorView& w, std::int64_t block, DType activation,
                      DType dense_type, unsigned char* out) noexcept {
  for (int lane = 0; lane < kLanes; ++lane) {
    const std::int64_t row = block * kLanes + lane;
    if (row >= w.N) break;
    for (std::int64_t k = 0; k < w.K; ++k) {
      store_float(out, dense_type, k * kLanes + lane, exact_element(w, row, k, activation));
    }
  }
}

bool dense_non_finite(const QuantizedTensorView& w, std::int64_t block, DType activation) noexcept {
  const std::int64_t row_end = std::min<std::int64_t>(w.N, (block + 1) * kLanes);
  for (std::int64_t row = block * kLanes; row < row_end; ++row) {
    for (std::int64_t k = 0; k < w.K; ++k) {
      const float value = exact_element(w, row, k, activation);
      if (!(value - value == 0.0f)) return true;
    }
  }
  return false;
}

}  // namespace

Result<std::shared_ptr<const PackedMatrix>> pack_matrix(const QuantizedTensorView& source,
                                                        DType activation, ThreadPool& pool) {
  QMLP_TRY(validate(source));
  auto packed = std::make_shared<PackedMatrix>();
  packed->spec = source.spec;
  const std::int64_t num_blocks = ceil_div(source.N, kLanes);
  packed->offsets.resize(static_cast<std::size_t>(num_blocks));
  packed->kinds.resize(static_cast<std::size_t>(num_blocks));
  // Floats keep their stored type under f32 activations, where widening is exact.
  const DType dense_type =
      activation == DType::f32 && source.spec.is_dense() ? source.spec.scale_dtype : activation;

  std::atomic<bool> non_finite{false};
  pool.for_each(num_blocks, [&](std::int64_t block, int) {
    const auto i = static_cast<std::size_t>(block);
    if (source.spec.is_dense()) {
      packed->kinds[i] = kDenseBlock;
      if (dense_non_finite(source, block, activation)) non_finite = true;
      return;
    }
    const BlockFacts facts = inspect_block(source, block, activation);
    packed->kinds[i] = facts.fast ? kCodeBlock : kDenseBlock;
    if (facts.non_finite) non_finite = true;
  });

  const std::uint64_t dense_bytes =
      static_cast<std::uint64_t>(source.K) * kLanes * size_of(dense_type);
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < packed->kinds.size(); ++i) {
    packed->offsets[i] = total;
    const bool dense = packed->kinds[i] == kDenseBlock;
    if (dense && !source.spec.is_dense()) ++packed->exact_blocks;
    const std::uint64_t bytes = dense ? dense_bytes : code_block_bytes(source.spec, source.K);
    const auto next = checked_add<std::uint64_t>(total, (bytes + 63u) / 64u * 64u);
    if (!next) return Error{Errc::out_of_memory, "packed weight size overflows 64 bits"};
    total = *next;
  }
  QMLP_ASSIGN(packed->data, AlignedBuffer::allocate(total));

  auto* data = reinterpret_cast<unsigned char*>(packed->data.data());
  pool.for_each(num_blocks, [&](std::int64_t block, int) {
    const auto i = static_cast<std::size_t>(block);
    unsigned char* out = data + packed->offsets[i];
    const std::uint64_t end = i + 1 < packed->offsets.size() ? packed->offsets[i + 1] : total;
    std::memset(out, 0, end - packed->offsets[i]);
    if (packed->kinds[i] == kDenseBlock) {
      fill_dense_block(source, block, activation, dense_type, out);
    } else {
      fill_code_block(source, block, out);
    }
  });

  packed->blocks = {data,
                    packed->offsets.data(),
                    packed->kinds.data(),
                    source.N,
                    source.K,
                    num_blocks,
                    source.spec.bits,
                    source.spec.group_size,
                    static_cast<int>(source.spec.scale_dtype),
                    static_cast<int>(dense_type),
                    non_finite ? 1 : 0};
  return std::shared_ptr<const PackedMatrix>(std::move(packed));
}

bool can_unpack(const PackedMatrix& matrix) noexcept {
  if (!matrix.spec.is_dense()) return matrix.exact_blocks == 0;
  return static_cast<DType>(matrix.blocks.dense_type) == matrix.spec.scale_dtype;
}

void unpack_rows(const PackedMatrix& matrix, std::int64_t row_begin, std::int64_t row_count,
                 std::byte* codes, std::byte* scales, std::byte* biases) noexcept {
  const BlockMatrix& w = matrix.blocks;
  const QuantSpec& spec = matrix.spec;
  const std::size_t element = size_of(spec.scale_dtype);
  const std::int64_t row_end = row_begin + row_count;
  for (std::int64_t block = row_begin / kLanes; block * kLanes < row_end; ++block) {
    const unsigned char* data = w.data + w.block_offsets[block];
    const std::int64_t begin = std::max(row_begin, block * kLanes);
    const std::int64_t end = std::min<std::int64_t>(row_end, (block + 1) * kLanes);
    if (spec.is_dense()) {
      for (std::int64_t k = 0; k < w.K; ++k) {
        for (std::int64_t row = begin; row < end; ++row) {
          const std::int64_t to = (row - row_begin) * w.K + k;
          const std::int64_t from = k * kLanes + row % kLanes;
          std::memcpy(codes + static_cast<std::size_t>(to) * element,
                      data + static_cast<std::size_t>(from) * element, element);
        }
      }
      continue;
    }
    // The reverse of fill_code_block.
    const std::int64_t groups = w.K / spec.group_size;
    const std::int64_t row_bytes = packed_row_bytes(w.K, spec.bits);
    const std::int64_t words_per_group = std::int64_t{spec.group_size} / 32 * spec.bits;
    const std::int64_t group_bytes =
        static_cast<std::int64_t>(2 * kLanes * element) + words_per_group * 4 * kLanes;
    for (std::int64_t g = 0; g < groups; ++g) {
      const unsigned char* group = data + g * group_bytes;
      for (std::int64_t row = begin; row < end; ++row) {
        const auto lane = static_cast<std::size_t>(row % kLanes);
        const std::size_t index =
            static_cast<std::size_t>((row - row_begin) * groups + g) * element;
        std::memcpy(scales + index, group + lane * element, element);
        std::memcpy(biases + index, group + (kLanes + lane) * element, element);
        const unsigned char* words = group + 2 * kLanes * element + 4 * lane;
        std::byte* out = codes + (row - row_begin) * row_bytes + 4 * g * words_per_group;
        for (std::int64_t j = 0; j < words_per_group; ++j) {
          std::memcpy(out + 4 * j, words + j * 4 * kLanes, 4);
        }
      }
    }
  }
}

void decode_row(const PackedMatrix& matrix, DType activation, std::int64_t row,
                void* out) noexcept {
  const BlockMatrix& w = matrix.blocks;
  const std::int64_t block = row / kLanes;
  const std::int64_t lane = row % kLanes;
  const unsigned char* data = w.data + w.block_offsets[block];
  if (w.block_kinds[block] == kDenseBlock) {
    for (std::int64_t k = 0; k < w.K; ++k) {
      store_float(out, activation, k,
                  load_float(data, static_cast<DType>(w.dense_type), k * kLanes + lane));
    }
    return;
  }
  const auto scale_type = static_cast<DType>(w.scale_type);
  const std::size_t scales_bytes = kLanes * size_of(scale_type);
  const std::int64_t words = std::int64_t{w.group_size} / 32 * w.bits;
  for (std::int64_t k = 0; k < w.K; k += w.group_size) {
    const float s = load_float(data, scale_type, lane);
    const float z = load_float(data + scales_bytes, scale_type, lane);
    data += 2 * scales_bytes;
    std::byte codes[128];  // 128 codes of 8 bits
    for (std::int64_t j = 0; j < words; ++j)
      std::memcpy(codes + 4 * j, data + 4 * (j * kLanes + lane), 4);
    data += words * 4 * kLanes;
    for (int i = 0; i < w.group_size; ++i) {
      store_float(out, activation, k + i,
                  exact_weight(s, extract_code(codes, w.bits, i), z, activation));
    }
  }
}

}  // namespace qmlp::cpu
