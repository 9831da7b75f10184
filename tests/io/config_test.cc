#include "io/config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/concat.h"
#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;

// A small valid config with members added or replaced by those of `extra` (without braces).
Json config_with(std::string_view extra) {
  Json base = *Json::parse(
      R"({"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
          "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
          "rms_norm_eps": 1e-5, "vocab_size": 49152})",
      "base");
  const Json more = *Json::parse("{" + std::string(extra) + "}", "extra");
  for (const JsonMember& member : more.object()->members()) {
    base.object()->set(member.name, member.value);
  }
  return base;
}

Result<ModelConfig> parse(std::string_view extra, std::string_view generation = "") {
  std::vector<std::string> warnings;
  const Json config = config_with(extra);
  if (generation.empty()) return parse_model_config(config, nullptr, "config.json", warnings);
  const Json other = *Json::parse(generation, "generation");
  return parse_model_config(config, &other, "config.json", warnings);
}

TEST(ModelConfig, FillsDefaultsAsMlxLmDoes) {
  const auto config = parse("");
  ASSERT_TRUE(config.has_value()) << config.error().message;
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->rope_theta, 10000.0);
  EXPECT_EQ(config->rope_kind, RopeKind::standard);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_FALSE(config->attention_bias);
  EXPECT_TRUE(config->eos_token_ids.empty());
  EXPECT_EQ(config->bos_token_id, std::nullopt);
  EXPECT_EQ(parse(R"("num_key_value_heads": null)")->num_key_value_heads, 9);
}

TEST(ModelConfig, JoinsEndTokens) {
  const auto config =
      parse(R"("eos_token_id": [2, 5, 2], "bos_token_id": 1)", R"({"eos_token_id": [5, 7]})");
  ASSERT_TRUE(config.has_value()) << config.error().message;
  EXPECT_EQ(config->eos_token_ids, (std::vector<std::int32_t>{2, 5, 7}));
  EXPECT_EQ(config->bos_token_id, 1);
  EXPECT_EQ(parse(R"("eos_token_id": 2)", R"({"eos_token_id": 2})")->eos_token_ids,
            std::vector<std::int32_t>{2});
  EXPECT_TRUE(parse(R"("eos_token_id": 49152)")->eos_token_ids.empty());
  expect_error(parse(R"("eos_token_id": "2")"), Errc::corrupt_file, "eos_token_id");
  expect_error(parse("", "[]"), Errc::corrupt_file, "generation_config.json", "needs an object");
}

TEST(ModelConfig, ChecksSizes) {
  expect_error(parse(R"("hidden_size": 0)"), Errc::corrupt_file, "hidden_size is 0");
  expect_error(parse(R"("hidden_size": -576)"), Errc::corrupt_file, "hidden_size");
  expect_error(parse(R"("hidden_size": 576.5)"), Errc::corrupt_file, "hidden_size");
  expect_error(parse(R"("hidden_size": "576")"), Errc::corrupt_file, "hidden_size");
  expect_error(parse(R"("hidden_size": null)"), Errc::corrupt_file, "hidden_size is null");
  expect_error(parse(R"("vocab_size": 99999999999)"), Errc::corrupt_file, "vocab_size");
  expect_error(parse(R"("num_hidden_layers": 1000000)"), Errc::corrupt_file, "num_hidden_layers");
  expect_error(parse(R"("hidden_size": 577)"), Errc::corrupt_file, "hidden_size 577");
  expect_error(parse(R"("num_key_value_heads": 4)"), Errc::corrupt_file, "num_key_value_heads 4");
  expect_error(parse(R"("head_dim": 63)"), Errc::corrupt_file, "head_dim 63");
  expect_error(parse(R"("head_dim": 2147483648, "num_attention_heads": 2147483648,
                        "num_key_value_heads": 1)"),
               Errc::corrupt_file, "head_dim");
  expect_error(parse(R"("rms_norm_eps": null)"), Errc::corrupt_file, "rms_norm_eps is null");
  expect_error(parse(R"("attention_bias": "yes")"), Errc::corrupt_file, "attention_bias");
}

Result<QuantConfig> parse_quant(std::string_view extra) {
  return parse_quant_config(config_with(extra), "config.json");
}

TEST(QuantConfig, ReadsGlobalAndOverrides) {
  EXPECT_FALSE(parse_quant("")->present);
  const auto quant = parse_quant(
      R"("quantization": {"group_size": 64, "bits": 4, "mode": "affine",
         "a": {"bits": 6}, "b": {"group_size": 128}, "c": {}, "d": false, "e": true})");
  ASSERT_TRUE(quant.has_value()) << quant.error().message;
  EXPECT_EQ(quant->bits, 4);
  EXPECT_EQ(quant->group_size, 64);
  ASSERT_EQ(quant->overrides.size(), 5u);
  // What an override leaves out is MLX's default, never the global value.
  const auto check = [&](std::size_t i, const char* key, int bits, int group_size) {
    EXPECT_EQ(quant->overrides[i].key, key);
    EXPECT_EQ(quant->overrides[i].bits, bits);
    EXPECT_EQ(quant->overrides[i].group_size, group_size);
  };
  check(0, "a", 6, 64);
  check(1, "b", 4, 128);
  check(2, "c", 4, 64);
  EXPECT_EQ(quant->overrides[3].kind, QuantOverride::Kind::unquantized);
  EXPECT_EQ(quant->overrides[4].kind, QuantOverride::Kind::standard);
  check(4, "e", 4, 64);
}

TEST(QuantConfig, RefusesEntriesThatSayNothing) {
  for (const char* name : {"lm_head", "model.layers.0.mlp.up_proj"}) {
    for (const char* value : {"null", "4", "\"4\"", "[4]"}) {
      const std::string entry = std::string("\"") + name + "\": " + value;
      expect_error(
          parse_quant("\"quantization\": {\"bits\": 4, \"group_size\": 64, " + entry + "}"),
          Errc::corrupt_file, std::string("quantization: ") + name + " is " + value,
          "needs an object, true or false");
    }
  }
}

TEST(QuantConfig, DoesNotInheritTheGlobalValues) {
  const auto quant =
      parse_quant(R"("quantization": {"group_size": 32, "bits": 8, "a": {}, "b": true})");
  ASSERT_TRUE(quant.has_value());
  EXPECT_EQ(quant->overrides[0].bits, 4);
  EXPECT_EQ(quant->overrides[0].group_size, 64);
  EXPECT_EQ(quant->overrides[1].bits, 8);
  EXPECT_EQ(quant->overrides[1].group_size, 32);
}

TEST(QuantConfig, RefusesOtherSchemesByName) {
  for (const char* method : {"awq", "gptq", "bitnet", "mxfp4", "compressed-tensors", "fp8"}) {
    expect_error(parse_quant(std::string(R"("quantization_config": {"bits": 4, "group_size": 64,
                                            "quant_method": ")") +
                             method + "\"}"),
                 Errc::unsupported, "quant_method", method, "mlx_lm.convert");
  }
  for (const char* mode : {"mxfp4", "nvfp4", "mxfp8"}) {
    expect_error(parse_quant(std::string(R"("quantization": {"group_size": 32, "bits": 4,
                                            "mode": ")") +
                             mode + "\"}"),
                 Errc::unsupported, "quantization", "mode", mode);
    expect_error(parse_quant(std::string(R"("quantization": {"group_size": 32, "bits": 4,
                                            "lm_head": {"mode": ")") +
                             mode + "\"}}"),
                 Errc::unsupported, "quantization.lm_head", mode);
  }
  expect_error(parse_quant(R"("quantization": {"group_size": 64, "bits": 7})"), Errc::unsupported,
               "bits 7");
  expect_error(parse_quant(R"("quantization": {"group_size": 48, "bits": 4})"), Errc::unsupported,
               "group_size 48");
  expect_error(parse_quant(R"("quantization": {"group_size": 64, "bits": 4, "x": {"bits": 1}})"),
               Errc::unsupported, "quantization.x", "bits 1");
  expect_error(parse_quant(R"("quantization": {"bits": 4})"), Errc::corrupt_file, "group_size");
  expect_error(parse_quant(R"("quantization": {"group_size": 64})"), Errc::corrupt_file, "bits");
  expect_error(parse_quant(R"("quantization": 4)"), Errc::corrupt_file, "quantization is 4");
  expect_error(parse_quant(R"("quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4",
                              "quantize_activations": true})"),
               Errc::unsupported, "nvfp4");
}

TEST(QuantConfig, TakesBothEntriesWhereTheyAgree) {
  const char* entry = R"({"group_size": 32, "bits": 4, "a": {"bits": 6}, "b": false})";
  const auto both = [&](std::string_view second) {
    return parse_quant(
        concat(R"("quantization": )", entry, R"(, "quantization_config": )", second));
  };
  const auto same = both(entry);
  ASSERT_TRUE(same.has_value()) << same.error().message;
  EXPECT_EQ(same->bits, 4);
  EXPECT_EQ(same->overrides.size(), 2u);
  // The order of keys says nothing.
  EXPECT_TRUE(both(R"({"b": false, "a": {"bits": 6}, "bits": 4, "group_size": 32})").has_value());
  expect_error(both(R"({"group_size": 32, "bits": 8})"), Errc::corrupt_file, "quantization_config",
               "differ", "4 bits", "8 bits");
  expect_error(both(R"({"group_size": 32, "bits": 4, "a": {"bits": 6}})"), Errc::corrupt_file,
               "differ", "only one has 'b'");
  expect_error(both(R"({"group_size": 32, "bits": 4, "a": {"bits": 5}, "b": false})"),
               Errc::corrupt_file, "differ", "'a' is not the same");
  expect_error(both(R"({"group_size": 32, "bits": 4, "mode": "mxfp4"})"), Errc::unsupported,
               "quantization_config", "mxfp4");
}

TEST(QuantConfig, AnEntryOfMlxsOwnWinsOverAnotherMethods) {
  std::vector<std::string> warnings;
  const auto quant =
      parse_quant_config(config_with(R"("quantization": {"group_size": 32, "bits": 4},
                     "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true})"),
                         "config.json", &warnings);
  ASSERT_TRUE(quant.has_value()) << quant.error().message;
  EXPECT_EQ(quant->group_size, 32);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("bitsandbytes"), std::string::npos);
  expect_error(parse_quant(R"("quantize_activations": true)"), Errc::unsupported,
               "quantize_activations");
}

TEST(QuantConfig, StripsWrapperPrefixes) {
  for (const char* key :
       {"model.layers.0.mlp.gate_proj", "language_model.model.layers.0.mlp.gate_proj",
        "model.language_model.layers.0.mlp.gate_proj", "layers.0.mlp.gate_proj"}) {
    EXPECT_EQ(canonical_module_path(key), "model.layers.0.mlp.gate_proj") << key;
  }
  EXPECT_EQ(canonical_module_path("language_model.lm_head"), "lm_head");
  EXPECT_EQ(canonical_module_path("model.language_model.embed_tokens"), "model.embed_tokens");
  EXPECT_EQ(canonical_module_path("vision.layers.0.mlp"), "vision.layers.0.mlp");
}

}  // namespace
}  // namespace qmlp
