#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <unordered_set>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "convert/ggml_types.h"
#include "convert/gguf.h"
#include "convert/gguf_tokenizer.h"
#include "convert/source.h"
#include "quant/codes.h"

namespace qmlp {
namespace {

constexpr float kMaxF16 = 65504.0f;

// Sizes that the metadata states, named as config.json names them.
struct Sizes {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t vocab = 0;
};

// llama.cpp stores the two halves of a head that rope rotates as neighbouring rows; MLX keeps the
// halves apart. The source row of row `row`; heads 0 means that rows are in order.
std::int64_t source_row(std::int64_t row, std::int64_t heads, std::int64_t rows) {
  if (heads == 0) return row;
  const std::int64_t head_dim = rows / heads;
  const std::int64_t in_head = row % head_dim;
  const std::int64_t half = in_head / (head_dim / 2);
  const std::int64_t pair = in_head % (head_dim / 2);
  return row - in_head + 2 * pair + half;
}

// A float as the shortest decimal that reads back as the same f32: 1e-05, not 9.99999974737875e-06.
double shortest(float value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double out = value;
  std::from_chars(text, end, out);
  return out;
}

class LlamaSource {
 public:
  explicit LlamaSource(std::shared_ptr<const GgufFile> file) : file_(std::move(file)) {}

  Result<SourceModel> build() {
    QMLP_TRY(check_architecture());
    QMLP_TRY(read_sizes());
    QMLP_ASSIGN(GgufTokenizer tokenizer, read_gguf_tokenizer(*file_));
    model_.files = std::move(tokenizer.files);
    model_.notes = std::move(tokenizer.notes);
    if (tokenizer.num_tokens > sizes_.vocab) {
      return error(Errc::corrupt_file,
                   concat("tokenizer.ggml.tokens holds ", tokenizer.num_tokens,
                          " tokens, token_embd.weight has ", sizes_.vocab, " rows"));
    }
    QMLP_TRY(add_tensors());
    QMLP_TRY(check_leftovers());
    QMLP_TRY(make_config(tokenizer));
    model_.owner = std::const_pointer_cast<GgufFile>(file_);
    return std::move(model_);
  }

 private:
  Error error(Errc code, std::string_view rest) const {
    return Error{code, concat(file_->path(), ": ", rest)};
  }
  Error bad_tensor(const GgufTensor& tensor, Errc code, std::string_view rest) const {
    return error(code, concat("tensor '", tensor.name, "': ", rest));
  }

  Status check_architecture() {
    const GgufValue* architecture = file_->find("general.architecture");
    if (architecture == nullptr || architecture->text() == nullptr) {
      return error(Errc::corrupt_file, "general.architecture is missing or not a string");
    }
    if (*architecture->text() != "llama") {
      return error(Errc::unsupported, concat("general.architecture '", *architecture->text(),
                                             "' is not supported, only 'llama'"));
    }
    if (const GgufValue* split = file_->find("split.count");
        split != nullptr && split->integer().value_or(2) > 1) {
      return error(Errc::unsupported,
                   "is one part of a split file: join the parts first "
                   "(llama-gguf-split --merge)");
    }
    for (const char* key : {"llama.expert_count", "llama.attention.sliding_window",
                            "llama.rope.scaling.attn_factor"}) {
      const GgufValue* value = file_->find(key);
      if (value != nullptr && value->number() != 0.0) {
        return error(Errc::unsupported, concat(key, " is set: such models are not supported"));
      }
    }
    return {};
  }

  Status size(const char* key, std::int64_t& out, bool required) const {
    const GgufValue* value = file_->find(key);
    if (value == nullptr) {
      return required ? Status(error(Errc::corrupt_file, concat(key, " is missing"))) : Status();
    }
    const auto number = value->integer();
    if (!number || *number < 1 || *number > std::int64_t{1} << 31) {
      return error(Errc::corrupt_file, concat(key, " is not an integer from 1 to 2^31"));
    }
    out = *number;
    return {};
  }
  Result<std::optional<float>> number(const char* key) const {
    const GgufValue* value = file_->find(key);
    if (value == nullptr) return std::optional<float>();
    const auto real = value->number();
    if (!real || !(*real > 0.0) || !std::isfinite(*real)) {
      return error(Errc::corrupt_file, concat(key, " is not a number above 0"));
    }
    return std::optional<float>(static_cast<float>(*real));
  }

  Status read_sizes() {
    QMLP_TRY(size("llama.embedding_length", sizes_.hidden, true));
    QMLP_TRY(size("llama.feed_forward_length", sizes_.intermediate, true));
    QMLP_TRY(size("llama.block_count", sizes_.layers, true));
    QMLP_TRY(size("llama.attention.head_count", sizes_.heads, true));
    sizes_.kv_heads = sizes_.heads;
    QMLP_TRY(size("llama.attention.head_count_kv", sizes_.kv_heads, false));
    QMLP_TRY(size("llama.attention.key_length", sizes_.head_dim, false));
    if (sizes_.head_dim == 0) {
      if (sizes_.hidden % sizes_.heads != 0) {
        return error(Errc::corrupt_file, concat("llama.embedding_length ", sizes_.hidden,
                                                " is no multiple of ", sizes_.heads, " heads"));
      }
      sizes_.head_dim = sizes_.hidden / sizes_.heads;
    }
    if (sizes_.head_dim % 2 != 0 || sizes_.head_dim > 65536) {
      return error(Errc::corrupt_file,
                   concat("the head size ", sizes_.head_dim, " is odd or too large"));
    }
    for (const char* key : {"llama.rope.dimension_count", "llama.attention.value_length"}) {
      std::int64_t have = sizes_.head_dim;
      QMLP_TRY(size(key, have, false));
      if (have != sizes_.head_dim) {
        return error(Errc::unsupported, concat(key, " is ", have, ", only the head size ",
                                               sizes_.head_dim, " is supported"));
      }
    }
    const GgufTensor* embedding = file_->find_tensor("token_embd.weight");
    if (embedding == nullptr || embedding->shape.size() != 2) {
      return error(Errc::corrupt_file, "tensor 'token_embd.weight' is missing or no matrix");
    }
    sizes_.vocab = embedding->shape[0];
    return {};
  }

  Result<const GgufTensor*> need(const std::string& name, const std::vector<std::int64_t>& shape) {
    const GgufTensor* tensor = file_->find_tensor(name);
    if (tensor == nullptr) {
      return error(Errc::corrupt_file, concat("tensor '", name, "' is missing"));
    }
    if (tensor->shape != shape) {
      std::string have;
      std::string want;
      for (const std::int64_t dim : tensor->shape) have += concat(have.empty() ? "" : ", ", dim);
      for (const std::int64_t dim : shape) want += concat(want.empty() ? "" : ", ", dim);
      return bad_tensor(*tensor, Errc::corrupt_file,
                        concat("is [", have, "], the metadata needs [", want, "]"));
    }
    used_.insert(tensor->name);
    return tensor;
  }

  Status add_vector(const std::string& gguf_name, std::string name, std::int64_t length,
                    std::int64_t heads = 0) {
    QMLP_ASSIGN(const GgufTensor* const tensor, need(gguf_name, {length}));
    const auto dtype = ggml_float(tensor->type);
    if (!dtype) {
      return bad_tensor(*tensor, Errc::unsupported,
                        concat("is ", find_ggml_type(tensor->type)->name,
                               ", only F32, F16 and BF16 vectors are supported"));
    }
    SourceVector vector;
    vector.name = std::move(name);
    vector.dtype = *dtype;
    vector.values.resize(static_cast<std::size_t>(length));
    for (std::int64_t i = 0; i < length; ++i) {
      vector.values[static_cast<std::size_t>(i)] =
          load_float(file_->data(*tensor).data(), *dtype, source_row(i, heads, length));
    }
    model_.vectors.push_back(std::move(vector));
    return {};
  }

  Status add_matrix(const std::string& gguf_name, std::string path, std::int64_t N, std::int64_t K,
                    std::int64_t heads = 0) {
    QMLP_ASSIGN(const GgufTensor* const tensor, need(concat(gguf_name, ".weight"), {N, K}));
    SourceMatrix matrix;
    matrix.path = std::move(path);
    matrix.N = N;
    matrix.K = K;
    const auto dtype = ggml_float(tensor->type);
    const auto affine = affine_blocks(tensor->type);
    if (dtype) {
      matrix.spec = QuantSpec::dense(*dtype);
      matrix.read = [this_file = file_.get(), tensor, N, K, heads, spec = matrix.spec] {
        return read_dense(*this_file, *tensor, N, K, heads, spec);
      };
    } else if (affine) {
      matrix.spec = {affine->bits, kAffineBlock, choose_scale_dtype(*tensor, *affine)};
      if (matrix.spec.scale_dtype == DType::f32) {
        model_.notes.push_back(concat(matrix.path, ": scales and biases are stored as f32, since -",
                                      affine->zero_code, " times the largest scale passes f16"));
      }
      matrix.read = [this_file = file_.get(), tensor, N, K, heads, spec = matrix.spec] {
        return read_affine(*this_file, *tensor, N, K, heads, spec);
      };
    } else {
      return bad_tensor(*tensor, Errc::unsupported,
                        concat("is ", find_ggml_type(tensor->type)->name,
                               ", only F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are "
                               "supported"));
    }
    matrix.release = [this_file = file_.get(), tensor] { this_file->release(*tensor); };
    model_.matrices.push_back(std::move(matrix));

    const std::string bias_name = concat(gguf_name, ".bias");
    const bool is_mlp = gguf_name.find(".ffn_") != std::string::npos;
    const bool is_attention = gguf_name.find(".attn_") != std::string::npos;
    if ((is_attention && attention_bias_) || (is_mlp && mlp_bias_)) {
      QMLP_TRY(add_vector(bias_name, concat(model_.matrices.back().path, ".bias"), N, heads));
    }
    return {};
  }

  // f16 as the file's d, unless a derived bias leaves f16's range. A power of two times d is exact
  // otherwise, subnormals included.
  DType choose_scale_dtype(const GgufTensor& tensor, const AffineBlocks& affine) const {
    if (affine.has_min) return DType::f16;
    const std::size_t block_bytes = find_ggml_type(tensor.type)->block_bytes;
    const std::span<const std::byte> data = file_->data(tensor);
    for (std::size_t at = 0; at < data.size(); at += block_bytes) {
      std::uint16_t d;
      std::memcpy(&d, data.data() + at, sizeof d);
      const float bias = std::fabs(f16_to_f32(d)) * static_cast<float>(affine.zero_code);
      if (bias > kMaxF16 && std::isfinite(bias)) return DType::f32;
    }
    return DType::f16;
  }

  static Result<NativeWeight> read_dense(const GgufFile& file, const GgufTensor& tensor,
                                         std::int64_t N, std::int64_t K, std::int64_t heads,
                                         const QuantSpec& spec) {
    NativeWeight weight;
    const std::span<const std::byte> data = file.data(tensor);
    weight.view = {data, {}, {}, N, K, spec};
    if (heads == 0) return weight;
    weight.owned = {std::vector<std::byte>(data.size()), {}, {}, N, K, spec};
    const auto row_bytes = static_cast<std::size_t>(K) * size_of(spec.scale_dtype);
    for (std::int64_t row = 0; row < N; ++row) {
      std::memcpy(weight.owned.codes.data() + static_cast<std::size_t>(row) * row_bytes,
                  data.data() + static_cast<std::size_t>(source_row(row, heads, N)) * row_bytes,
                  row_bytes);
    }
    weight.view = weight.owned.view();
    return weight;
  }

  static Result<NativeWeight> read_affine(const GgufFile& file, const GgufTensor& tensor,
                                          std::int64_t N, std::int64_t K, std::int64_t heads,
                                          const QuantSpec& spec) {
    QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(N, K, spec));
    NativeWeight weight;
    weight.owned = {std::vector<std::byte>(sizes.codes_bytes),
                    std::vector<std::byte>(sizes.scales_bytes),
                    std::vector<std::byte>(sizes.scales_bytes),
                    N,
                    K,
                    spec};
    const AffineBlocks affine = *affine_blocks(tensor.type);
    const std::int64_t blocks = K / kAffineBlock;
    const std::byte* data = file.data(tensor).data();
    const std::int64_t row_bytes = blocks * find_ggml_type(tensor.type)->block_bytes;
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(K));
    std::vector<std::uint16_t> d(static_cast<std::size_t>(blocks));
    std::vector<std::uint16_t> m(static_cast<std::size_t>(blocks));
    for (std::int64_t row = 0; row < N; ++row) {
      decode_affine_row(tensor.type, data + source_row(row, heads, N) * row_bytes, blocks,
                        codes.data(), d.data(), m.data());
      pack_row(codes.data(), spec.bits, K,
               weight.owned.codes.data() + row * packed_row_bytes(K, spec.bits));
      for (std::int64_t b = 0; b < blocks; ++b) {
        const auto i = static_cast<std::size_t>(b);
        const float scale = f16_to_f32(d[i]);
        const float bias =
            affine.has_min ? f16_to_f32(m[i]) : -static_cast<float>(affine.zero_code) * scale;
        store_float(weight.owned.scales.data(), spec.scale_dtype, row * blocks + b, scale);
        store_float(weight.owned.biases.data(), spec.scale_dtype, row * blocks + b, bias);
      }
    }
    weight.view = weight.owned.view();
    return weight;
  }

  Status add_tensors() {
    attention_bias_ = file_->find_tensor("blk.0.attn_q.bias") != nullptr;
    mlp_bias_ = file_->find_tensor("blk.0.ffn_gate.bias") != nullptr;
    tied_ = file_->find_tensor("output.weight") == nullptr;
    const Sizes& s = sizes_;
    const std::int64_t q_width = s.heads * s.head_dim;
    const std::int64_t kv_width = s.kv_heads * s.head_dim;
    QMLP_TRY(add_matrix("token_embd", "model.embed_tokens", s.vocab, s.hidden));
    for (std::int64_t i = 0; i < s.layers; ++i) {
      const std::string from = concat("blk.", i, ".");
      const std::string to = concat("model.layers.", i, ".");
      QMLP_TRY(add_vector(concat(from, "attn_norm.weight"), concat(to, "input_layernorm.weight"),
                          s.hidden));
      QMLP_TRY(add_vector(concat(from, "ffn_norm.weight"),
                          concat(to, "post_attention_layernorm.weight"), s.hidden));
      const std::string attention = concat(to, "self_attn.");
      const std::string mlp = concat(to, "mlp.");
      QMLP_TRY(add_matrix(concat(from, "attn_q"), concat(attention, "q_proj"), q_width, s.hidden,
                          s.heads));
      QMLP_TRY(add_matrix(concat(from, "attn_k"), concat(attention, "k_proj"), kv_width, s.hidden,
                          s.kv_heads));
      QMLP_TRY(add_matrix(concat(from, "attn_v"), concat(attention, "v_proj"), kv_width, s.hidden));
      QMLP_TRY(
          add_matrix(concat(from, "attn_output"), concat(attention, "o_proj"), s.hidden, q_width));
      QMLP_TRY(
          add_matrix(concat(from, "ffn_gate"), concat(mlp, "gate_proj"), s.intermediate, s.hidden));
      QMLP_TRY(
          add_matrix(concat(from, "ffn_up"), concat(mlp, "up_proj"), s.intermediate, s.hidden));
      QMLP_TRY(
          add_matrix(concat(from, "ffn_down"), concat(mlp, "down_proj"), s.hidden, s.intermediate));
    }
    QMLP_TRY(add_vector("output_norm.weight", "model.norm.weight", s.hidden));
    if (!tied_) QMLP_TRY(add_matrix("output", "lm_head", s.vocab, s.hidden));
    return {};
  }

  Status check_leftovers() {
    for (const GgufTensor& tensor : file_->tensors()) {
      if (used_.count(tensor.name) != 0) continue;
      if (tensor.name == "rope_freqs.weight") {
        return bad_tensor(tensor, Errc::unsupported,
                          "holds rope frequency factors (rope type llama3), not supported");
      }
      return bad_tensor(tensor, Errc::unsupported, "is not part of a plain llama model");
    }
    return {};
  }

  Status make_config(const GgufTokenizer& tokenizer) {
    JsonObject& config = model_.config;
    config.append("model_type", "llama");
    config.append("architectures", Json(JsonArray{Json("LlamaForCausalLM")}));
    config.append("hidden_size", sizes_.hidden);
    config.append("intermediate_size", sizes_.intermediate);
    config.append("num_hidden_layers", sizes_.layers);
    config.append("num_attention_heads", sizes_.heads);
    config.append("num_key_value_heads", sizes_.kv_heads);
    config.append("head_dim", sizes_.head_dim);
    config.append("vocab_size", sizes_.vocab);
    config.append("hidden_act", "silu");
    std::int64_t context = 0;
    QMLP_TRY(size("llama.context_length", context, false));
    if (context != 0) config.append("max_position_embeddings", context);
    QMLP_ASSIGN(const std::optional<float> eps, number("llama.attention.layer_norm_rms_epsilon"));
    if (!eps) {
      return error(Errc::corrupt_file, "llama.attention.layer_norm_rms_epsilon is missing");
    }
    config.append("rms_norm_eps", shortest(*eps));
    QMLP_ASSIGN(const std::optional<float> theta, number("llama.rope.freq_base"));
    config.append("rope_theta", shortest(theta.value_or(10000.0f)));
    QMLP_TRY(append_rope_scaling(config));
    config.append("attention_bias", attention_bias_);
    config.append("mlp_bias", mlp_bias_);
    config.append("tie_word_embeddings", tied_);
    if (tokenizer.bos_token_id) config.append("bos_token_id", *tokenizer.bos_token_id);
    if (!tokenizer.eos_token_ids.empty()) {
      config.append("eos_token_id", tokenizer.eos_token_ids.front());
    }
    return {};
  }

  Status append_rope_scaling(JsonObject& config) {
    std::string_view type = "none";
    if (const GgufValue* value = file_->find("llama.rope.scaling.type")) {
      if (value->text() == nullptr) {
        return error(Errc::corrupt_file, "llama.rope.scaling.type is not a string");
      }
      type = *value->text();
    }
    QMLP_ASSIGN(std::optional<float> factor, number("llama.rope.scaling.factor"));
    QMLP_ASSIGN(const std::optional<float> old_factor, number("llama.rope.scale_linear"));
    if (type == "none" && old_factor && *old_factor != 1.0f) {
      type = "linear";
      factor = old_factor;
    }
    if (type == "none") return {};
    if (type != "linear") {
      return error(Errc::unsupported, concat("llama.rope.scaling.type '", type,
                                             "' is not supported, only 'none' and 'linear'"));
    }
    if (!factor) return error(Errc::corrupt_file, "llama.rope.scaling.factor is missing");
    JsonObject scaling;
    scaling.append("type", "linear");
    scaling.append("factor", shortest(*factor));
    config.append("rope_scaling", Json(std::move(scaling)));
    return {};
  }

  std::shared_ptr<const GgufFile> file_;
  Sizes sizes_;
  bool attention_bias_ = false;
  bool mlp_bias_ = false;
  bool tied_ = true;
  std::unordered_set<std::string_view> used_;
  SourceModel model_;
};

}  // namespace

Result<SourceModel> open_gguf_source(const std::string& path) {
  QMLP_ASSIGN(GgufFile file, GgufFile::open(path));
  return LlamaSource(std::make_shared<const GgufFile>(std::move(file))).build();
}

}  // namespace qmlp
