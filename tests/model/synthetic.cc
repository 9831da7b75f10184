#include "model/synthetic.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <span>

#include "base/concat.h"
#include "base/float16.h"
#include "io/safetensors_writer.h"
#include "kernels/random.h"
#include "qmlp/exceptions.h"
#include "qmlp/quant.h"

namespace qmlp::test {
namespace {

struct Stored {
  SafetensorsOutput output;
  std::vector<std::byte> bytes;
};

const char* safetensors_name(DType dtype) {
  return dtype == DType::f32 ? "F32" : dtype == DType::f16 ? "F16" : "BF16";
}

Stored store_floats(const std::string& name, std::vector<std::int64_t> shape, DType dtype,
                    std::vector<float>& values) {
  Stored stored;
  stored.bytes.resize(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = round_to(values[i], dtype);
    store_float(stored.bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  }
  stored.output = {name, safetensors_name(dtype), std::move(shape), stored.bytes.size()};
  return stored;
}

std::string last_name(const std::string& path) { return path.substr(path.rfind('.') + 1); }

}  // namespace

QuantSpec affine(int bits, int group_size, DType scale_dtype) {
  return {bits, group_size, scale_dtype};
}

SyntheticSpec mixed_tied() {
  SyntheticSpec spec;
  const DType f16 = DType::f16;
  spec.attention_bias = true;
  spec.mlp_bias = true;
  spec.formats = {
      {"embed_tokens", affine(8, 32, f16)},
      {"q_proj", affine(3, 32, f16)},
      {"k_proj", affine(5, 32, f16)},
      {"v_proj", affine(6, 32, f16)},
      {"o_proj", affine(2, 32, f16)},
      {"gate_proj", affine(4, 32, f16)},
      {"up_proj", affine(8, 32, f16)},
      {"down_proj", affine(5, 32, f16)},
      {"model.layers.1.self_attn.q_proj", QuantSpec::dense(f16)},
      {"model.layers.2.mlp.gate_proj", affine(6, 32, f16)},
  };
  return spec;
}

SyntheticSpec untied_interleaved() {
  SyntheticSpec spec;
  const DType bf16 = DType::bf16;
  spec.hidden = 128;
  spec.intermediate = 192;
  spec.layers = 2;
  spec.heads = 4;
  spec.kv_heads = 4;
  spec.head_dim = 40;
  spec.vocab = 77;
  spec.tied = false;
  spec.interleaved = true;
  spec.rope_factor = 2.5;
  spec.scale_dtype = bf16;
  spec.formats = {
      {"embed_tokens", QuantSpec::dense(bf16)}, {"q_proj", affine(4, 128, bf16)},
      {"k_proj", affine(4, 64, bf16)},          {"v_proj", affine(8, 32, bf16)},
      {"o_proj", affine(4, 32, bf16)},          {"gate_proj", affine(3, 64, bf16)},
      {"up_proj", affine(6, 128, bf16)},        {"down_proj", affine(4, 64, bf16)},
      {"lm_head", affine(6, 64, bf16)},
  };
  spec.seed = 2;
  return spec;
}

SyntheticSpec one_kv_head() {
  SyntheticSpec spec;
  const DType f32 = DType::f32;
  spec.hidden = 64;
  spec.intermediate = 96;
  spec.layers = 2;
  spec.heads = 3;
  spec.kv_heads = 1;
  spec.head_dim = 64;
  spec.vocab = 50;
  spec.scale_dtype = f32;
  spec.rope_theta = 500000.0;
  spec.formats = {
      {"embed_tokens", affine(6, 64, f32)}, {"q_proj", affine(4, 64, f32)},
      {"k_proj", QuantSpec::dense(f32)},    {"v_proj", affine(4, 64, f32)},
      {"o_proj", affine(8, 64, f32)},       {"gate_proj", affine(2, 32, f32)},
      {"up_proj", QuantSpec::dense(f32)},   {"down_proj", affine(3, 32, f32)},
  };
  spec.seed = 3;
  return spec;
}

SyntheticSpec stacked_partial() {
  SyntheticSpec spec;
  const DType bf16 = DType::bf16;
  spec.model_type = "phi3";
  spec.stacked = true;
  spec.tied = false;
  spec.rotary_dim = 10;
  spec.more_config = ",\"partial_rotary_factor\":0.625";
  spec.scale_dtype = bf16;
  spec.formats = {
      {"embed_tokens", affine(4, 32, bf16)},
      {"qkv_proj", affine(5, 32, DType::f16)},
      {"o_proj", affine(4, 32, bf16)},
      {"gate_up_proj", affine(3, 32, bf16)},
      {"down_proj", affine(6, 32, bf16)},
      {"lm_head", affine(8, 32, DType::f32)},
      {"model.layers.1.self_attn.qkv_proj", QuantSpec::dense(bf16)},
      {"model.layers.2.mlp.gate_up_proj", QuantSpec::dense(DType::f32)},
  };
  spec.seed = 4;
  return spec;
}

SyntheticSpec normed_heads() {
  SyntheticSpec spec = mixed_tied();
  spec.model_type = "qwen3";
  spec.attention_bias = spec.mlp_bias = false;
  spec.qk_norm = true;
  spec.head_dim = 32;
  spec.seed = 5;
  return spec;
}

SyntheticSpec scaled() {
  SyntheticSpec spec = mixed_tied();
  spec.model_type = "granite";
  spec.embedding_scale = 12.0;
  spec.attention_scale = 0.3;
  spec.residual_scale = 0.22;
  spec.logits_scale = 1.0 / 3.0;
  spec.more_config =
      ",\"embedding_multiplier\":12.0,\"attention_multiplier\":0.3,"
      "\"residual_multiplier\":0.22,\"logits_scaling\":3.0";
  spec.seed = 6;
  return spec;
}

SyntheticSpec unlike_layers() {
  SyntheticSpec spec = one_kv_head();
  spec.model_type = "smollm3";
  spec.layers = 3;
  spec.unrotated_layers = {1};
  spec.window_layers = {0, 1};
  spec.window = 9;
  spec.more_config =
      ",\"no_rope_layers\":[1,0,1],\"sliding_window\":9,\"layer_types\":"
      "[\"sliding_attention\",\"sliding_attention\",\"full_attention\"]";
  spec.seed = 7;
  return spec;
}

SyntheticModel::SyntheticModel(const SyntheticSpec& spec) : spec_(spec) {
  static int count = 0;
  folder_ = std::filesystem::temp_directory_path() /
            concat("qmlp_model_test_", static_cast<std::int64_t>(getpid()), "_", count++);
  std::filesystem::create_directories(folder_);

  Random random(spec.seed);
  std::vector<Stored> stored;
  std::string overrides;
  const auto normals = [&](std::int64_t n, double scale, double mean = 0.0) {
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = static_cast<float>(mean + scale * random.normal());
    return values;
  };
  const auto add_vector = [&](const std::string& name, std::int64_t n, double scale, double mean) {
    std::vector<float> values = normals(n, scale, mean);
    stored.push_back(store_floats(name, {n}, spec.scale_dtype, values));
    weights_.tensors[name] = values;
  };
  const auto add_module = [&](const std::string& path, std::int64_t N, std::int64_t K, bool bias) {
    const auto whole = spec.formats.find(path);
    const QuantSpec format =
        whole != spec.formats.end() ? whole->second : spec.formats.at(last_name(path));
    const double scale =
        path == "model.embed_tokens" ? 1.0 : 1.0 / std::sqrt(static_cast<double>(K));
    std::vector<float> values = normals(N * K, scale);
    if (format.is_dense()) {
      stored.push_back(store_floats(path + ".weight", {N, K}, format.scale_dtype, values));
      overrides += concat(",\"", path, "\":false");
    } else {
      const QuantizedTensor q = value_or_throw(quantize(values, N, K, format));
      const char* type = safetensors_name(format.scale_dtype);
      stored.push_back(
          {{path + ".weight", "U32", {N, K * format.bits / 32}, q.codes.size()}, q.codes});
      stored.push_back(
          {{path + ".scales", type, {N, K / format.group_size}, q.scales.size()}, q.scales});
      stored.push_back(
          {{path + ".biases", type, {N, K / format.group_size}, q.biases.size()}, q.biases});
      value_or_throw(dequantize(q.view(), 0, N, DType::f32, values));
      overrides += concat(",\"", path, "\":{\"bits\":", format.bits,
                          ",\"group_size\":", format.group_size, "}");
    }
    weights_.tensors[path + ".weight"] = values;
    if (bias) add_vector(path + ".bias", N, 0.3, 0.0);
  };
  // Projections of one input, apart or in one tensor.
  using Part = std::pair<const char*, std::int64_t>;
  const auto add_projections = [&](const std::string& prefix, const char* stacked,
                                   const std::vector<Part>& parts, std::int64_t K, bool bias) {
    if (!spec.stacked) {
      for (const auto& [name, N] : parts) add_module(prefix + name, N, K, bias);
      return;
    }
    std::int64_t rows = 0;
    for (const auto& [name, N] : parts) rows += N;
    add_module(prefix + stacked, rows, K, bias);
    const std::vector<float> whole = weights_.tensors.at(prefix + stacked + ".weight");
    auto row = whole.begin();
    for (const auto& [name, N] : parts) {
      weights_.tensors[prefix + name + ".weight"].assign(row, row + N * K);
      row += N * K;
    }
  };

  add_module("model.embed_tokens", spec.vocab, spec.hidden, false);
  for (std::int64_t i = 0; i < spec.layers; ++i) {
    const std::string layer = concat("model.layers.", i);
    const std::string attention = layer + ".self_attn.";
    const std::string mlp = layer + ".mlp.";
    add_vector(layer + ".input_layernorm.weight", spec.hidden, 0.1, 1.0);
    const std::int64_t kv_width = spec.kv_heads * spec.head_dim;
    add_projections(
        attention, "qkv_proj",
        {{"q_proj", spec.heads * spec.head_dim}, {"k_proj", kv_width}, {"v_proj", kv_width}},
        spec.hidden, spec.attention_bias);
    if (spec.qk_norm) {
      add_vector(attention + "q_norm.weight", spec.head_dim, 0.1, 1.0);
      add_vector(attention + "k_norm.weight", spec.head_dim, 0.1, 1.0);
    }
    add_module(attention + "o_proj", spec.hidden, spec.heads * spec.head_dim, spec.attention_bias);
    add_vector(layer + ".post_attention_layernorm.weight", spec.hidden, 0.1, 1.0);
    add_projections(mlp, "gate_up_proj",
                    {{"gate_proj", spec.intermediate}, {"up_proj", spec.intermediate}}, spec.hidden,
                    spec.mlp_bias);
    add_module(mlp + "down_proj", spec.hidden, spec.intermediate, spec.mlp_bias);
  }
  add_vector("model.norm.weight", spec.hidden, 0.1, 1.0);
  if (!spec.tied) add_module("lm_head", spec.vocab, spec.hidden, false);

  std::vector<SafetensorsOutput> outputs;
  for (const Stored& tensor : stored) outputs.push_back(tensor.output);
  auto writer = value_or_throw(SafetensorsWriter::create(file("model.safetensors"), outputs));
  for (const Stored& tensor : stored) value_or_throw(writer.write(tensor.bytes));
  value_or_throw(writer.finish());

  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::ofstream config(file("config.json"));
  config << "{\"model_type\":\"" << spec.model_type << "\",\"hidden_size\":" << spec.hidden
         << ",\"intermediate_size\":" << spec.intermediate
         << ",\"num_hidden_layers\":" << spec.layers << ",\"num_attention_heads\":" << spec.heads
         << ",\"num_key_value_heads\":" << spec.kv_heads << ",\"head_dim\":" << spec.head_dim
         << spec.more_config << ",\"vocab_size\":" << spec.vocab
         << ",\"max_position_embeddings\":" << spec.max_position
         << ",\"rms_norm_eps\":1e-05,\"rope_theta\":" << spec.rope_theta
         << ",\"rope_traditional\":" << flag(spec.interleaved)
         << ",\"attention_bias\":" << flag(spec.attention_bias)
         << ",\"mlp_bias\":" << flag(spec.mlp_bias)
         << ",\"tie_word_embeddings\":" << flag(spec.tied);
  if (spec.rope_factor != 1.0) {
    config << ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":" << spec.rope_factor << "}";
  }
  config << ",\"quantization\":{\"bits\":4,\"group_size\":32" << overrides << "}}";
}

SyntheticModel::~SyntheticModel() { std::filesystem::remove_all(folder_); }

void SyntheticModel::set_first(const std::string& tensor, DType dtype, float value) {
  std::fstream stream(file("model.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t header_bytes = 0;
  stream.read(reinterpret_cast<char*>(&header_bytes), 8);
  std::string header(header_bytes, ' ');
  stream.read(header.data(), static_cast<std::streamsize>(header_bytes));
  const std::size_t entry = header.find("\"" + tensor + "\"");
  ASSERT_NE(entry, std::string::npos) << tensor;
  const std::size_t offsets = header.find("\"data_offsets\"", entry);
  const std::uint64_t begin = std::stoull(header.substr(header.find('[', offsets) + 1));
  std::byte bytes[4];
  store_float(bytes, dtype, 0, value);
  stream.seekp(static_cast<std::streamoff>(8 + header_bytes + begin));
  stream.write(reinterpret_cast<const char*>(bytes), static_cast<std::streamsize>(size_of(dtype)));
  ASSERT_TRUE(stream.good());
}

std::unique_ptr<ThreadPool> make_pool(int threads) {
  return value_or_throw(ThreadPool::create(threads));
}

std::shared_ptr<const Model> load_model(const SyntheticModel& model, const ModelOptions& options,
                                        ThreadPool& pool) {
  return value_or_throw(Model::load(value_or_throw(Checkpoint::open(model.path())), options, pool));
}

std::vector<std::int32_t> some_tokens(const SyntheticSpec& spec, std::size_t count) {
  Random random(77);
  std::vector<std::int32_t> tokens(count);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(random.below(spec.vocab));
  return tokens;
}

ModelOptions with_activations(DType dtype) {
  ModelOptions options;
  options.activations = dtype;
  return options;
}

namespace {

using Row = std::vector<double>;

bool contains(const std::vector<std::int64_t>& layers, std::int64_t layer) {
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

Row rms_norm(const Row& x, const std::vector<float>& weight) {
  double sum = 0.0;
  for (const double value : x) sum += value * value;
  const double scale = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + 1e-5);
  Row out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight[i];
  return out;
}

// The module's product with x, and its bias where it has one.
Row apply(const SyntheticWeights& weights, const std::string& path, const Row& x) {
  const std::vector<float>& w = weights.tensors.at(path + ".weight");
  const auto bias = weights.tensors.find(path + ".bias");
  Row out(w.size() / x.size());
  for (std::size_t n = 0; n < out.size(); ++n) {
    double sum = bias == weights.tensors.end() ? 0.0 : bias->second[n];
    for (std::size_t k = 0; k < x.size(); ++k) sum += w[n * x.size() + k] * x[k];
    out[n] = sum;
  }
  return out;
}

// Each head's features normed by themselves.
void norm_heads(Row& x, const std::vector<float>& weight) {
  const auto dim = static_cast<std::ptrdiff_t>(weight.size());
  for (auto head = x.begin(); head != x.end(); head += dim) {
    const Row normed = rms_norm(Row(head, head + dim), weight);
    std::copy(normed.begin(), normed.end(), head);
  }
}

void rotate_head(const SyntheticSpec& spec, double* x, std::size_t position) {
  const std::int64_t rotated = spec.rotary_dim > 0 ? spec.rotary_dim : spec.head_dim;
  const auto half = static_cast<std::size_t>(rotated / 2);
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) / spec.rope_factor *
                         std::pow(spec.rope_theta, -static_cast<double>(i) / half);
    double& a = x[spec.interleaved ? 2 * i : i];
    double& b = x[spec.interleaved ? 2 * i + 1 : half + i];
    const double first = a * std::cos(angle) - b * std::sin(angle);
    b = a * std::sin(angle) + b * std::cos(angle);
    a = first;
  }
}

}  // namespace

std::vector<double> reference_logits(const SyntheticModel& model,
                                     const std::vector<std::int32_t>& tokens) {
  const SyntheticSpec& spec = model.spec();
  const SyntheticWeights& w = model.weights();
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  const auto dim = static_cast<std::size_t>(spec.head_dim);
  const auto heads = static_cast<std::size_t>(spec.heads);
  const auto group = heads / static_cast<std::size_t>(spec.kv_heads);
  std::vector<Row> x;
  for (const std::int32_t token : tokens) {
    const float* row =
        w.tensors.at("model.embed_tokens.weight").data() + static_cast<std::size_t>(token) * hidden;
    x.emplace_back(row, row + hidden);
    for (double& value : x.back()) value *= spec.embedding_scale;
  }
  const double attention_scale =
      spec.attention_scale > 0.0 ? spec.attention_scale : 1.0 / std::sqrt(static_cast<double>(dim));
  for (std::int64_t layer = 0; layer < spec.layers; ++layer) {
    const std::string path = concat("model.layers.", layer);
    std::vector<Row> keys, values;
    for (std::size_t m = 0; m < x.size(); ++m) {
      const Row normed = rms_norm(x[m], w.tensors.at(path + ".input_layernorm.weight"));
      Row q = apply(w, path + ".self_attn.q_proj", normed);
      Row k = apply(w, path + ".self_attn.k_proj", normed);
      if (spec.qk_norm) {
        norm_heads(q, w.tensors.at(path + ".self_attn.q_norm.weight"));
        norm_heads(k, w.tensors.at(path + ".self_attn.k_norm.weight"));
      }
      if (!contains(spec.unrotated_layers, layer)) {
        for (std::size_t h = 0; h < heads; ++h) rotate_head(spec, q.data() + h * dim, m);
        for (std::size_t h = 0; h < heads / group; ++h) rotate_head(spec, k.data() + h * dim, m);
      }
      const auto window = static_cast<std::size_t>(spec.window);
      const bool windowed = contains(spec.window_layers, layer);
      const std::size_t first = windowed && m + 1 > window ? m + 1 - window : 0;
      keys.push_back(std::move(k));
      values.push_back(apply(w, path + ".self_attn.v_proj", normed));
      Row mixed(heads * dim, 0.0);
      for (std::size_t h = 0; h < heads; ++h) {
        const std::size_t kv = h / group * dim;
        Row p(m + 1);
        double top = -1e300;
        for (std::size_t j = first; j <= m; ++j) {
          double dot = 0.0;
          for (std::size_t d = 0; d < dim; ++d) dot += q[h * dim + d] * keys[j][kv + d];
          p[j] = dot * attention_scale;
          top = std::max(top, p[j]);
        }
        double sum = 0.0;
        for (std::size_t j = first; j <= m; ++j) sum += p[j] = std::exp(p[j] - top);
        for (std::size_t j = first; j <= m; ++j) {
          for (std::size_t d = 0; d < dim; ++d) {
            mixed[h * dim + d] += p[j] / sum * values[j][kv + d];
          }
        }
      }
      const Row projected = apply(w, path + ".self_attn.o_proj", mixed);
      for (std::size_t i = 0; i < hidden; ++i) x[m][i] += spec.residual_scale * projected[i];
    }
    for (Row& row : x) {
      const Row normed = rms_norm(row, w.tensors.at(path + ".post_attention_layernorm.weight"));
      Row gate = apply(w, path + ".mlp.gate_proj", normed);
      const Row up = apply(w, path + ".mlp.up_proj", normed);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1.0 + std::exp(-gate[i]));
      const Row down = apply(w, path + ".mlp.down_proj", gate);
      for (std::size_t i = 0; i < hidden; ++i) row[i] += spec.residual_scale * down[i];
    }
  }
  std::vector<double> logits;
  for (const Row& row : x) {
    const Row normed = rms_norm(row, w.tensors.at("model.norm.weight"));
    Row out = apply(w, spec.tied ? "model.embed_tokens" : "lm_head", normed);
    for (double& value : out) value *= spec.logits_scale;
    logits.insert(logits.end(), out.begin(), out.end());
  }
  return logits;
}

}  // namespace qmlp::test
