#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/float16.h"
#include "io/json.h"
#include "io/temp_folder.h"
#include "qmlp/types.h"

namespace qmlp::test {

struct TinyTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

// A two-layer Llama checkpoint with made-up weights, 4 bits in groups of 32 unless changed. Tests
// change one thing and write it out. Files are written by this header alone.
class TinyModel {
 public:
  static constexpr std::int64_t kHidden = 128;
  static constexpr std::int64_t kIntermediate = 160;
  static constexpr std::int64_t kLayers = 2;
  static constexpr std::int64_t kHeads = 4;
  static constexpr std::int64_t kKvHeads = 2;
  static constexpr std::int64_t kHeadDim = 32;
  static constexpr std::int64_t kVocab = 48;

  explicit TinyModel(const QuantSpec& spec = {4, 32, DType::bf16}) {
    config.set("model_type", "llama");
    config.set("hidden_size", kHidden);
    config.set("intermediate_size", kIntermediate);
    config.set("num_hidden_layers", kLayers);
    config.set("num_attention_heads", kHeads);
    config.set("num_key_value_heads", kKvHeads);
    config.set("vocab_size", kVocab);
    config.set("rms_norm_eps", 1e-5);
    config.set("tie_word_embeddings", true);
    config.set("eos_token_id", 2);
    if (!spec.is_dense()) set_global(spec.bits, spec.group_size);
    add_matrix("model.embed_tokens", kVocab, kHidden, spec);
    for (std::int64_t i = 0; i < kLayers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      add_vector(layer + "input_layernorm.weight", kHidden, spec.scale_dtype);
      add_matrix(layer + "self_attn.q_proj", kHeads * kHeadDim, kHidden, spec);
      add_matrix(layer + "self_attn.k_proj", kKvHeads * kHeadDim, kHidden, spec);
      add_matrix(layer + "self_attn.v_proj", kKvHeads * kHeadDim, kHidden, spec);
      add_matrix(layer + "self_attn.o_proj", kHidden, kHeads * kHeadDim, spec);
      add_vector(layer + "post_attention_layernorm.weight", kHidden, spec.scale_dtype);
      add_matrix(layer + "mlp.gate_proj", kIntermediate, kHidden, spec);
      add_matrix(layer + "mlp.up_proj", kIntermediate, kHidden, spec);
      add_matrix(layer + "mlp.down_proj", kHidden, kIntermediate, spec);
    }
    add_vector("model.norm.weight", kHidden, spec.scale_dtype);
  }

  JsonObject config;
  std::vector<TinyTensor> tensors;

  void set_global(int bits, int group_size) {
    JsonObject quantization;
    quantization.set("group_size", group_size);
    quantization.set("bits", bits);
    config.set("quantization", Json(std::move(quantization)));
  }
  void set_override(const std::string& key, Json value) {
    Json quantization = *config.find("quantization");
    quantization.object()->set(key, std::move(value));
    config.set("quantization", std::move(quantization));
  }
  static Json spec_json(int bits, int group_size) {
    JsonObject out;
    out.set("bits", bits);
    out.set("group_size", group_size);
    return Json(std::move(out));
  }

  // Codes are random, scales and biases small; a dense weight is random floats.
  void add_matrix(const std::string& path, std::int64_t N, std::int64_t K, const QuantSpec& spec) {
    remove(path + ".weight");
    remove(path + ".scales");
    remove(path + ".biases");
    if (spec.is_dense()) {
      tensors.push_back(
          {path + ".weight", name_of(spec.scale_dtype), {N, K}, floats(N * K, spec.scale_dtype)});
      return;
    }
    const std::int64_t words = K * spec.bits / 32;
    std::string codes;
    for (std::int64_t i = 0; i < N * words * 4; ++i) codes += static_cast<char>(next() >> 24);
    tensors.push_back({path + ".weight", "U32", {N, words}, std::move(codes)});
    const std::int64_t groups = K / spec.group_size;
    for (const char* part : {".scales", ".biases"}) {
      tensors.push_back({path + part,
                         name_of(spec.scale_dtype),
                         {N, groups},
                         floats(N * groups, spec.scale_dtype)});
    }
  }
  void add_vector(const std::string& name, std::int64_t size, DType dtype) {
    remove(name);
    tensors.push_back({name, name_of(dtype), {size}, floats(size, dtype)});
  }
  void remove(std::string_view name) {
    tensors.erase(std::remove_if(tensors.begin(), tensors.end(),
                                 [name](const TinyTensor& tensor) { return tensor.name == name; }),
                  tensors.end());
  }
  TinyTensor& tensor(std::string_view name) {
    return *std::find_if(tensors.begin(), tensors.end(),
                         [name](const TinyTensor& tensor) { return tensor.name == name; });
  }

  static std::string safetensors(const std::vector<TinyTensor>& list) {
    JsonObject header;
    std::string data;
    for (const TinyTensor& tensor : list) {
      JsonObject entry;
      JsonArray shape;
      for (const std::int64_t dim : tensor.shape) shape.emplace_back(dim);
      entry.set("dtype", tensor.dtype);
      entry.set("shape", Json(std::move(shape)));
      entry.set("data_offsets",
                Json(JsonArray{Json(std::uint64_t{data.size()}),
                               Json(std::uint64_t{data.size() + tensor.bytes.size()})}));
      header.set(tensor.name, Json(std::move(entry)));
      data += tensor.bytes;
    }
    const std::string text = Json(std::move(header)).dump();
    std::string out;
    for (int i = 0; i < 8; ++i) out += static_cast<char>(text.size() >> (8 * i));
    return out + text + data;
  }

  void write_config(const TempFolder& folder) const {
    folder.write("config.json", Json(config).dump(2));
  }
  void write(const TempFolder& folder) const {
    write_config(folder);
    folder.write("model.safetensors", safetensors(tensors));
  }
  // Tensor i goes to shard i % count.
  void write_shards(const TempFolder& folder, std::size_t count, bool with_index) const {
    write_config(folder);
    JsonObject map;
    for (std::size_t shard = 0; shard < count; ++shard) {
      std::vector<TinyTensor> part;
      for (std::size_t i = shard; i < tensors.size(); i += count) {
        part.push_back(tensors[i]);
        map.set(tensors[i].name, shard_name(shard, count));
      }
      folder.write(shard_name(shard, count), safetensors(part));
    }
    JsonObject index;
    index.set("weight_map", Json(std::move(map)));
    if (with_index) folder.write("model.safetensors.index.json", Json(std::move(index)).dump());
  }
  static std::string shard_name(std::size_t shard, std::size_t count) {
    return "model-0000" + std::to_string(shard + 1) + "-of-0000" + std::to_string(count) +
           ".safetensors";
  }

 private:
  static std::string name_of(DType dtype) {
    return dtype == DType::f32 ? "F32" : dtype == DType::f16 ? "F16" : "BF16";
  }
  std::string floats(std::int64_t count, DType dtype) {
    std::string out(static_cast<std::size_t>(count) * size_of(dtype), '\0');
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(static_cast<std::int32_t>(next())) * 0x1p-36f;
      store_float(out.data(), dtype, i, value);
    }
    return out;
  }
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::uint64_t state_ = 1;
};

}  // namespace qmlp::test
