// dump_ggml TYPE K IN OUT: rows of K elements of a GGUF storage type (its id), as f32.
#include <cstdint>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "convert/ggml_types.h"

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const auto type = static_cast<std::uint32_t>(std::stoul(argv[1]));
  const std::int64_t K = std::stoll(argv[2]);
  std::ifstream in(argv[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  const qmlp::GgmlType* format = qmlp::find_ggml_type(type);
  if (format == nullptr || K % format->block_elements != 0) {
    std::cerr << "type " << type << " has no rows of " << K << "\n";
    return 2;
  }
  const std::size_t row_bytes =
      static_cast<std::size_t>(K) / format->block_elements * format->block_bytes;
  std::vector<float> values(static_cast<std::size_t>(K));
  std::ofstream out(argv[4], std::ios::binary);
  for (std::size_t at = 0; at + row_bytes <= bytes.size(); at += row_bytes) {
    const auto* row = reinterpret_cast<const std::byte*>(bytes.data() + at);
    if (qmlp::requantized_bits(type)) {
      qmlp::decode_row(type, row, K, values.data());
    } else if (qmlp::affine_type(type)) {
      const std::size_t groups = values.size() / qmlp::kAffineGroup;
      std::vector<std::uint8_t> codes(values.size());
      std::vector<float> scales(groups);
      std::vector<float> biases(groups);
      qmlp::decode_affine_row(type, row, K, codes.data(), scales.data(), biases.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const std::size_t group = i / qmlp::kAffineGroup;
        // Both operations are exact but for the last rounding.
        values[i] = scales[group] * static_cast<float>(codes[i]) + biases[group];
      }
    } else {
      std::cerr << "type " << format->name << " is not decoded\n";
      return 2;
    }
    out.write(reinterpret_cast<const char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(float)));
  }
  return out.good() ? 0 : 3;
}
