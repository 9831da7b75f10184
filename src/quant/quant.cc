#include "qmlp/quant.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "quant/codes.h"
#include "quant/exact.h"

namespace qmlp {
namespace {

std::string shape_text(std::int64_t N, std::int64_t K) { return concat("[", N, ", ", K, "]"); }

std::string spec_text(const QuantSpec& spec) {
  if (spec.is_dense()) return concat("dense ", to_string(spec.scale_dtype));
  return concat(spec.bits, " bits, group ", spec.group_size, ", ", to_string(spec.scale_dtype),
                " scales");
}

Status check_span(const char* name, std::size_t have, std::uint64_t need,
                  const QuantizedTensorView& weight) {
  if (have == need) return {};
  return Error{Errc::invalid_argument,
               concat(name, ": holds ", have, " bytes, ", shape_text(weight.N, weight.K), " at ",
                      spec_text(weight.spec), " needs ", need)};
}

}  // namespace

Status validate(const QuantSpec& spec) {
  if (spec.scale_dtype != DType::f32 && spec.scale_dtype != DType::f16 &&
      spec.scale_dtype != DType::bf16) {
    return Error{Errc::invalid_argument, "scale_dtype: not f32, f16 or bf16"};
  }
  if (spec.is_dense()) {
    const int need = static_cast<int>(8 * size_of(spec.scale_dtype));
    if (spec.bits == need) return {};
    return Error{Errc::invalid_argument,
                 concat("bits: ", spec.bits, ", a dense ", to_string(spec.scale_dtype),
                        " weight needs ", need)};
  }
  if (!is_code_width(spec.bits)) {
    return Error{Errc::invalid_argument, concat("bits: ", spec.bits, ", needs 2, 3, 4, 5, 6 or 8")};
  }
  if (spec.group_size != 32 && spec.group_size != 64 && spec.group_size != 128) {
    return Error{Errc::invalid_argument,
                 concat("group_size: ", spec.group_size, ", needs 32, 64 or 128 (0 when dense)")};
  }
  return {};
}

Result<QuantSizes> quant_sizes(std::int64_t N, std::int64_t K, const QuantSpec& spec) {
  QMLP_TRY(validate(spec));
  if (N < 1 || K < 1) {
    return Error{Errc::invalid_argument,
                 concat("shape: ", shape_text(N, K), ", needs N and K >= 1")};
  }
  const auto cells = checked_mul<std::int64_t>(N, K);
  const auto total_bits = checked_mul<std::int64_t>(cells.value_or(0), spec.bits);
  if (!cells || !total_bits) {
    return Error{Errc::invalid_argument, concat("shape: ", shape_text(N, K), " at ",
                                                spec_text(spec), " overflows 64 bits")};
  }
  QuantSizes sizes;
  sizes.codes_bytes = static_cast<std::uint64_t>(*total_bits) / 8;
  if (spec.is_dense()) return sizes;
  if (K % spec.group_size != 0) {
    return Error{Errc::invalid_argument,
                 concat("K: ", K, ", needs a multiple of group ", spec.group_size)};
  }
  sizes.scales_bytes =
      static_cast<std::uint64_t>(*cells / spec.group_size) * size_of(spec.scale_dtype);
  return sizes;
}

Status validate(const QuantizedTensorView& weight) {
  QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(weight.N, weight.K, weight.spec));
  QMLP_TRY(check_span("codes", weight.codes.size(), sizes.codes_bytes, weight));
  QMLP_TRY(check_span("scales", weight.scales.size(), sizes.scales_bytes, weight));
  QMLP_TRY(check_span("biases", weight.biases.size(), sizes.scales_bytes, weight));
  return {};
}

namespace {

void dequantize_row(const QuantizedTensorView& weight, std::int64_t row, DType type,
                    std::uint8_t* codes, float* out) noexcept {
  const QuantSpec& spec = weight.spec;
  const std::int64_t groups = weight.K / spec.group_size;
  unpack_row(weight.codes.data() + row * packed_row_bytes(weight.K, spec.bits), spec.bits, weight.K,
             codes);
  const int num_codes = 1 << spec.bits;
  float table[64];
  const bool use_table = num_codes <= spec.group_size && num_codes <= 64;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t at = row * groups + g;
    const float scale = load_float(weight.scales.data(), spec.scale_dtype, at);
    const float bias = load_float(weight.biases.data(), spec.scale_dtype, at);
    const std::uint8_t* group_codes = codes + g * spec.group_size;
    float* group_out = out + g * spec.group_size;
    if (use_table) {
      for (int q = 0; q < num_codes; ++q) table[q] = exact_weight(scale, q, bias, type);
      for (int i = 0; i < spec.group_size; ++i) group_out[i] = table[group_codes[i]];
    } else {
      for (int i = 0; i < spec.group_size; ++i) {
        group_out[i] = exact_weight(scale, group_codes[i], bias, type);
      }
    }
  }
}

}  // namespace

Status dequantize(const QuantizedTensorView& weight, std::int64_t row_begin, std::int64_t row_end,
                  DType round_to_type, std::span<float> out) {
  QMLP_TRY(validate(weight));
  if (row_begin < 0 || row_end < row_begin || row_end > weight.N) {
    return Error{Errc::invalid_argument, concat("rows: [", row_begin, ", ", row_end,
                                                "), needs a range inside [0, ", weight.N, ")")};
  }
  const std::int64_t need = (row_end - row_begin) * weight.K;
  if (out.size() != static_cast<std::uint64_t>(need)) {
    return Error{Errc::invalid_argument,
                 concat("out: holds ", out.size(), " floats, needs ", need)};
  }
  if (weight.spec.is_dense()) {
    for (std::int64_t i = 0; i < need; ++i) {
      const float value =
          load_float(weight.codes.data(), weight.spec.scale_dtype, row_begin * weight.K + i);
      out[static_cast<std::size_t>(i)] = round_to(value, round_to_type);
    }
    return {};
  }
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(weight.K));
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    dequantize_row(weight, row, round_to_type, codes.data(),
                   out.data() + (row - row_begin) * weight.K);
  }
  return {};
}

}  // namespace qmlp
