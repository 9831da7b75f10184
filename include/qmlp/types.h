#pragma once

#include <cstddef>
#include <cstdint>

namespace qmlp {

enum class DType : std::uint8_t { f32, f16, bf16 };

constexpr std::size_t size_of(DType dtype) noexcept { return dtype == DType::f32 ? 4 : 2; }
const char* to_string(DType dtype) noexcept;  // "f32", "f16", "bf16"

enum class DeviceKind : std::uint8_t { cpu, cuda, metal };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int ordinal = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

// Where the epilogue rounds (docs/numerics.md section 4).
enum class Precision : std::uint8_t {
  match,  // where the unfused MLX ops round: gate, up, sigmoid, silu, product
  wide,   // f32 throughout, one rounding at the store
};
const char* to_string(Precision precision) noexcept;

// How a dot product is summed (docs/numerics.md section 3).
enum class Accumulation : std::uint8_t {
  f32,     // one chain of fused multiply-adds over ascending k
  tensor,  // steps of 16 terms as the sm_90 tensor core sums them
};
const char* to_string(Accumulation accumulation) noexcept;

// How a weight is stored. Affine: w = scale * code + bias, one pair for each group along K.
// Dense (bits 16 or 32, group_size 0): the floats themselves, of type scale_dtype.
struct QuantSpec {
  int bits = 4;         // 2, 3, 4, 5, 6 or 8; 16 or 32 when dense
  int group_size = 64;  // 32, 64 or 128; 0 when dense
  DType scale_dtype = DType::bf16;

  static constexpr QuantSpec dense(DType dtype) noexcept {
    return {dtype == DType::f32 ? 32 : 16, 0, dtype};
  }
  constexpr bool is_dense() const noexcept { return group_size == 0; }
  friend constexpr bool operator==(const QuantSpec&, const QuantSpec&) = default;
};

}  // namespace qmlp
