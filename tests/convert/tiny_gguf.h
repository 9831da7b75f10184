#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/float16.h"
#include "convert/gguf_builder.h"

namespace qmlp::test {

// A one-layer llama GGUF file with a byte-level BPE of a few tokens.
class TinyGguf : public GgufBuilder {
 public:
  static constexpr std::int64_t kHidden = 64;
  static constexpr std::int64_t kIntermediate = 96;
  static constexpr std::int64_t kHeads = 2;
  static constexpr std::int64_t kKvHeads = 1;
  static constexpr std::int64_t kHeadDim = 32;
  static constexpr std::int64_t kVocab = 8;

  explicit TinyGguf(Ggml type = Ggml::q4_1) {
    text("general.architecture", "llama");
    u32("llama.block_count", 1);
    u32("llama.context_length", 512);
    u32("llama.embedding_length", kHidden);
    u32("llama.feed_forward_length", kIntermediate);
    u32("llama.attention.head_count", kHeads);
    u32("llama.attention.head_count_kv", kKvHeads);
    f32("llama.rope.freq_base", 100000.0f);
    u32("llama.rope.dimension_count", kHeadDim);
    f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    text("tokenizer.ggml.model", "gpt2");
    text("tokenizer.ggml.pre", "smollm");
    texts("tokenizer.ggml.tokens",
          {"<|endoftext|>", "<|im_end|>", "<tool>", "a", "b", "ab", "\xC4\xA0",
           "\xC4\xA0"
           "a"});
    i32s("tokenizer.ggml.token_type", {3, 3, 4, 1, 1, 1, 1, 1});
    texts("tokenizer.ggml.merges", {"a b", "\xC4\xA0 a"});
    u32("tokenizer.ggml.bos_token_id", 0);
    u32("tokenizer.ggml.eos_token_id", 0);
    text("tokenizer.chat_template", "{{ 'x\n' }}");
    add_matrix("token_embd.weight", kVocab, kHidden, type);
    add_vector("output_norm.weight", kHidden);
    add_vector("blk.0.attn_norm.weight", kHidden);
    add_vector("blk.0.ffn_norm.weight", kHidden);
    add_matrix("blk.0.attn_q.weight", kHeads * kHeadDim, kHidden, type);
    add_matrix("blk.0.attn_k.weight", kKvHeads * kHeadDim, kHidden, type);
    add_matrix("blk.0.attn_v.weight", kKvHeads * kHeadDim, kHidden, type);
    add_matrix("blk.0.attn_output.weight", kHidden, kHeads * kHeadDim, type);
    add_matrix("blk.0.ffn_gate.weight", kIntermediate, kHidden, type);
    add_matrix("blk.0.ffn_up.weight", kIntermediate, kHidden, type);
    add_matrix("blk.0.ffn_down.weight", kHidden, kIntermediate, type);
  }

  std::map<std::string, PlainWeight> plain;          // of the affine tensors
  std::map<std::string, std::vector<float>> floats;  // of the others

  void add_matrix(const std::string& name, std::int64_t N, std::int64_t K, Ggml type) {
    remove(name);
    Tensor tensor{name, {static_cast<std::uint64_t>(K), static_cast<std::uint64_t>(N)}, type, {}};
    if (type == Ggml::f32 || type == Ggml::f16 || type == Ggml::bf16) {
      tensor.bytes = random_floats(name, N * K, type);
    } else if (type == Ggml::q4_k || type == Ggml::q6_k) {
      tensor.bytes.resize(static_cast<std::size_t>(N * K / 256 * (type == Ggml::q4_k ? 144 : 210)));
    } else {
      PlainWeight weight{N, K, {}, {}, {}};
      const int bits = type == Ggml::q8_0 ? 8 : type == Ggml::q5_0 || type == Ggml::q5_1 ? 5 : 4;
      std::uniform_int_distribution<int> code(0, (1 << bits) - 1);
      std::normal_distribution<float> normal(0.0f, 0.1f);
      for (std::int64_t i = 0; i < N * K; ++i) weight.codes.push_back(code(random_));
      for (std::int64_t i = 0; i < N * K / 32; ++i) {
        weight.d.push_back(f32_to_f16(normal(random_)));
        weight.m.push_back(f32_to_f16(normal(random_)));
      }
      tensor.bytes = weight.encode(type);
      plain[name] = std::move(weight);
    }
    tensors.push_back(std::move(tensor));
  }
  void add_vector(const std::string& name, std::int64_t size, Ggml type = Ggml::f32) {
    remove(name);
    Tensor tensor{name, {static_cast<std::uint64_t>(size)}, type, {}};
    tensor.bytes = random_floats(name, size, type);
    tensors.push_back(std::move(tensor));
  }

 private:
  // Values that bf16 and f16 both hold.
  std::string random_floats(const std::string& name, std::int64_t count, Ggml type) {
    std::string out;
    std::uniform_int_distribution<int> numerator(-127, 127);
    std::vector<float>& values = floats[name];
    values.clear();
    for (std::int64_t i = 0; i < count; ++i) {
      values.push_back(static_cast<float>(numerator(random_)) / 64.0f);
      const float value = values.back();
      if (type == Ggml::f32) out += raw(value);
      if (type == Ggml::f16) out += raw(f32_to_f16(value));
      if (type == Ggml::bf16) out += raw(f32_to_bf16(value));
    }
    return out;
  }
  std::mt19937 random_{11};
};

}  // namespace qmlp::test
