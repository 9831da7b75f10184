#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/float16.h"

namespace qmlp::test {

// GGUF types that the tests write.
enum class Ggml : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30
};

// Writes GGUF version 3 byte by byte, from the format's description alone.
class GgufBuilder {
 public:
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> dims;  // as the file has them: row length first
    Ggml type;
    std::string bytes;
  };

  std::uint32_t version = 3;
  std::uint64_t alignment = 32;
  std::vector<Tensor> tensors;

  void text(const std::string& key, const std::string& value) { set(key, 8, sized(value)); }
  void u32(const std::string& key, std::uint32_t value) { set(key, 4, raw(value)); }
  void f32(const std::string& key, float value) { set(key, 6, raw(value)); }
  void flag(const std::string& key, bool value) {
    set(key, 7, std::string(1, value ? '\1' : '\0'));
  }
  void texts(const std::string& key, const std::vector<std::string>& values) {
    std::string body = raw(std::uint32_t{8}) + raw(std::uint64_t{values.size()});
    for (const std::string& value : values) body += sized(value);
    set(key, 9, body);
  }
  void f32s(const std::string& key, const std::vector<float>& values) {
    std::string body = raw(std::uint32_t{6}) + raw(std::uint64_t{values.size()});
    for (const float value : values) body += raw(value);
    set(key, 9, body);
  }
  void i32s(const std::string& key, const std::vector<std::int32_t>& values) {
    std::string body = raw(std::uint32_t{5}) + raw(std::uint64_t{values.size()});
    for (const std::int32_t value : values) body += raw(value);
    set(key, 9, body);
  }
  // A value of any type from its bytes.
  void set(const std::string& key, std::uint32_t type, const std::string& body) {
    unset(key);
    metadata_.emplace_back(key, raw(type) + body);
  }
  void unset(std::string_view key) {
    for (std::size_t i = 0; i < metadata_.size(); ++i) {
      if (metadata_[i].first == key) {
        metadata_.erase(metadata_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
    }
  }
  // Turns "llama.block_count" into "qwen2.block_count", and so on.
  void set_architecture(const std::string& name) {
    text("general.architecture", name);
    constexpr std::string_view kOld = "llama.";
    for (auto& [key, value] : metadata_) {
      if (key.compare(0, kOld.size(), kOld) == 0) key = name + key.substr(kOld.size() - 1);
    }
  }
  Tensor& tensor(std::string_view name) {
    for (Tensor& entry : tensors) {
      if (entry.name == name) return entry;
    }
    return tensors.front();
  }
  void remove(std::string_view name) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].name == name) {
        tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
    }
  }

  // Where each record of the last header() began: the counts, the keys, the tensors.
  const std::vector<std::size_t>& boundaries() const { return boundaries_; }
  std::string header() const {
    boundaries_ = {0, 4, 8, 16};
    std::string out = "GGUF" + raw(version) + raw(std::uint64_t{tensors.size()}) +
                      raw(std::uint64_t{metadata_.size()});
    for (const auto& [key, value] : metadata_) {
      boundaries_.push_back(out.size());
      out += sized(key) + value;
    }
    std::uint64_t offset = 0;
    for (const Tensor& entry : tensors) {
      boundaries_.push_back(out.size());
      out += sized(entry.name) + raw(static_cast<std::uint32_t>(entry.dims.size()));
      for (const std::uint64_t dim : entry.dims) out += raw(dim);
      out += raw(static_cast<std::uint32_t>(entry.type)) + raw(offset);
      offset = padded(offset + entry.bytes.size());
    }
    return out;
  }
  std::string build() const {
    std::string out = header();
    out.resize(padded(out.size()), '\0');
    for (const Tensor& entry : tensors) {
      out += entry.bytes;
      out.resize(padded(out.size()), '\0');
    }
    return out;
  }

  template <class T>
  static std::string raw(T value) {
    std::string out(sizeof value, '\0');
    std::memcpy(out.data(), &value, sizeof value);
    return out;
  }
  static std::string sized(const std::string& value) {
    return raw(std::uint64_t{value.size()}) + value;
  }

 private:
  std::uint64_t padded(std::uint64_t size) const {
    return (size + alignment - 1) / alignment * alignment;
  }
  std::vector<std::pair<std::string, std::string>> metadata_;
  mutable std::vector<std::size_t> boundaries_;
};

// One weight in plain form: codes, and d and m of each block of 32 as f16 bits.
struct PlainWeight {
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::vector<int> codes;  // [N, K], unsigned
  std::vector<std::uint16_t> d;
  std::vector<std::uint16_t> m;

  // The blocks as ggml's quantize functions lay them out.
  std::string encode(Ggml type) const {
    std::string out;
    for (std::size_t block = 0; block < d.size(); ++block) {
      const int* q = codes.data() + block * 32;
      out += GgufBuilder::raw(d[block]);
      if (type == Ggml::q4_1 || type == Ggml::q5_1) out += GgufBuilder::raw(m[block]);
      if (type == Ggml::q8_0) {
        for (int i = 0; i < 32; ++i) out += static_cast<char>(q[i] - 128);
        continue;
      }
      if (type == Ggml::q5_0 || type == Ggml::q5_1) {
        std::uint32_t fifth = 0;
        for (int i = 0; i < 32; ++i) fifth |= static_cast<std::uint32_t>(q[i] >> 4 & 1) << i;
        out += GgufBuilder::raw(fifth);
      }
      for (int i = 0; i < 16; ++i) out += static_cast<char>((q[i] & 15) | (q[i + 16] & 15) << 4);
    }
    return out;
  }
  // The value that the type gives element (row, k), exact in double.
  double value(Ggml type, std::int64_t row, std::int64_t k) const {
    const auto at = static_cast<std::size_t>(row * K + k);
    const double scale = f16_to_f32(d[at / 32]);
    switch (type) {
      case Ggml::q4_0:
        return scale * (codes[at] - 8);
      case Ggml::q5_0:
        return scale * (codes[at] - 16);
      case Ggml::q8_0:
        return scale * (codes[at] - 128);
      default:
        return scale * codes[at] + static_cast<double>(f16_to_f32(m[at / 32]));
    }
  }
};

}  // namespace qmlp::test
