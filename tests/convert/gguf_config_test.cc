#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "convert/converted.h"
#include "convert/gguf_rope.h"
#include "convert/tiny_gguf.h"
#include "io/temp_folder.h"
#include "qmlp/checkpoint.h"

namespace qmlp {
namespace {

using test::Converted;
using test::expect_error;
using test::Ggml;
using test::GgufBuilder;
using test::joined;
using test::others;
using test::TinyGguf;

template <class Change, class... Texts>
void refused(Change change, Errc code, Texts... texts) {
  TinyGguf gguf;
  change(gguf);
  const Converted out(gguf);
  expect_error(out.report, code, texts...);
  EXPECT_TRUE(others(out.folder(), "m.gguf").empty());
}

TEST(GgufConfig, RefusesOtherModelsByName) {
  refused([](TinyGguf& g) { g.text("general.architecture", "gemma2"); }, Errc::unsupported,
          "'gemma2'", "only llama, qwen2, qwen3, smollm3, phi3, minicpm, granite");
  // One line, whatever the file says.
  refused(
      [](TinyGguf& g) {
        g.text("general.architecture", std::string("a\nb\xFF") + std::string(9999, 'x'));
      },
      Errc::unsupported, "'a\\x0Ab\\xFFxxx", "...' is not supported");
  refused([](TinyGguf& g) { g.text("tokenizer.ggml.pre", "a\nb"); }, Errc::unsupported,
          "'a\\x0Ab'");
  refused([](TinyGguf& g) { g.text("llama.rope.scaling.type", "a\nb"); }, Errc::unsupported,
          "'a\\x0Ab'");
  refused([](TinyGguf& g) { g.u32("general.architecture", 1); }, Errc::corrupt_file,
          "general.architecture");
  for (const char* key :
       {"llama.expert_count", "llama.attention.sliding_window", "llama.rope.scaling.alpha"}) {
    refused([key](TinyGguf& g) { g.u32(key, 8); }, Errc::unsupported, key);
  }
  for (const char* key : {"llama.attn_logit_softcapping", "llama.attention.scale",
                          "llama.embedding_scale", "llama.logit_scale"}) {
    refused([key](TinyGguf& g) { g.f32(key, 0.5f); }, Errc::unsupported, key);
  }
  refused([](TinyGguf& g) { g.flag("llama.attention.causal", false); }, Errc::unsupported,
          "llama.attention.causal");
  refused([](TinyGguf& g) { g.add_vector("blk.1.attn_norm.weight", 64); }, Errc::unsupported,
          "blk.1.attn_norm.weight", "not part of a plain llama model");
  refused([](TinyGguf& g) { g.add_matrix("blk.0.ffn_up.weight", 96, 64, static_cast<Ggml>(24)); },
          Errc::corrupt_file, "blk.0.ffn_up.weight");
}

TEST(GgufConfig, RefusesSizesThatDisagree) {
  refused([](TinyGguf& g) { g.u32("llama.rope.dimension_count", 16); }, Errc::unsupported,
          "llama.rope.dimension_count is 16");
  refused([](TinyGguf& g) { g.u32("llama.attention.value_length", 16); }, Errc::unsupported,
          "llama.attention.value_length is 16");
  refused([](TinyGguf& g) { g.u32("llama.attention.head_count_kv", 3); }, Errc::corrupt_file,
          "head_count_kv 3 does not divide 2");
  refused([](TinyGguf& g) { g.u32("llama.attention.key_length", 33); }, Errc::corrupt_file,
          "head size 33");
  refused([](TinyGguf& g) { g.remove("blk.0.ffn_up.weight"); }, Errc::corrupt_file,
          "blk.0.ffn_up.weight", "missing");
  refused([](TinyGguf& g) { g.add_matrix("blk.0.ffn_up.weight", 64, 64, Ggml::q4_1); },
          Errc::corrupt_file, "blk.0.ffn_up.weight", "[64, 64]", "[96, 64]");
  refused([](TinyGguf& g) { g.unset("llama.embedding_length"); }, Errc::corrupt_file,
          "llama.embedding_length is missing");
  refused([](TinyGguf& g) { g.text("llama.embedding_length", "64"); }, Errc::corrupt_file,
          "llama.embedding_length is not an integer");
  refused([](TinyGguf& g) { g.u32("llama.block_count", 0); }, Errc::corrupt_file,
          "llama.block_count");
  refused([](TinyGguf& g) { g.unset("llama.attention.layer_norm_rms_epsilon"); },
          Errc::corrupt_file, "layer_norm_rms_epsilon is missing");
  refused([](TinyGguf& g) { g.f32("llama.rope.freq_base", std::nanf("")); }, Errc::corrupt_file,
          "llama.rope.freq_base is not a number above 0");
  // What config.json's reader refuses is the file's fault, too.
  refused([](TinyGguf& g) { g.f32("llama.rope.freq_base", 0.5f); }, Errc::corrupt_file,
          "m.gguf: as config.json: rope_theta is 0.5, needs a number above 1");
  refused(
      [](TinyGguf& g) {
        g.set_architecture("granite");
        g.unset("granite.context_length");
      },
      Errc::corrupt_file, "m.gguf: as config.json: max_position_embeddings is missing");
  refused(
      [](TinyGguf& g) {
        g.i32s("llama.feed_forward_length", {96, 64});
      },
      Errc::unsupported, "llama.feed_forward_length is 96 for the first layer and 64 for layer 1");
}

TEST(GgufConfig, IgnoresRepeatedFrequencies) {
  TinyGguf gguf;
  gguf.add_vector("blk.0.attn_rot_embd.inv_freq", 16);
  EXPECT_TRUE(Converted(gguf).report.has_value());
}

TEST(GgufConfig, TakesArraysOfOneValue) {
  TinyGguf gguf;
  gguf.i32s("llama.attention.head_count_kv", {1});
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  EXPECT_EQ(out.checkpoint->config().num_key_value_heads, 1);
}

TEST(GgufConfig, RefusesWhatAnArchitectureDoesNotHave) {
  const auto of = [](const char* architecture) {
    return [architecture](TinyGguf& g) { g.set_architecture(architecture); };
  };
  refused(of("qwen2"), Errc::corrupt_file, "blk.0.attn_q.bias", "missing");
  refused(of("qwen3"), Errc::corrupt_file, "blk.0.attn_q_norm.weight", "missing");
  refused(of("phi3"), Errc::corrupt_file, "blk.0.attn_qkv.weight", "missing");
  for (const char* name : {"minicpm", "granite", "qwen2"}) {
    refused(
        [name](TinyGguf& g) {
          g.u32("llama.attention.key_length", 64);
          g.set_architecture(name);
        },
        Errc::unsupported, "the head size 64 is not 64 / 2", name);
  }
  refused(
      [](TinyGguf& g) {
        g.f32("llama.logit_scale", 0.7f);
        g.set_architecture("minicpm");
      },
      Errc::unsupported, "minicpm.logit_scale is 0.7", "64 divided by an integer");
  refused(
      [](TinyGguf& g) {
        g.flag("llama.rope.scaling.finetuned", false);
        g.set_architecture("granite");
      },
      Errc::unsupported, "granite.rope.scaling.finetuned");
}

TEST(GgufConfig, FillsInWhatFilesLeaveOut) {
  {
    TinyGguf gguf;
    gguf.set_architecture("minicpm");
    const Converted out(gguf);
    ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
    const Json config = out.json("config.json");
    EXPECT_EQ(config.find("scale_emb")->number(), 12.0);
    EXPECT_EQ(config.find("scale_depth")->number(), 1.4);
    EXPECT_EQ(config.find("dim_model_base")->integer(), 256);
  }
  TinyGguf gguf;
  gguf.set_architecture("granite");
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  const Json config = out.json("config.json");
  for (const char* name : {"embedding_multiplier", "residual_multiplier", "logits_scaling"}) {
    EXPECT_EQ(config.find(name)->number(), 1.0) << name;
  }
  EXPECT_EQ(config.find("attention_multiplier")->number(), 1.0 / std::sqrt(32.0));
}

TEST(GgufRope, LinearScaling) {
  for (const char* key : {"llama.rope.scaling.factor", "llama.rope.scale_linear"}) {
    for (const bool typed : {true, false}) {
      TinyGguf gguf;
      if (typed) gguf.text("llama.rope.scaling.type", "linear");
      gguf.f32(key, 2.5f);
      const Converted out(gguf);
      ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
      EXPECT_EQ(out.checkpoint->config().rope_kind, RopeKind::linear);
      EXPECT_EQ(out.checkpoint->config().rope_factor, 2.5);
    }
  }
  TinyGguf none;
  none.text("llama.rope.scaling.type", "none");
  none.f32("llama.rope.scaling.factor", 4.0f);
  EXPECT_EQ(Converted(none).json("config.json").find("rope_scaling"), nullptr);
}

TEST(GgufRope, RefusesWhatConfigJsonCannotSay) {
  const auto type = [](TinyGguf& g, const char* name) { g.text("llama.rope.scaling.type", name); };
  refused([&](TinyGguf& g) { type(g, "dynamic"); }, Errc::unsupported,
          "llama.rope.scaling.type 'dynamic'");
  refused([&](TinyGguf& g) { type(g, "linear"); }, Errc::corrupt_file,
          "llama.rope.scaling.factor is missing");
  refused([&](TinyGguf& g) { type(g, "yarn"); }, Errc::corrupt_file,
          "llama.rope.scaling.factor is missing");
  refused(
      [&](TinyGguf& g) {
        type(g, "yarn");
        g.f32("llama.rope.scaling.factor", 4.0f);
        g.f32("llama.rope.scaling.attn_factor", 1.25f);
      },
      Errc::unsupported, "llama.rope.scaling.attn_factor is 1.25");
  refused(
      [&](TinyGguf& g) {
        type(g, "yarn");
        g.f32("llama.rope.scaling.factor", 4.0f);
        g.f32("llama.rope.scaling.yarn_ext_factor", 0.5f);
      },
      Errc::unsupported, "llama.rope.scaling.yarn_ext_factor");
  refused([](TinyGguf& g) { g.add_vector("rope_freqs.weight", 8); }, Errc::corrupt_file,
          "rope_freqs.weight", "needs 16 floats");
  refused(
      [](TinyGguf& g) {
        g.add_vector("rope_freqs.weight", 16);
        std::string& bytes = g.tensor("rope_freqs.weight").bytes;
        bytes.clear();
        for (int i = 0; i < 16; ++i) bytes += GgufBuilder::raw(i % 2 == 0 ? 8.0f : 2.0f);
      },
      Errc::unsupported, "rope_freqs.weight", "llama3");
  refused([](TinyGguf& g) { g.add_vector("rope_factors_long.weight", 16); }, Errc::corrupt_file,
          "rope_factors_long.weight");
}

std::vector<float> llama3_factors(const Llama3Rope& rope, std::size_t pairs, float theta) {
  std::vector<float> out;
  for (std::size_t i = 0; i < pairs; ++i) {
    const double wavelength =
        2.0 * 3.141592653589793 *
        std::pow(static_cast<double>(theta), static_cast<double>(i) / static_cast<double>(pairs));
    const double turns = static_cast<double>(rope.original_context) / wavelength;
    if (turns > rope.high_freq_factor) {
      out.push_back(1.0f);
    } else if (turns < rope.low_freq_factor) {
      out.push_back(static_cast<float>(rope.factor));
    } else {
      const double s =
          (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      out.push_back(static_cast<float>(1.0 / ((1.0 - s) / rope.factor + s)));
    }
  }
  return out;
}

TEST(GgufRope, FindsLlama3Parameters) {
  for (const double factor : {8.0, 32.0, 2.5}) {
    const Llama3Rope wanted{factor, 1.0, 4.0, 8192};
    for (const std::size_t pairs : {12u, 32u, 64u}) {
      const auto found = fit_llama3(llama3_factors(wanted, pairs, 500000.0f), 500000.0f, 0);
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->factor, factor);
      EXPECT_EQ(found->low_freq_factor, 1.0);
      EXPECT_EQ(found->high_freq_factor, 4.0);
      EXPECT_EQ(found->original_context, 8192);
    }
  }
  // Other bands, found from the factors between them.
  for (const auto& [low, high] :
       {std::pair(0.5, 8.0), std::pair(2.0, 32.0), std::pair(1.25, 5.5)}) {
    const Llama3Rope wanted{16.0, low, high, 8192};
    const auto found = fit_llama3(llama3_factors(wanted, 64, 500000.0f), 500000.0f, 0);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->low_freq_factor, low);
    EXPECT_EQ(found->high_freq_factor, high);
  }
  // Another context, stated by the file.
  const Llama3Rope wanted{8.0, 1.0, 4.0, 4096};
  EXPECT_TRUE(fit_llama3(llama3_factors(wanted, 64, 10000.0f), 10000.0f, 4096).has_value());
  // One factor off by 1 %.
  std::vector<float> damaged = llama3_factors({8.0, 1.0, 4.0, 8192}, 64, 500000.0f);
  damaged[10] = 1.01f;
  EXPECT_FALSE(fit_llama3(damaged, 500000.0f, 0).has_value());
  EXPECT_FALSE(fit_llama3(std::vector<float>(64, 1.0f), 500000.0f, 0).has_value());
}

TEST(GgufTypes, KQuantsNeedRowsOfWholeBlocks) {
  for (const auto& [type, name] : {std::pair(Ggml::q4_k, "Q4_K"), std::pair(Ggml::q6_k, "Q6_K")}) {
    TinyGguf gguf;
    gguf.add_matrix("blk.0.ffn_down.weight", TinyGguf::kHidden, 96, type);
    expect_error(Converted(gguf).report, Errc::corrupt_file, "'blk.0.ffn_down.weight'",
                 "row length 96 is no multiple of 256, the block of", name);
  }
}

TEST(GgufTypes, RefusesOthersByName) {
  for (const auto& [type, bytes, name] :
       {std::tuple(39u, 17u, "MXFP4"), std::tuple(9u, 40u, "Q8_1"), std::tuple(26u, 128u, "I32")}) {
    TinyGguf gguf;
    auto& tensor = gguf.tensor("blk.0.ffn_up.weight");
    tensor.type = static_cast<Ggml>(type);
    tensor.bytes.assign(96 * 64 / 32 * bytes, '\0');
    expect_error(Converted(gguf).report, Errc::unsupported, "'blk.0.ffn_up.weight'", name, "Q4_K");
  }
}

TEST(GgufTypes, RefusesNonFiniteBlocks) {
  TinyGguf gguf;
  gguf.u32("llama.feed_forward_length", 256);
  gguf.add_matrix("blk.0.ffn_gate.weight", 256, 64, Ggml::q4_1);
  gguf.add_matrix("blk.0.ffn_up.weight", 256, 64, Ggml::q4_1);
  gguf.add_matrix("blk.0.ffn_down.weight", 64, 256, Ggml::q6_k);
  const std::string infinity = GgufBuilder::raw(std::uint16_t{0x7C00});
  std::string& bytes = gguf.tensor("blk.0.ffn_down.weight").bytes;
  for (char& byte : bytes) byte = 1;
  EXPECT_TRUE(Converted(gguf).report.has_value());
  bytes.replace(210 * 37 + 208, 2, infinity);
  expect_error(Converted(gguf).report, Errc::unsupported, "model.layers.0.mlp.down_proj", "row 37",
               "NaN or an infinity");
}

}  // namespace
}  // namespace qmlp
