#include <cmath>
#include <cstring>
#include <map>
#include <unordered_set>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "convert/ggml_types.h"
#include "convert/gguf_config.h"
#include "convert/gguf_model.h"
#include "convert/gguf_tokenizer.h"
#include "convert/source.h"
#include "io/safetensors.h"
#include "quant/codes.h"
#include "text/quote.h"

namespace qmlp {
namespace {

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

// A matrix of the file, with what its rows are.
struct StoredMatrix {
  const GgufModel* model = nullptr;
  const GgufTensor* tensor = nullptr;
  std::int64_t N = 0;
  std::int64_t K = 0;
  std::int64_t heads = 0;  // whose rows are interleaved; 0: in order

  const std::byte* row(std::int64_t index) const {
    const auto row_bytes = static_cast<std::int64_t>(tensor->bytes) / N;
    return model->data(*tensor).data() + source_row(index, heads, N) * row_bytes;
  }
  std::uint32_t type() const { return tensor->type; }
};

Result<NativeWeight> read_dense(const StoredMatrix& stored, const QuantSpec& spec) {
  NativeWeight weight;
  const std::span<const std::byte> data = stored.model->data(*stored.tensor);
  weight.view = {data, {}, {}, stored.N, stored.K, spec};
  if (stored.heads == 0) return weight;
  weight.owned = {std::vector<std::byte>(data.size()), {}, {}, stored.N, stored.K, spec};
  const auto row_bytes = static_cast<std::size_t>(stored.K) * size_of(spec.scale_dtype);
  for (std::int64_t row = 0; row < stored.N; ++row) {
    std::memcpy(weight.owned.codes.data() + static_cast<std::size_t>(row) * row_bytes,
                stored.row(row), row_bytes);
  }
  weight.view = weight.owned.view();
  return weight;
}

Result<NativeWeight> read_affine(const StoredMatrix& stored, const QuantSpec& spec) {
  QMLP_ASSIGN(const QuantSizes sizes, quant_sizes(stored.N, stored.K, spec));
  NativeWeight weight;
  weight.owned = {std::vector<std::byte>(sizes.codes_bytes),
                  std::vector<std::byte>(sizes.scales_bytes),
                  std::vector<std::byte>(sizes.scales_bytes),
                  stored.N,
                  stored.K,
                  spec};
  const std::int64_t groups = stored.K / kAffineGroup;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(stored.K));
  std::vector<float> scales(static_cast<std::size_t>(groups));
  std::vector<float> biases(static_cast<std::size_t>(groups));
  for (std::int64_t row = 0; row < stored.N; ++row) {
    decode_affine_row(stored.type(), stored.row(row), stored.K, codes.data(), scales.data(),
                      biases.data());
    pack_row(codes.data(), spec.bits, stored.K,
             weight.owned.codes.data() + row * packed_row_bytes(stored.K, spec.bits));
    for (std::int64_t g = 0; g < groups; ++g) {
      const auto i = static_cast<std::size_t>(g);
      store_float(weight.owned.scales.data(), spec.scale_dtype, row * groups + g, scales[i]);
      store_float(weight.owned.biases.data(), spec.scale_dtype, row * groups + g, biases[i]);
    }
  }
  weight.view = weight.owned.view();
  return weight;
}

// Whether f16 has the range for all scales and biases of an affine matrix. It holds them exactly
// then where AffineType says so (a power of two times an f16 is exact, subnormals included), and
// rounds them otherwise.
bool fits_f16(const StoredMatrix& stored) {
  const auto groups = static_cast<std::size_t>(stored.K / kAffineGroup);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(stored.K));
  std::vector<float> scales(groups);
  std::vector<float> biases(groups);
  for (std::int64_t row = 0; row < stored.N; ++row) {
    if (!may_pass_f16(stored.type(), stored.row(row), stored.K)) continue;
    decode_affine_row(stored.type(), stored.row(row), stored.K, codes.data(), scales.data(),
                      biases.data());
    for (std::size_t g = 0; g < groups; ++g) {
      for (const float value : {scales[g], biases[g]}) {
        if (std::isfinite(value) && std::fabs(value) > kMaxF16) return false;
      }
    }
  }
  return true;
}

class GgufSource {
 public:
  explicit GgufSource(std::shared_ptr<const GgufModel> file) : file_(std::move(file)) {}

  Result<SourceModel> build() {
    QMLP_ASSIGN(config_, read_gguf_config(*file_));
    QMLP_ASSIGN(GgufTokenizer tokenizer, read_gguf_tokenizer(*file_));
    model_.files = std::move(tokenizer.files);
    model_.notes = std::move(tokenizer.notes);
    if (tokenizer.num_tokens > config_.vocab) {
      return error(Errc::corrupt_file,
                   concat("tokenizer.ggml.tokens holds ", tokenizer.num_tokens,
                          " tokens, token_embd.weight has ", config_.vocab, " rows"));
    }
    QMLP_TRY(add_tensors());
    QMLP_TRY(check_leftovers());
    add_type_notes();
    model_.config = std::move(config_.json);
    if (tokenizer.bos_token_id) model_.config.append("bos_token_id", *tokenizer.bos_token_id);
    if (!tokenizer.eos_token_ids.empty()) {
      model_.config.append("eos_token_id", tokenizer.eos_token_ids.front());
    }
    model_.owner = file_;
    return std::move(model_);
  }

 private:
  Error error(Errc code, std::string_view rest) const {
    return Error{code, concat(file_->path(), ": ", rest)};
  }
  Error bad_tensor(const GgufTensor& tensor, Errc code, std::string_view rest) const {
    return Error{code,
                 concat(file_->path_of(tensor), ": tensor ", text::quote(tensor.name), ": ", rest)};
  }

  Result<const GgufTensor*> need(const std::string& name, const std::vector<std::int64_t>& shape) {
    const GgufTensor* tensor = file_->find_tensor(name);
    if (tensor == nullptr) {
      return error(Errc::corrupt_file, concat("tensor '", name, "' is missing"));
    }
    if (tensor->shape != shape) {
      return bad_tensor(*tensor, Errc::corrupt_file,
                        concat("is ", shape_to_string(tensor->shape), ", the metadata needs ",
                               shape_to_string(shape)));
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
                    bool has_bias = false, std::int64_t heads = 0) {
    QMLP_ASSIGN(const GgufTensor* const tensor, need(concat(gguf_name, ".weight"), {N, K}));
    const StoredMatrix stored{file_.get(), tensor, N, K, heads};
    SourceMatrix matrix;
    matrix.path = std::move(path);
    matrix.N = N;
    matrix.K = K;
    if (const auto dtype = ggml_float(tensor->type)) {
      matrix.spec = QuantSpec::dense(*dtype);
      matrix.read = [stored, spec = matrix.spec] { return read_dense(stored, spec); };
    } else if (const auto affine = affine_type(tensor->type)) {
      const bool narrow = fits_f16(stored);
      file_->release(*tensor);
      matrix.spec = {affine->bits, kAffineGroup, narrow ? DType::f16 : DType::f32};
      if (!narrow) {
        model_.notes.push_back(concat(matrix.path, ": scales and biases are stored as f32, since ",
                                      "one passes the range of f16"));
      }
      QuantSpec native = matrix.spec;
      if (affine->scale_dtype == DType::f32) native.scale_dtype = DType::f32;
      matrix.read = [stored, native] { return read_affine(stored, native); };
      if (native != matrix.spec) ++rounded_[tensor->type];
    } else if (const auto bits = requantized_bits(tensor->type)) {
      matrix.spec = {*bits, kAffineGroup, DType::f16};
      matrix.decode = [stored](std::int64_t begin, std::int64_t end, float* values) {
        for (std::int64_t row = begin; row < end; ++row, values += stored.K) {
          decode_row(stored.type(), stored.row(row), stored.K, values);
        }
      };
      ++requantized_[tensor->type];
    } else {
      return bad_tensor(*tensor, Errc::unsupported,
                        concat("is ", find_ggml_type(tensor->type)->name, ", only ",
                               kSupportedTypes, " are supported"));
    }
    matrix.release = [this_file = file_.get(), tensor] { this_file->release(*tensor); };
    model_.matrices.push_back(std::move(matrix));
    if (!has_bias) return {};
    return add_vector(concat(gguf_name, ".bias"), concat(model_.matrices.back().path, ".bias"), N,
                      heads);
  }

  Status add_attention(const std::string& from, const std::string& to) {
    const GgufConfig& c = config_;
    const std::int64_t q_width = c.heads * c.head_dim;
    const std::int64_t kv_width = c.kv_heads * c.head_dim;
    if (c.architecture->stacked) {
      QMLP_TRY(add_matrix(concat(from, "attn_qkv"), concat(to, "qkv_proj"), q_width + 2 * kv_width,
                          c.hidden));
    } else {
      const bool interleaved = c.architecture->interleaved;
      const bool bias = c.attention_bias || c.architecture->biases == GgufArchitecture::Biases::qkv;
      QMLP_TRY(add_matrix(concat(from, "attn_q"), concat(to, "q_proj"), q_width, c.hidden, bias,
                          interleaved ? c.heads : 0));
      QMLP_TRY(add_matrix(concat(from, "attn_k"), concat(to, "k_proj"), kv_width, c.hidden, bias,
                          interleaved ? c.kv_heads : 0));
      QMLP_TRY(add_matrix(concat(from, "attn_v"), concat(to, "v_proj"), kv_width, c.hidden, bias));
    }
    if (c.architecture->qk_norm) {
      QMLP_TRY(
          add_vector(concat(from, "attn_q_norm.weight"), concat(to, "q_norm.weight"), c.head_dim));
      QMLP_TRY(
          add_vector(concat(from, "attn_k_norm.weight"), concat(to, "k_norm.weight"), c.head_dim));
    }
    return add_matrix(concat(from, "attn_output"), concat(to, "o_proj"), c.hidden, q_width,
                      c.attention_bias);
  }

  Status add_mlp(const std::string& from, const std::string& to) {
    const GgufConfig& c = config_;
    if (c.architecture->stacked) {
      QMLP_TRY(add_matrix(concat(from, "ffn_up"), concat(to, "gate_up_proj"), 2 * c.intermediate,
                          c.hidden));
    } else {
      QMLP_TRY(add_matrix(concat(from, "ffn_gate"), concat(to, "gate_proj"), c.intermediate,
                          c.hidden, c.mlp_bias));
      QMLP_TRY(add_matrix(concat(from, "ffn_up"), concat(to, "up_proj"), c.intermediate, c.hidden,
                          c.mlp_bias));
    }
    return add_matrix(concat(from, "ffn_down"), concat(to, "down_proj"), c.hidden, c.intermediate,
                      c.mlp_bias);
  }

  Status add_tensors() {
    const GgufConfig& c = config_;
    QMLP_TRY(add_matrix("token_embd", "model.embed_tokens", c.vocab, c.hidden));
    for (std::int64_t i = 0; i < c.layers; ++i) {
      const std::string from = concat("blk.", i, ".");
      const std::string to = concat("model.layers.", i, ".");
      QMLP_TRY(add_vector(concat(from, "attn_norm.weight"), concat(to, "input_layernorm.weight"),
                          c.hidden));
      QMLP_TRY(add_vector(concat(from, "ffn_norm.weight"),
                          concat(to, "post_attention_layernorm.weight"), c.hidden));
      QMLP_TRY(add_attention(from, concat(to, "self_attn.")));
      QMLP_TRY(add_mlp(from, concat(to, "mlp.")));
    }
    QMLP_TRY(add_vector("output_norm.weight", "model.norm.weight", c.hidden));
    if (c.tied) return {};
    return add_matrix(c.copied_head ? "token_embd" : "output", "lm_head", c.vocab, c.hidden);
  }

  Status check_leftovers() {
    used_.insert(config_.used_tensors.begin(), config_.used_tensors.end());
    for (const GgufTensor& tensor : file_->tensors()) {
      if (used_.count(tensor.name) != 0) continue;
      // Frequencies that early files repeat from rope.freq_base.
      if (tensor.name.find(".attn_rot_embd") != std::string_view::npos) continue;
      return bad_tensor(tensor, Errc::unsupported,
                        concat("is not part of a plain ", config_.architecture->name, " model"));
    }
    return {};
  }

  void add_type_notes() {
    if (config_.copied_head) {
      model_.notes.push_back(
          "lm_head is a copy of the embedding: mlx-lm does not scale a tied head of minicpm");
    }
    for (const auto& [type, count] : rounded_) {
      model_.notes.push_back(concat(count, " ", find_ggml_type(type)->name,
                                    " weights keep their codes; their scales are rounded to f16 "
                                    "(--scale-dtype f32 keeps them exactly)"));
    }
    for (const auto& [type, count] : requantized_) {
      model_.notes.push_back(concat(count, " ", find_ggml_type(type)->name,
                                    " weights are quantized anew, to ", *requantized_bits(type),
                                    " bits in groups of ", kAffineGroup, " unless --bits says ",
                                    "otherwise"));
    }
  }

  std::shared_ptr<const GgufModel> file_;
  GgufConfig config_;
  std::unordered_set<std::string_view> used_;
  std::map<std::uint32_t, std::int64_t> rounded_;      // weights by type
  std::map<std::uint32_t, std::int64_t> requantized_;  // weights by type
  SourceModel model_;
};

}  // namespace

Result<SourceModel> open_gguf_source(const std::string& path) {
  QMLP_ASSIGN(GgufModel file, GgufModel::open(path));
  return GgufSource(std::make_shared<const GgufModel>(std::move(file))).build();
}

}  // namespace qmlp
