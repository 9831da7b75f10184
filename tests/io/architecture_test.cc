#include "io/architecture.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "base/concat.h"
#include "io/config.h"
#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;

// What every model type needs, and what some of them need besides.
constexpr const char* kCommon = R"("hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 100, "max_position_embeddings": 512)";
constexpr const char* kQwen3 = R"("head_dim": 32, "rope_theta": 1e6, "tie_word_embeddings": true)";
constexpr const char* kMinicpm = R"("scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32)";
constexpr const char* kGranite = R"("embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_bias": false, "mlp_bias": false,
    "rope_theta": 10000.0)";
constexpr const char* kPhi3 = R"("original_max_position_embeddings": 128)";

std::string own_fields(std::string_view model_type) {
  if (model_type == "qwen3") return kQwen3;
  if (model_type == "minicpm") return kMinicpm;
  if (model_type == "granite") return kGranite;
  if (model_type == "phi3") return kPhi3;
  return "";
}

JsonObject object(const std::string& members) {
  return *Json::parse("{" + members + "}", "members")->object();
}

// A valid config of the type, with members added or replaced by those of `extra`.
JsonObject config_of(std::string_view model_type, const std::string& extra = "") {
  JsonObject config = object(kCommon);
  config.set("model_type", model_type);
  for (const std::string& members : {own_fields(model_type), extra}) {
    const JsonObject more = object(members);
    for (const JsonMember& member : more.members()) config.set(member.name, member.value);
  }
  return config;
}

Result<ModelConfig> parse(JsonObject config, std::vector<std::string>* warnings = nullptr) {
  std::vector<std::string> own;
  return parse_model_config(Json(std::move(config)), nullptr, "config.json",
                            warnings != nullptr ? *warnings : own);
}
Result<ModelConfig> parse(std::string_view model_type, const std::string& extra = "",
                          std::vector<std::string>* warnings = nullptr) {
  return parse(config_of(model_type, extra), warnings);
}

ModelConfig good(std::string_view model_type, const std::string& extra = "") {
  auto result = parse(model_type, extra);
  EXPECT_TRUE(result.has_value()) << model_type << " " << extra << ": " << result.error().message;
  return result.has_value() ? *result : ModelConfig{};
}

TEST(Architecture, EveryRowReadsItsConfig) {
  std::set<std::string> names;
  for (const Architecture& row : architectures()) {
    EXPECT_TRUE(names.insert(std::string(row.model_type)).second) << row.model_type;
    const ModelConfig config = good(row.model_type);
    EXPECT_EQ(config.model_type, row.model_type);
    EXPECT_EQ(config.layers.size(), 4u);
    EXPECT_EQ(config.context_length, 512);
    EXPECT_EQ(config.rotary_dim, config.head_dim);
    EXPECT_TRUE(why_unsupported(row.model_type).empty()) << row.model_type;
  }
  EXPECT_EQ(supported_model_types().size(), names.size());
}

// mlx-lm's dataclasses without a default: absent or null, one line names the field.
TEST(Architecture, EveryRequiredFieldIsNamedWhenItIsMissingOrNull) {
  const auto check = [](const char* model_type, const std::vector<const char*>& fields) {
    for (const char* field : fields) {
      JsonObject config = config_of(model_type);
      config.erase(field);
      expect_error(parse(config), Errc::corrupt_file, "config.json", concat(field, " is missing"),
                   "needs");
      config = config_of(model_type);
      config.set(field, Json());
      expect_error(parse(config), Errc::corrupt_file, concat(field, " is null"), "needs");
      config.set(field, "words");
      const auto wrong = parse(config);
      ASSERT_FALSE(wrong.has_value()) << model_type << " " << field;
      EXPECT_NE(wrong.error().message.find(concat(field, " is \"words\", needs ")),
                std::string::npos)
          << wrong.error().message;
    }
  };
  for (const Architecture& row : architectures()) {
    check(std::string(row.model_type).c_str(),
          {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "vocab_size", "rms_norm_eps"});
  }
  check("qwen2", {"num_key_value_heads"});
  check("qwen3", {"num_key_value_heads", "max_position_embeddings", "head_dim",
                  "tie_word_embeddings", "rope_theta"});
  check("minicpm", {"num_key_value_heads", "scale_emb", "scale_depth", "dim_model_base"});
  check("granite", {"num_key_value_heads", "max_position_embeddings", "embedding_multiplier",
                    "attention_multiplier", "residual_multiplier", "logits_scaling",
                    "attention_bias", "mlp_bias", "rope_theta"});
  // Programs differ on what null means here.
  expect_error(parse("llama", R"("tie_word_embeddings": null)"), Errc::corrupt_file,
               "tie_word_embeddings is null");
}

TEST(Architecture, FillsWhatTheModelTypeFixes) {
  const ModelConfig qwen2 = good("qwen2");
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_output_bias);
  EXPECT_FALSE(qwen2.mlp_bias);
  EXPECT_EQ(qwen2.rope_theta, 1e6);
  EXPECT_TRUE(qwen2.tie_word_embeddings);

  const ModelConfig qwen3 = good("qwen3");
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.attention_bias);
  EXPECT_EQ(qwen3.head_dim, 32);

  const ModelConfig minicpm = good("minicpm");
  EXPECT_FALSE(minicpm.tie_word_embeddings);
  EXPECT_EQ(minicpm.embedding_scale, 12.0);
  EXPECT_EQ(minicpm.residual_scale, 1.4 / 2.0);
  EXPECT_EQ(minicpm.head_input_scale, 0.5);
  EXPECT_EQ(minicpm.rope_theta, 1e6);
  EXPECT_EQ(good("minicpm", R"("tie_word_embeddings": true)").head_input_scale, 1.0);

  const ModelConfig granite = good("granite");
  EXPECT_EQ(granite.embedding_scale, 12.0);
  EXPECT_EQ(granite.attention_scale, 0.015625);
  EXPECT_EQ(granite.residual_scale, 0.22);
  EXPECT_EQ(granite.logits_scale, 0.125);

  EXPECT_FALSE(good("phi3").tie_word_embeddings);
  const ModelConfig llama = good("llama", R"("attention_bias": true, "mlp_bias": true)");
  EXPECT_TRUE(llama.attention_bias && llama.attention_output_bias && llama.mlp_bias);
  EXPECT_EQ(llama.attention_scale, 0.0);
}

TEST(Architecture, RefusesWhatAModelTypeDoesNotHave) {
  for (const char* type : {"qwen3", "minicpm", "phi3"}) {
    expect_error(parse(type, R"("attention_bias": true)"), Errc::unsupported, "attention_bias true",
                 type);
  }
  expect_error(parse("qwen2", R"("mlp_bias": true)"), Errc::unsupported, "mlp_bias true", "qwen2");
  for (const char* type : {"qwen3", "granite"}) {
    expect_error(parse(type, R"("rope_traditional": true)"), Errc::unsupported,
                 "rope_traditional true", type);
  }
  for (const char* type : {"qwen2", "minicpm", "granite", "phi3"}) {
    expect_error(parse(type, R"("head_dim": 32)"), Errc::corrupt_file, "head_dim is 32", "needs 16",
                 type);
    EXPECT_EQ(good(type, R"("head_dim": 16)").head_dim, 16);
  }
  EXPECT_EQ(good("llama", R"("head_dim": 32)").head_dim, 32);
}

TEST(Architecture, RefusesOtherModelsByName) {
  expect_error(parse("gemma"), Errc::unsupported, "config.json", "model_type \"gemma\"", "GeGLU",
               "llama, mistral");
  expect_error(parse("mixtral"), Errc::unsupported, "\"mixtral\"", "mixture of experts");
  expect_error(parse("qwen3_moe"), Errc::unsupported, "\"qwen3_moe\"", "mixture of experts");
  expect_error(parse("mamba2"), Errc::unsupported, "\"mamba2\" is not supported, only llama");
  expect_error(parse("llama", R"("num_local_experts": 8)"), Errc::unsupported,
               "num_local_experts 8");
  expect_error(parse("llama", R"("num_experts": 64)"), Errc::unsupported, "num_experts");
  EXPECT_TRUE(parse("llama", R"("num_local_experts": 0)").has_value());
  expect_error(parse("llama", R"("model_file": "model.py")"), Errc::unsupported, "model_file");
  expect_error(parse("llama", R"("hidden_act": "gelu")"), Errc::unsupported, "hidden_act", "gelu");
  expect_error(parse("llama", R"("model_type": 4)"), Errc::corrupt_file, "model_type is 4");
  expect_error(parse("llama", R"("model_type": null)"), Errc::corrupt_file, "model_type is null");
}

TEST(Rope, ReadsEveryKind) {
  EXPECT_EQ(good("llama", R"("rope_theta": 100000)").rope_theta, 100000.0);
  EXPECT_EQ(good("llama", R"("rope_scaling": {"factor": null})").rope_kind, RopeKind::standard);
  const ModelConfig linear = good("llama", R"("rope_scaling": {"type": "linear", "factor": 4.0})");
  EXPECT_EQ(linear.rope_kind, RopeKind::linear);
  EXPECT_EQ(linear.rope_factor, 4.0);
  EXPECT_EQ(linear.context_length, 2048);
  const ModelConfig llama3 = good("llama", R"("rope_scaling": {"rope_type": "llama3", "factor": 8,
      "low_freq_factor": 1.5, "high_freq_factor": 5, "original_max_position_embeddings": 64})");
  EXPECT_EQ(llama3.rope_kind, RopeKind::llama3);
  EXPECT_EQ(llama3.rope.low_freq_factor, 1.5);
  EXPECT_EQ(llama3.rope.high_freq_factor, 5.0);
  EXPECT_EQ(llama3.rope.original_context, 64);
  EXPECT_EQ(llama3.context_length, 512);
  const ModelConfig yarn = good("llama", R"("rope_scaling": {"type": "yarn", "factor": 4.0,
      "original_max_position_embeddings": 512, "mscale": 0.7, "mscale_all_dim": 0})");
  EXPECT_EQ(yarn.rope_kind, RopeKind::yarn);
  EXPECT_EQ(yarn.rope.beta_fast, 32.0);
  EXPECT_EQ(yarn.rope.mscale, 0.7);
  EXPECT_EQ(yarn.context_length, 2048);
  // Dynamic rope changes past its context, with what was already cached: there the context ends.
  const ModelConfig dynamic = good("llama", R"("rope_scaling": {"type": "dynamic", "factor": 4})");
  EXPECT_EQ(dynamic.rope_kind, RopeKind::dynamic);
  EXPECT_EQ(dynamic.context_length, 512);
  for (const char* type : {"longrope", "su"}) {
    const ModelConfig longrope =
        good("phi3", concat(R"("rope_scaling": {"long_factor": [1, 2, 3, 4, 5, 6, 7, 8],
                               "short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "type": ")",
                            type, "\"}"));
    EXPECT_EQ(longrope.rope_kind, RopeKind::longrope);
    EXPECT_EQ(longrope.rope.original_context, 128);
    EXPECT_EQ(longrope.rope_factor, 4.0);
    EXPECT_EQ(longrope.rope.long_factors.size(), 8u);
  }
  EXPECT_EQ(good("phi3", R"("partial_rotary_factor": 0.5)").rotary_dim, 8);
  EXPECT_EQ(good("phi3", R"("rope_parameters": {"partial_rotary_factor": 0.5})").rotary_dim, 8);
}

TEST(Rope, ReadsNewerConfigs) {
  const ModelConfig nested =
      good("qwen3",
           R"("rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5})");
  EXPECT_EQ(nested.rope_theta, 500000.0);
  const char* yarn =
      R"({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512)";
  EXPECT_EQ(
      good("llama", concat(R"("rope_parameters": )", yarn, R"(}, "rope_scaling": )", yarn, "}"))
          .rope_kind,
      RopeKind::yarn);
  expect_error(parse("llama", concat(R"("rope_parameters": )", yarn, R"(}, "rope_scaling": )", yarn,
                                     R"(, "beta_fast": 16})")),
               Errc::corrupt_file, "rope_scaling and rope_parameters differ");
  expect_error(parse("llama", R"("rope_theta": 10000, "rope_parameters": {"rope_theta": 500000})"),
               Errc::corrupt_file, "rope_parameters: rope_theta is 500000", "10000");
}

TEST(Rope, NamesWhatIsWrong) {
  const auto scaling = [](const std::string& members) {
    return parse("llama", "\"rope_scaling\": {" + members + "}");
  };
  expect_error(scaling(R"("type": "linear")"), Errc::corrupt_file, "rope_scaling",
               "factor is missing");
  expect_error(scaling(R"("type": "linear", "factor": 0)"), Errc::corrupt_file, "factor is 0");
  expect_error(scaling(R"("type": "linear", "factor": null)"), Errc::corrupt_file,
               "factor is null");
  expect_error(scaling(R"("factor": 4)"), Errc::corrupt_file, "rope_type is missing");
  expect_error(scaling(R"("long_factor": 2, "short_factor": 1)"), Errc::corrupt_file,
               "rope_type is missing", "\"longrope\"");
  expect_error(scaling(R"("type": null, "short_factor": 1)"), Errc::corrupt_file,
               "rope_type is missing");
  expect_error(scaling(R"("type": 4)"), Errc::corrupt_file, "type is 4");
  expect_error(scaling(R"("type": "mrope", "mrope_section": [1, 2, 3])"), Errc::unsupported,
               "\"mrope\"", "\"llama3\"", "llama");
  expect_error(scaling(R"("type": "yarn", "rope_type": "linear", "factor": 2)"), Errc::corrupt_file,
               "rope_type is \"linear\"", "the same as type, \"yarn\"");
  expect_error(scaling(R"("type": "yarn", "factor": 4)"), Errc::corrupt_file,
               "original_max_position_embeddings is missing");
  expect_error(scaling(R"("type": "yarn", "factor": 4, "original_max_position_embeddings": 64,
                          "mscale": -1)"),
               Errc::corrupt_file, "mscale is -1");
  expect_error(scaling(R"("rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                          "high_freq_factor": 4)"),
               Errc::corrupt_file, "high_freq_factor is 4", "above low_freq_factor");
  expect_error(scaling(R"("type": "longrope", "original_max_position_embeddings": 64)"),
               Errc::corrupt_file, "long_factor is missing");
  expect_error(scaling(R"("type": "longrope", "original_max_position_embeddings": 64,
                          "long_factor": [1, 2])"),
               Errc::corrupt_file, "long_factor holds 2 values", "8 numbers");
  expect_error(scaling(R"("type": "longrope", "long_factor": 2)"), Errc::corrupt_file,
               "original_max_position_embeddings is missing");
  expect_error(parse("phi3", R"("rope_scaling": {"type": "longrope", "long_factor": 2,
                                "original_max_position_embeddings": 64})"),
               Errc::corrupt_file, "original_max_position_embeddings is 64", "128");
  expect_error(parse("phi3", R"("rope_scaling": {"type": "yarn", "factor": 4})"), Errc::unsupported,
               "\"yarn\"", "\"longrope\" for phi3");
  expect_error(parse("llama", R"("rope_scaling": 4)"), Errc::corrupt_file, "rope_scaling is 4");
  expect_error(parse("llama", R"("rope_theta": -1)"), Errc::corrupt_file, "rope_theta is -1");
  expect_error(parse("llama", R"("rope_theta": 1)"), Errc::corrupt_file, "rope_theta is 1",
               "above 1");
  expect_error(parse("llama", R"("partial_rotary_factor": 0.5)"), Errc::unsupported,
               "partial_rotary_factor 0.5", "llama");
  expect_error(parse("phi3", R"("partial_rotary_factor": 1.5)"), Errc::unsupported,
               "partial_rotary_factor 1.5");
  expect_error(parse("phi3", R"("partial_rotary_factor": 0.6)"), Errc::corrupt_file, "rotates 9");
  expect_error(parse("llama", R"("head_dim": 63)"), Errc::corrupt_file, "head_dim 63 is odd");
  JsonObject config = config_of("llama", R"("rope_scaling": {"type": "dynamic", "factor": 4})");
  config.erase("max_position_embeddings");
  expect_error(parse(config), Errc::corrupt_file, "max_position_embeddings is missing", "dynamic");
}

std::vector<bool> rotary(const ModelConfig& config) {
  std::vector<bool> out;
  for (const LayerConfig& layer : config.layers) out.push_back(layer.rotary);
  return out;
}

TEST(Layers, WithoutRope) {
  EXPECT_EQ(rotary(good("smollm3")), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(rotary(good("smollm3", R"("no_rope_layer_interval": 2)")),
            (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(rotary(good("smollm3", R"("no_rope_layers": [0, 1, 1, 0])")),
            (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(rotary(good("llama", R"("no_rope_layers": [0, 0, 0, 0])")), std::vector<bool>(4, true));
  expect_error(parse("smollm3", R"("no_rope_layers": [0, 1])"), Errc::corrupt_file,
               "no_rope_layers holds 2 values", "4 numbers");
  expect_error(parse("smollm3", R"("no_rope_layers": [0, 1, 2, 1])"), Errc::corrupt_file,
               "no_rope_layers is 2");
  expect_error(parse("smollm3", R"("no_rope_layers": 3)"), Errc::corrupt_file,
               "no_rope_layers is 3");
  expect_error(parse("smollm3", R"("no_rope_layer_interval": 0)"), Errc::corrupt_file,
               "no_rope_layer_interval is 0");
}

TEST(Layers, Windows) {
  const char* types = R"("layer_types": ["sliding_attention", "full_attention",
                          "sliding_attention", "full_attention"])";
  const auto with = [&](const char* more) { return std::string(types) + more; };
  for (const char* type : {"llama", "mistral", "smollm3"}) {
    const ModelConfig config = good(type, with(R"(, "sliding_window": 7)"));
    EXPECT_EQ(config.layers[0].window, 7);
    EXPECT_EQ(config.layers[1].window, 0);
    EXPECT_EQ(config.layers[2].window, 7);
    EXPECT_EQ(config.context_length, 512);
  }
  expect_error(parse("llama", types), Errc::corrupt_file, "sliding_window is missing");
  expect_error(parse("llama", with(R"(, "sliding_window": null)")), Errc::corrupt_file,
               "sliding_window is null");
  expect_error(parse("llama", with(R"(, "sliding_window": 0)")), Errc::corrupt_file,
               "sliding_window is 0");
  expect_error(parse("llama", R"("layer_types": ["full_attention"])"), Errc::corrupt_file,
               "layer_types holds 1 values", "needs 4");
  expect_error(parse("llama", R"("layer_types": ["full_attention", "chunked_attention",
                                 "full_attention", "full_attention"])"),
               Errc::unsupported, "layer_types \"chunked_attention\"");
  expect_error(parse("llama", R"("layer_types": 3)"), Errc::corrupt_file, "layer_types is 3");
}

// mlx-lm ignores these windows and other programs do not: the context ends where it matters.
TEST(Layers, AWindowThatProgramsDisagreeOnEndsTheContext) {
  const auto limit = [](const char* type, const std::string& extra, bool warns) {
    std::vector<std::string> warnings;
    const auto config = parse(type, extra, &warnings);
    EXPECT_TRUE(config.has_value()) << config.error().message;
    EXPECT_EQ(warnings.size(), warns ? 1u : 0u) << type << " " << extra;
    for (const std::string& warning : warnings) {
      EXPECT_NE(warning.find("sliding_window 100"), std::string::npos) << warning;
    }
    for (const LayerConfig& layer : config->layers) EXPECT_EQ(layer.window, 0);
    return config->context_length;
  };
  for (const char* type : {"mistral", "phi3"}) {
    EXPECT_EQ(limit(type, R"("sliding_window": 100)", true), 100) << type;
    EXPECT_EQ(limit(type, R"("sliding_window": null)", false), 512) << type;
    EXPECT_EQ(limit(type, R"("sliding_window": 512)", false), 512) << type;
  }
  for (const char* type : {"qwen2", "qwen3"}) {
    const std::string window = R"("sliding_window": 100, "use_sliding_window": )";
    EXPECT_EQ(limit(type, window + "true", true), 100) << type;
    EXPECT_EQ(limit(type, window + "false", false), 512) << type;
    EXPECT_EQ(limit(type, R"("sliding_window": 100)", false), 512) << type;
    EXPECT_EQ(limit(type, R"("sliding_window": 100, "layer_types": ["full_attention",
        "sliding_attention", "full_attention", "full_attention"])",
                    true),
              100);
  }
  EXPECT_EQ(limit("llama", R"("sliding_window": 100)", false), 512);
}

}  // namespace
}  // namespace qmlp
