#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "io/safetensors.h"
#include "io/temp_folder.h"
#include "qmlp/quant.h"
#include "quant/codes.h"
#include "quant/exact.h"

namespace qmlp {
namespace {

using test::expect_error;

constexpr int kWidths[] = {2, 3, 4, 5, 6, 8};

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

TEST(Codes, PackAndUnpackEveryWidth) {
  std::mt19937 random(1);
  for (const int bits : kWidths) {
    constexpr std::int64_t kCodes = 96;
    std::uint8_t codes[kCodes];
    for (auto& code : codes) code = static_cast<std::uint8_t>(random() % (1u << bits));
    std::vector<std::byte> packed(static_cast<std::size_t>(packed_row_bytes(kCodes, bits)));
    pack_row(codes, bits, kCodes, packed.data());
    // The definition: code k in stream bits [k * bits, (k + 1) * bits), least significant first.
    for (std::int64_t k = 0; k < kCodes; ++k) {
      int code = 0;
      for (int i = 0; i < bits; ++i) {
        const std::int64_t at = k * bits + i;
        code |= ((std::to_integer<int>(packed[static_cast<std::size_t>(at / 8)]) >> (at % 8)) & 1)
                << i;
      }
      EXPECT_EQ(code, codes[k]);
      EXPECT_EQ(extract_code(packed.data(), bits, k), codes[k]) << bits << " bits at " << k;
    }
    std::uint8_t again[kCodes];
    unpack_row(packed.data(), bits, kCodes, again);
    EXPECT_EQ(std::memcmp(codes, again, kCodes), 0);
  }
}

TEST(Quantize, EqualsMlxOnEveryVector) {
  const auto file =
      SafetensorsFile::open(std::string(QMLP_TEST_DATA) + "/quantize_mlx.safetensors");
  ASSERT_TRUE(file.has_value()) << file.error().message;
  std::map<std::string, const SafetensorsEntry*> entries;
  for (const auto& entry : file->header().entries) entries[entry.name] = &entry;
  int cases = 0;
  for (const auto& [name, entry] : entries) {
    if (name.size() < 2 || name.substr(name.size() - 2) != ".w") continue;
    const std::string base = name.substr(0, name.size() - 2);
    const auto bits_at = base.rfind("_b");
    const auto group_at = base.rfind("_g");
    const DType dtype = *float_dtype(entry->dtype);
    const QuantSpec spec{std::stoi(base.substr(bits_at + 2)), std::stoi(base.substr(group_at + 2)),
                         dtype};
    const std::int64_t N = entry->shape[0];
    const std::int64_t K = entry->shape[1];
    std::vector<float> weights(static_cast<std::size_t>(N * K));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i] = load_float(file->data(*entry).data(), dtype, static_cast<std::int64_t>(i));
    }
    const auto made = quantize(weights, N, K, spec);
    ASSERT_TRUE(made.has_value()) << base << ": " << made.error().message;
    EXPECT_TRUE(same_bytes(made->codes, file->data(*entries.at(base + ".weight")))) << base;
    EXPECT_TRUE(same_bytes(made->scales, file->data(*entries.at(base + ".scales")))) << base;
    EXPECT_TRUE(same_bytes(made->biases, file->data(*entries.at(base + ".biases")))) << base;
    EXPECT_TRUE(validate(made->view()).has_value());
    ++cases;
  }
  EXPECT_EQ(cases, 6 * 11 * 3);
}

TEST(Quantize, RefusesBadInput) {
  std::vector<float> weights(64, 1.0f);
  const QuantSpec spec{4, 32, DType::f32};
  EXPECT_TRUE(quantize(weights, 2, 32, spec).has_value());
  expect_error(quantize(weights, 1, 32, spec), Errc::invalid_argument, "64 values", "[1, 32]");
  expect_error(quantize(weights, 2, 32, {7, 32, DType::f32}), Errc::invalid_argument, "bits: 7");
  expect_error(quantize(weights, 2, 32, {4, 16, DType::f32}), Errc::invalid_argument,
               "group_size: 16");
  expect_error(quantize(weights, 1, 64, {4, 128, DType::f32}), Errc::invalid_argument, "K: 64",
               "128");
  expect_error(quantize(weights, 2, 32, QuantSpec::dense(DType::f32)), Errc::invalid_argument,
               "group_size is 0");
  weights[40] = std::numeric_limits<float>::quiet_NaN();
  expect_error(quantize(weights, 2, 32, spec), Errc::invalid_argument, "row 1", "column 0");
  weights[40] = -std::numeric_limits<float>::infinity();
  expect_error(quantize(weights, 1, 64, spec), Errc::invalid_argument, "row 0", "column 32");
  weights[40] = -3e38f;
  weights[41] = 3e38f;
  expect_error(quantize(weights, 2, 32, spec), Errc::invalid_argument, "spans more than f32");
  // A constant group near f32's limit: MLX divides zero by zero there.
  const std::vector<float> constant(32, 3e38f);
  const auto made = quantize(constant, 1, 32, spec);
  ASSERT_TRUE(made.has_value());
  std::vector<float> decoded(32);
  ASSERT_TRUE(dequantize(made->view(), 0, 1, DType::f32, decoded).has_value());
  EXPECT_EQ(decoded, constant);
}

TEST(Dequantize, RoundsEachCodeOnce) {
  std::mt19937 random(3);
  for (const int bits : kWidths) {
    for (const int group_size : {32, 64, 128}) {
      for (const DType scale_dtype : {DType::f32, DType::f16, DType::bf16}) {
        constexpr std::int64_t kRows = 3;
        constexpr std::int64_t K = 256;
        QuantizedTensor weight;
        weight.N = kRows;
        weight.K = K;
        weight.spec = {bits, group_size, scale_dtype};
        const QuantSizes sizes = *quant_sizes(kRows, K, weight.spec);
        weight.codes.resize(sizes.codes_bytes);
        weight.scales.resize(sizes.scales_bytes);
        weight.biases.resize(sizes.scales_bytes);
        for (auto& byte : weight.codes) byte = static_cast<std::byte>(random());
        std::normal_distribution<float> normal(0.0f, 0.1f);
        const std::int64_t groups = kRows * K / group_size;
        for (std::int64_t g = 0; g < groups; ++g) {
          store_float(weight.scales.data(), scale_dtype, g, normal(random));
          store_float(weight.biases.data(), scale_dtype, g, normal(random) * 100.0f);
        }
        for (const DType to : {DType::f32, DType::f16, DType::bf16}) {
          std::vector<float> out(static_cast<std::size_t>(2 * K));
          ASSERT_TRUE(dequantize(weight.view(), 1, 3, to, out).has_value());
          for (std::int64_t i = 0; i < 2 * K; ++i) {
            const std::int64_t row = 1 + i / K;
            const std::int64_t k = i % K;
            const std::int64_t g = row * (K / group_size) + k / group_size;
            const int code =
                extract_code(weight.codes.data() + row * packed_row_bytes(K, bits), bits, k);
            const float want = exact_weight(load_float(weight.scales.data(), scale_dtype, g), code,
                                            load_float(weight.biases.data(), scale_dtype, g), to);
            ASSERT_EQ(out[static_cast<std::size_t>(i)], want) << bits << " " << row << " " << k;
          }
        }
      }
    }
  }
}

TEST(Dequantize, DenseWeightsAndRefusals) {
  const std::vector<float> values{1.0f, 1.00048828125f, -3.0f, 65519.0f};
  QuantizedTensor dense;
  dense.codes.resize(16);
  std::memcpy(dense.codes.data(), values.data(), 16);
  dense.N = 2;
  dense.K = 2;
  dense.spec = QuantSpec::dense(DType::f32);
  std::vector<float> out(4);
  ASSERT_TRUE(dequantize(dense.view(), 0, 2, DType::f16, out).has_value());
  EXPECT_EQ(out, (std::vector<float>{1.0f, 1.0f, -3.0f, 65504.0f}));
  expect_error(dequantize(dense.view(), 0, 3, DType::f16, out), Errc::invalid_argument, "rows",
               "[0, 3)", "[0, 2)");
  expect_error(dequantize(dense.view(), 1, 2, DType::f16, out), Errc::invalid_argument,
               "holds 4 floats, needs 2");
  QuantizedTensorView cut = dense.view();
  cut.codes = cut.codes.first(15);
  expect_error(dequantize(cut, 0, 2, DType::f16, out), Errc::invalid_argument, "codes", "15 bytes",
               "needs 16");
}

TEST(QuantSizes, ChecksEveryField) {
  const auto sizes = quant_sizes(10, 128, {5, 32, DType::f16});
  ASSERT_TRUE(sizes.has_value());
  EXPECT_EQ(sizes->codes_bytes, 10u * 128 * 5 / 8);
  EXPECT_EQ(sizes->scales_bytes, 10u * 4 * 2);
  expect_error(quant_sizes(0, 128, {4, 32, DType::f16}), Errc::invalid_argument, "[0, 128]");
  expect_error(quant_sizes(-1, 128, {4, 32, DType::f16}), Errc::invalid_argument, "[-1, 128]");
  expect_error(quant_sizes(1, 48, {4, 32, DType::f16}), Errc::invalid_argument, "K: 48");
  expect_error(quant_sizes(std::int64_t{1} << 40, std::int64_t{1} << 40, {4, 32, DType::f16}),
               Errc::invalid_argument, "overflows");
  expect_error(quant_sizes(1, std::int64_t{1} << 61, {8, 32, DType::f16}), Errc::invalid_argument,
               "overflows");
  for (const int bits : {-4, 0, 1, 7, 9, 16}) {
    expect_error(validate(QuantSpec{bits, 64, DType::f16}), Errc::invalid_argument, "bits");
  }
  for (const int group_size : {-32, 1, 16, 48, 256}) {
    expect_error(validate(QuantSpec{4, group_size, DType::f16}), Errc::invalid_argument,
                 "group_size");
  }
  expect_error(validate(QuantSpec{32, 0, DType::f16}), Errc::invalid_argument, "bits: 32", "16");
  expect_error(validate(QuantSpec{4, 64, static_cast<DType>(9)}), Errc::invalid_argument,
               "scale_dtype");
  EXPECT_TRUE(validate(QuantSpec::dense(DType::bf16)).has_value());
}

TEST(QuantizedTensorView, NamesTheWrongSpan) {
  const std::vector<float> weights(64 * 2, 0.5f);
  const QuantizedTensor weight = *quantize(weights, 2, 64, {3, 32, DType::bf16});
  QuantizedTensorView view = weight.view();
  view.scales = view.scales.first(2);
  expect_error(validate(view), Errc::invalid_argument, "scales: holds 2 bytes", "needs 8");
  view = weight.view();
  view.biases = {};
  expect_error(validate(view), Errc::invalid_argument, "biases: holds 0 bytes");
  view = weight.view();
  view.spec.bits = 4;
  expect_error(validate(view), Errc::invalid_argument, "codes: holds 48 bytes", "needs 64");
  view = weight.view();  // transposed
  std::swap(view.N, view.K);
  expect_error(validate(view), Errc::invalid_argument, "K: 2");
}

}  // namespace
}  // namespace qmlp
