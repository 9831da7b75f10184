#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace qmlp {

// A 64-bit checksum and fingerprint; not for adversaries. Each update is padded to whole words, so
// the same bytes in other pieces give another value.
class Hash64 {
 public:
  void update(const void* data, std::size_t size) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(data);
    while (size > 0) {
      std::uint64_t word = 0;
      const std::size_t step = size < 8 ? size : 8;
      std::memcpy(&word, bytes, step);
      mix(word);
      bytes += step;
      size -= step;
    }
  }
  void update(std::string_view text) noexcept {
    mix(text.size());
    update(text.data(), text.size());
  }
  void mix(std::uint64_t word) noexcept {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15u;
    state_ ^= state_ >> 29;
  }
  std::uint64_t value() const noexcept {
    const std::uint64_t mixed = (state_ ^ (state_ >> 32)) * 0xD6E8FEB86659FD93u;
    return mixed ^ (mixed >> 32);
  }

 private:
  std::uint64_t state_ = 0x243F6A8885A308D3u;
};

}  // namespace qmlp
