#include "convert/gguf_rope.h"

#include <algorithm>
#include <cmath>

#include "base/concat.h"
#include "base/float16.h"
#include "base/try.h"
#include "convert/ggml_types.h"
#include "convert/gguf_config.h"
#include "text/quote.h"

namespace qmlp {
namespace {

constexpr double kTwoPi = 6.283185307179586;
// The converter computes the factors in f32, through differences that cancel.
constexpr double kTolerance = 1e-4;

bool close(double a, double b) { return std::fabs(a - b) <= kTolerance * std::fabs(b); }

double wavelength(std::size_t pair, std::size_t num_pairs, float theta) {
  const double exponent = static_cast<double>(pair) / static_cast<double>(num_pairs);
  return kTwoPi * std::pow(static_cast<double>(theta), exponent);
}

bool reproduces(const Llama3Rope& rope, std::span<const float> factors, float theta) {
  if (!(rope.high_freq_factor > rope.low_freq_factor) || !(rope.low_freq_factor > 0.0)) {
    return false;
  }
  const auto context = static_cast<double>(rope.original_context);
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const double turns = context / wavelength(i, factors.size(), theta);
    double want = rope.factor;
    if (turns > rope.high_freq_factor) {
      want = 1.0;
    } else if (turns > rope.low_freq_factor) {
      const double smooth =
          (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      want = 1.0 / ((1.0 - smooth) / rope.factor + smooth);
    }
    if (!close(factors[i], want)) return false;
  }
  return true;
}

double rounded(double value, double unit) { return std::round(value / unit) * unit; }

class RopeReader {
 public:
  RopeReader(const GgufMetadata& metadata, float theta, std::int64_t rotary_dim,
             std::int64_t context)
      : metadata_(metadata), theta_(theta), rotary_dim_(rotary_dim), context_(context) {}

  Result<GgufRope> read() {
    QMLP_TRY(
        metadata_.optional_size("rope.scaling.original_context_length", out_.original_context));
    QMLP_ASSIGN(std::optional<std::string_view> type, metadata_.text("rope.scaling.type"));
    QMLP_ASSIGN(std::optional<float> factor, metadata_.positive("rope.scaling.factor"));
    if (!factor) {
      QMLP_ASSIGN(factor, metadata_.positive("rope.scale_linear"));  // the key of older files
    }
    QMLP_ASSIGN(const std::optional<float> attention,
                metadata_.positive("rope.scaling.attn_factor"));
    // Without a type llama.cpp divides positions by the factor.
    if (!type) type = factor && *factor != 1.0f ? "linear" : "none";
    QMLP_ASSIGN(const std::vector<float> freqs, factors("rope_freqs.weight"));
    QMLP_ASSIGN(const std::vector<float> long_factors, factors("rope_factors_long.weight"));
    QMLP_ASSIGN(const std::vector<float> short_factors, factors("rope_factors_short.weight"));
    if (long_factors.empty() != short_factors.empty()) {
      return corrupt("one of rope_factors_long.weight and rope_factors_short.weight is missing");
    }
    const bool all_one = std::all_of(freqs.begin(), freqs.end(), [](float f) { return f == 1.0f; });
    if (!all_one && (*type != "none" || !long_factors.empty())) {
      return unsupported(concat("rope_freqs.weight beside rope.scaling.type ", text::quote(*type),
                                " is not supported"));
    }
    if (!all_one) {
      QMLP_TRY(llama3(freqs));
    } else if (!long_factors.empty()) {
      QMLP_TRY(longrope(*type, long_factors, short_factors, attention));
      return std::move(out_);
    } else if (*type == "linear") {
      if (!factor) return corrupt(concat(metadata_.key("rope.scaling.factor"), " is missing"));
      if (*factor != 1.0f) {
        JsonObject& scaling = out_.scaling.emplace();
        scaling.append("type", "linear");
        scaling.append("factor", shortest_decimal(*factor));
      }
    } else if (*type == "yarn") {
      QMLP_TRY(yarn(factor));
    } else if (*type != "none") {
      return unsupported(concat(metadata_.key("rope.scaling.type"), " ", text::quote(*type),
                                " is not supported, only 'none', 'linear', 'yarn' and, with "
                                "their factors, 'longrope' and llama3's"));
    }
    if (attention && *attention != 1.0f) {
      return unsupported(concat(metadata_.key("rope.scaling.attn_factor"), " is ",
                                Json(shortest_decimal(*attention)).dump(),
                                ", only 1 is supported with this rope type"));
    }
    return std::move(out_);
  }

 private:
  Error corrupt(std::string_view rest) const { return metadata_.error(Errc::corrupt_file, rest); }
  Error unsupported(std::string_view rest) const {
    return metadata_.error(Errc::unsupported, rest);
  }

  // A tensor of one factor for each rotated pair; empty when there is none.
  Result<std::vector<float>> factors(std::string_view name) {
    std::vector<float> values;
    const GgufTensor* tensor = metadata_.model().find_tensor(name);
    if (tensor == nullptr) return values;
    const std::int64_t pairs = rotary_dim_ / 2;
    const auto dtype = ggml_float(tensor->type);
    if (!dtype || tensor->shape != std::vector<std::int64_t>{pairs}) {
      return corrupt(concat("tensor '", name, "': needs ", pairs,
                            " floats, one for each rotated pair of a head"));
    }
    for (std::int64_t i = 0; i < pairs; ++i) {
      const float value = load_float(metadata_.model().data(*tensor).data(), *dtype, i);
      if (!(value > 0.0f) || !std::isfinite(value)) {
        return corrupt(concat("tensor '", name, "': factor ", i, " is not a number above 0"));
      }
      values.push_back(value);
    }
    out_.used_tensors.push_back(tensor->name);
    return values;
  }

  Status llama3(const std::vector<float>& freqs) {
    const auto rope = fit_llama3(freqs, theta_, out_.original_context);
    if (!rope) {
      return unsupported(
          "tensor 'rope_freqs.weight': its factors are not those of rope type llama3 for any "
          "low_freq_factor and high_freq_factor");
    }
    JsonObject& scaling = out_.scaling.emplace();
    scaling.append("rope_type", "llama3");
    scaling.append("factor", rope->factor);
    scaling.append("low_freq_factor", rope->low_freq_factor);
    scaling.append("high_freq_factor", rope->high_freq_factor);
    scaling.append("original_max_position_embeddings", rope->original_context);
    return {};
  }

  Status yarn(std::optional<float> factor) {
    if (!factor) return corrupt(concat(metadata_.key("rope.scaling.factor"), " is missing"));
    QMLP_ASSIGN(const std::int64_t original, original_context());
    JsonObject& scaling = out_.scaling.emplace();
    scaling.append("rope_type", "yarn");
    scaling.append("factor", shortest_decimal(*factor));
    scaling.append("original_max_position_embeddings", original);
    for (const char* name : {"beta_fast", "beta_slow"}) {
      QMLP_ASSIGN(const std::optional<float> beta,
                  metadata_.positive(concat("rope.scaling.yarn_", name)));
      if (beta) scaling.append(name, shortest_decimal(*beta));
    }
    for (const char* name : {"rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"}) {
      const GgufValue* value = metadata_.model().find(metadata_.key(name));
      if (value != nullptr && value->number() != 1.0) {
        return unsupported(concat(metadata_.key(name), " is set, only 1 is supported"));
      }
    }
    return {};
  }

  Status longrope(std::string_view type, const std::vector<float>& long_factors,
                  const std::vector<float>& short_factors, std::optional<float> attention) {
    if (type != "none" && type != "longrope") {
      return unsupported(concat("rope_factors_long.weight beside rope.scaling.type ",
                                text::quote(type), " is not supported"));
    }
    QMLP_ASSIGN(const std::int64_t original, original_context());
    out_.original_context = original;
    const double ratio = static_cast<double>(context_) / static_cast<double>(original);
    const double want =
        ratio <= 1.0 ? 1.0
                     : std::sqrt(1.0 + std::log(ratio) / std::log(static_cast<double>(original)));
    if (!close(attention.value_or(1.0f), want)) {
      return unsupported(concat(metadata_.key("rope.scaling.attn_factor"), " is ",
                                Json(shortest_decimal(attention.value_or(1.0f))).dump(),
                                ", config.json stands for ", Json(want).dump()));
    }
    const auto array = [](const std::vector<float>& values) {
      JsonArray out;
      for (const float value : values) out.emplace_back(shortest_decimal(value));
      return Json(std::move(out));
    };
    JsonObject& scaling = out_.scaling.emplace();
    scaling.append("type", "longrope");
    scaling.append("long_factor", array(long_factors));
    scaling.append("short_factor", array(short_factors));
    scaling.append("original_max_position_embeddings", original);
    return {};
  }

  // As llama.cpp: the whole context where the file does not say.
  Result<std::int64_t> original_context() const {
    if (out_.original_context != 0) return out_.original_context;
    if (context_ == 0) {
      return corrupt(concat(metadata_.key("rope.scaling.original_context_length"),
                            " is missing, and so is ", metadata_.key("context_length")));
    }
    return context_;
  }

  const GgufMetadata& metadata_;
  float theta_;
  std::int64_t rotary_dim_;
  std::int64_t context_;
  GgufRope out_;
};

}  // namespace

std::optional<Llama3Rope> fit_llama3(std::span<const float> factors, float theta,
                                     std::int64_t original_context) {
  if (factors.empty()) return std::nullopt;
  Llama3Rope rope;
  rope.factor = shortest_decimal(*std::max_element(factors.begin(), factors.end()));
  if (original_context != 0) rope.original_context = original_context;
  if (!(rope.factor > 1.0)) return std::nullopt;
  // The parameters of every Llama 3 model.
  if (reproduces(rope, factors, theta)) return rope;
  // Between the bands the factor is 1 / ((1 - s) / F + s), s linear in the number of turns in the
  // original context, 0 at low_freq_factor and 1 at high_freq_factor. Two such factors give both;
  // only their ratios to the context are in the file, so that the context is free.
  const auto context = static_cast<double>(rope.original_context);
  double turns[2] = {};
  double smooth[2] = {};
  int found = 0;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const double factor = factors[i];
    if (factor < 1.0 + kTolerance || factor > rope.factor * (1.0 - kTolerance)) continue;
    const int slot = std::min(found++, 1);
    turns[slot] = context / wavelength(i, factors.size(), theta);
    smooth[slot] = (1.0 / factor - 1.0 / rope.factor) / (1.0 - 1.0 / rope.factor);
  }
  if (found < 2 || smooth[0] == smooth[1]) return std::nullopt;
  const double slope = (turns[0] - turns[1]) / (smooth[0] - smooth[1]);  // high - low
  const double low = turns[0] - slope * smooth[0];
  for (const double unit : {1.0, 0.5, 0.1, 0.01, 0.001}) {
    rope.low_freq_factor = rounded(low, unit);
    rope.high_freq_factor = rounded(low + slope, unit);
    if (reproduces(rope, factors, theta)) return rope;
  }
  return std::nullopt;
}

Result<GgufRope> read_gguf_rope(const GgufMetadata& metadata, float theta, std::int64_t rotary_dim,
                                std::int64_t context) {
  return RopeReader(metadata, theta, rotary_dim, context).read();
}

}  // namespace qmlp
