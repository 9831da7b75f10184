#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/float16.h"
#include "convert/converted.h"
#include "convert/tiny_gguf.h"
#include "convert/writer.h"
#include "io/file_limit.h"
#include "io/temp_folder.h"
#include "io/tiny_model.h"
#include "qmlp/checkpoint.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

using test::Converted;
using test::expect_error;
using test::Ggml;
using test::joined;
using test::others;
using test::TempFolder;
using test::TinyGguf;
using test::TinyModel;

constexpr const char* kNames[][2] = {
    {"token_embd", "model.embed_tokens"},
    {"blk.0.attn_q", "model.layers.0.self_attn.q_proj"},
    {"blk.0.attn_k", "model.layers.0.self_attn.k_proj"},
    {"blk.0.attn_v", "model.layers.0.self_attn.v_proj"},
    {"blk.0.attn_output", "model.layers.0.self_attn.o_proj"},
    {"blk.0.ffn_gate", "model.layers.0.mlp.gate_proj"},
    {"blk.0.ffn_up", "model.layers.0.mlp.up_proj"},
    {"blk.0.ffn_down", "model.layers.0.mlp.down_proj"},
};

// The row of the GGUF tensor that holds Hugging Face's row: each head's halves are interleaved.
std::int64_t gguf_row(std::string_view path, std::int64_t row) {
  const auto tail = path.substr(path.size() - 6);
  if (tail != "q_proj" && tail != "k_proj") return row;
  constexpr std::int64_t kHalf = TinyGguf::kHeadDim / 2;
  const std::int64_t head = row / TinyGguf::kHeadDim;
  const std::int64_t in_head = row % TinyGguf::kHeadDim;
  return head * TinyGguf::kHeadDim + (in_head < kHalf ? 2 * in_head : 2 * (in_head - kHalf) + 1);
}

std::vector<float> decode(const Checkpoint& checkpoint, std::string_view path) {
  const QuantizedTensorView view = *checkpoint.weight(path);
  std::vector<float> out(static_cast<std::size_t>(view.N * view.K));
  EXPECT_TRUE(dequantize(view, 0, view.N, DType::f32, out).has_value());
  return out;
}

TEST(ConvertGguf, AffineTypesAreLossless) {
  for (const auto& [type, bits] :
       {std::pair(Ggml::q4_0, 4), std::pair(Ggml::q4_1, 4), std::pair(Ggml::q5_0, 5),
        std::pair(Ggml::q5_1, 5), std::pair(Ggml::q8_0, 8)}) {
    const TinyGguf gguf(type);
    const Converted out(gguf);
    ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
    EXPECT_TRUE(out.report->lossless);
    EXPECT_TRUE(out.report->notes.empty()) << joined(out.report->notes);
    for (const auto& [from, to] : kNames) {
      const ModuleInfo& info = *out.checkpoint->find_module(to);
      EXPECT_EQ(info.spec, (QuantSpec{bits, 32, DType::f16})) << to;
      const auto& plain = gguf.plain.at(std::string(from) + ".weight");
      const std::vector<float> decoded = decode(*out.checkpoint, to);
      for (std::int64_t row = 0; row < info.N; ++row) {
        for (std::int64_t k = 0; k < info.K; ++k) {
          const double want = plain.value(type, gguf_row(to, row), k);
          ASSERT_EQ(decoded[static_cast<std::size_t>(row * info.K + k)], static_cast<float>(want))
              << to << " " << row << " " << k;
        }
      }
    }
    EXPECT_EQ(*out.checkpoint->float_tensor("model.norm.weight"),
              gguf.floats.at("output_norm.weight"));
  }
}

TEST(ConvertGguf, FloatTypesStayAsTheyAre) {
  for (const auto& [type, dtype] :
       {std::pair(Ggml::f32, DType::f32), std::pair(Ggml::f16, DType::f16),
        std::pair(Ggml::bf16, DType::bf16)}) {
    const TinyGguf gguf(type);
    const Converted out(gguf);
    ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
    EXPECT_TRUE(out.report->lossless);
    for (const auto& [from, to] : kNames) {
      const ModuleInfo& info = *out.checkpoint->find_module(to);
      EXPECT_EQ(info.spec, QuantSpec::dense(dtype));
      const std::vector<float>& want = gguf.floats.at(std::string(from) + ".weight");
      const std::vector<float> have = decode(*out.checkpoint, to);
      for (std::int64_t i = 0; i < info.N * info.K; ++i) {
        const std::int64_t row = gguf_row(to, i / info.K);
        ASSERT_EQ(have[static_cast<std::size_t>(i)],
                  want[static_cast<std::size_t>(row * info.K + i % info.K)]);
      }
    }
  }
}

TEST(ConvertGguf, WidensScalesWhereABiasPassesF16) {
  TinyGguf gguf(Ggml::q8_0);
  auto& plain = gguf.plain.at("blk.0.ffn_up.weight");
  plain.d[5] = f32_to_f16(-600.0f);  // -128 * d is 76800
  plain.d[6] = 0x0001;               // the smallest subnormal: 128 times it is exact
  gguf.tensor("blk.0.ffn_up.weight").bytes = plain.encode(Ggml::q8_0);
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  EXPECT_TRUE(out.report->lossless);
  EXPECT_NE(joined(out.report->notes).find("model.layers.0.mlp.up_proj: scales and biases"),
            std::string::npos);
  const ModuleInfo& info = *out.checkpoint->find_module("model.layers.0.mlp.up_proj");
  EXPECT_EQ(info.spec.scale_dtype, DType::f32);
  EXPECT_EQ(out.checkpoint->find_module("model.layers.0.mlp.gate_proj")->spec.scale_dtype,
            DType::f16);
  const std::vector<float> decoded = decode(*out.checkpoint, info.path);
  for (std::int64_t i = 0; i < info.N * info.K; ++i) {
    ASSERT_EQ(decoded[static_cast<std::size_t>(i)],
              static_cast<float>(plain.value(Ggml::q8_0, i / info.K, i % info.K)));
  }
  ConvertOptions narrow;
  narrow.scale_dtype = DType::f16;
  expect_error(Converted(gguf, narrow).report, Errc::unsupported, "up_proj", "range of f16");
}

TEST(ConvertGguf, NormsThatF16DoesNotHoldStayF32) {
  TinyGguf gguf;
  float value = 1.0f + 0x1p-20f;
  std::memcpy(gguf.tensor("output_norm.weight").bytes.data(), &value, 4);
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  EXPECT_NE(joined(out.report->notes).find("stay f32"), std::string::npos);
  EXPECT_EQ(out.checkpoint->float_tensor("model.norm.weight")->front(), value);
}

TEST(ConvertGguf, WritesConfigAndTokenizer) {
  const Converted out((TinyGguf()));
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  const ModelConfig& config = out.checkpoint->config();
  EXPECT_EQ(config.rms_norm_eps, 1e-5);  // not 9.99999974e-06
  EXPECT_EQ(config.rope_theta, 100000.0);
  EXPECT_EQ(config.head_dim, 32);
  EXPECT_EQ(config.max_position_embeddings, 512);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.eos_token_ids, (std::vector<std::int32_t>{0, 1}));
  const Json json = out.json("config.json");
  EXPECT_EQ(json.find("quantization")->dump(),
            R"({"group_size": 32, "bits": 4, "mode": "affine"})");
  EXPECT_EQ(json.find("quantization_config")->dump(), json.find("quantization")->dump());
  EXPECT_EQ(*json.find("torch_dtype")->string(), "float16");

  const Json tokenizer = out.json("tokenizer.json");
  EXPECT_EQ(tokenizer.find("added_tokens")->array()->size(), 3u);
  EXPECT_EQ(tokenizer.find("added_tokens")->array()->at(2).find("special")->boolean(), false);
  EXPECT_EQ(
      tokenizer.find("pre_tokenizer")->dump(),
      R"({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true},)"
      R"( {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, )"
      R"("use_regex": true}]})");
  const Json* model = tokenizer.find("model");
  EXPECT_EQ(model->find("vocab")->find("ab")->integer(), 5);
  EXPECT_EQ(*model->find("merges")->array()->at(0).string(), "a b");
  EXPECT_TRUE(tokenizer.find("post_processor")->is_null());
  const Json tokenizer_config = out.json("tokenizer_config.json");
  EXPECT_EQ(*tokenizer_config.find("chat_template")->string(), "{{ 'x\n' }}");
  EXPECT_EQ(*tokenizer_config.find("eos_token")->string(), "<|endoftext|>");
  EXPECT_EQ(out.json("generation_config.json").find("eos_token_id")->dump(), "[0, 1]");
}

TEST(ConvertGguf, WritesEachKnownPreTokenizer) {
  TinyGguf gguf;
  gguf.text("tokenizer.ggml.pre", "llama-bpe");
  gguf.flag("tokenizer.ggml.add_bos_token", true);
  {
    const Converted out(gguf);
    ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
    const Json tokenizer = out.json("tokenizer.json");
    const Json& split = tokenizer.find("pre_tokenizer")->find("pretokenizers")->array()->at(0);
    EXPECT_EQ(*split.find("pattern")->find("Regex")->string(),
              R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
              R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)");
    EXPECT_EQ(tokenizer.find("model")->find("ignore_merges")->boolean(), true);
    EXPECT_EQ(*tokenizer.find("post_processor")->find("type")->string(), "TemplateProcessing");
  }
  gguf.text("tokenizer.ggml.pre", "qwen2");
  {
    const Json tokenizer = Converted(gguf).json("tokenizer.json");
    EXPECT_EQ(*tokenizer.find("normalizer")->find("type")->string(), "NFC");
    EXPECT_NE(tokenizer.find("pre_tokenizer")->dump().find(R"(|\\p{N}| ?)"), std::string::npos);
  }
  gguf.text("tokenizer.ggml.pre", "gpt-2");
  EXPECT_EQ(*Converted(gguf).json("tokenizer.json").find("pre_tokenizer")->find("type")->string(),
            "ByteLevel");
  gguf.unset("tokenizer.ggml.pre");
  const Converted unnamed(gguf);
  ASSERT_TRUE(unnamed.report.has_value());
  EXPECT_NE(joined(unnamed.report->notes).find("GPT-2"), std::string::npos);
  gguf.text("tokenizer.ggml.pre", "bloom");
  expect_error(Converted(gguf).report, Errc::unsupported, "tokenizer.ggml.pre 'bloom'", "smollm");
  gguf.text("tokenizer.ggml.model", "bert");
  expect_error(Converted(gguf).report, Errc::unsupported, "tokenizer.ggml.model 'bert'");
}

TEST(ConvertGguf, RefusesBrokenTokenizers) {
  const auto refused = [](auto change, auto... texts) {
    TinyGguf gguf;
    change(gguf);
    expect_error(Converted(gguf).report, Errc::corrupt_file, texts...);
  };
  refused([](TinyGguf& g) { g.texts("tokenizer.ggml.tokens", {"a", "\xFF"}); }, "token 1", "UTF-8");
  refused([](TinyGguf& g) { g.texts("tokenizer.ggml.tokens", {"a", "b", "a"}); }, "'a'", "twice");
  refused([](TinyGguf& g) { g.i32s("tokenizer.ggml.token_type", {1}); }, "token_type", "8 tokens");
  refused([](TinyGguf& g) { g.texts("tokenizer.ggml.merges", {"ab"}); }, "merge 0");
  refused([](TinyGguf& g) { g.unset("tokenizer.ggml.merges"); }, "tokenizer.ggml.merges");
  refused([](TinyGguf& g) { g.u32("tokenizer.ggml.eos_token_id", 8); }, "eos_token_id", "below 8");
  refused([](TinyGguf& g) { g.text("tokenizer.chat_template", "\xFF"); }, "chat_template");
  refused([](TinyGguf& g) { g.add_matrix("token_embd.weight", 7, 64, Ggml::q4_1); }, "8 tokens",
          "7 rows");
}

TEST(ConvertGguf, UntiedHeadsAndLinearBiases) {
  TinyGguf gguf;
  gguf.add_matrix("output.weight", TinyGguf::kVocab, TinyGguf::kHidden, Ggml::q8_0);
  gguf.add_vector("blk.0.attn_q.bias", 64);
  gguf.add_vector("blk.0.attn_k.bias", 32);
  gguf.add_vector("blk.0.attn_v.bias", 32);
  gguf.add_vector("blk.0.attn_output.bias", 64);
  const Converted out(gguf);
  ASSERT_TRUE(out.report.has_value()) << out.report.error().message;
  EXPECT_FALSE(out.checkpoint->config().tie_word_embeddings);
  EXPECT_EQ(out.checkpoint->find_module("lm_head")->spec.bits, 8);
  const std::string q = "model.layers.0.self_attn.q_proj";
  const std::vector<float> bias = *out.checkpoint->float_tensor(q + ".bias");
  for (std::int64_t row = 0; row < 64; ++row) {
    EXPECT_EQ(bias[static_cast<std::size_t>(row)],
              gguf.floats.at("blk.0.attn_q.bias")[static_cast<std::size_t>(gguf_row(q, row))]);
  }
  gguf.remove("blk.0.attn_output.bias");
  expect_error(Converted(gguf).report, Errc::corrupt_file, "blk.0.attn_output.bias", "missing");
}

// Converts a tiny checkpoint and compares each module with what the quantizer makes of its decoded
// weights.
void check_requantized(const TinyModel& model, std::string_view patterns, DType scale_dtype) {
  const TempFolder folder;
  model.write(folder);
  ConvertOptions options;
  options.patterns = *parse_quant_patterns(patterns);
  const auto report = convert(folder.path(), folder.file("out"), options);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_FALSE(report->lossless);
  const auto before = *Checkpoint::open(folder.path());
  const auto after = *Checkpoint::open(folder.file("out"));
  int changed = 0;
  for (const ModuleInfo& info : after->modules()) {
    const QuantizedTensorView have = *after->weight(info.path);
    const QuantizedTensorView old = *before->weight(info.path);
    if (info.spec == old.spec) {
      EXPECT_TRUE(std::equal(have.codes.begin(), have.codes.end(), old.codes.begin()));
      EXPECT_TRUE(std::equal(have.biases.begin(), have.biases.end(), old.biases.begin()));
      continue;
    }
    ++changed;
    EXPECT_EQ(info.spec.scale_dtype, scale_dtype);
    const QuantizedTensor want = *quantize(decode(*before, info.path), info.N, info.K, info.spec);
    EXPECT_TRUE(std::equal(have.codes.begin(), have.codes.end(), want.codes.begin())) << info.path;
    EXPECT_TRUE(std::equal(have.scales.begin(), have.scales.end(), want.scales.begin()));
    EXPECT_TRUE(std::equal(have.biases.begin(), have.biases.end(), want.biases.begin()));
  }
  EXPECT_GT(changed, 0);
}

TEST(ConvertCheckpoint, RequantizesThroughF32) {
  check_requantized(TinyModel({8, 32, DType::f16}), "gate=4,up=6/64,layers.1.*=3/32,embed=5/128",
                    DType::f16);
}

TEST(ConvertCheckpoint, QuantizesFloatWeights) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    check_requantized(TinyModel(QuantSpec::dense(dtype)), "*=4,down=8/32", dtype);
  }
}

TEST(ConvertCheckpoint, KeepsWhatAGroupDoesNotFit) {
  const TempFolder folder;
  TinyModel(QuantSpec::dense(DType::bf16)).write(folder);
  ConvertOptions options;
  options.patterns = *parse_quant_patterns("4");  // group 64; down's K is 160
  const auto report = convert(folder.path(), folder.file("out"), options);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_NE(joined(report->notes).find("model.layers.1.mlp.down_proj: K 160"), std::string::npos);
  const auto after = *Checkpoint::open(folder.file("out"));
  EXPECT_EQ(after->find_module("model.layers.1.mlp.down_proj")->spec,
            QuantSpec::dense(DType::bf16));
  EXPECT_EQ(after->find_module("model.layers.1.mlp.up_proj")->spec,
            (QuantSpec{4, 64, DType::bf16}));
}

TEST(ConvertCheckpoint, CopiesWithoutPatterns) {
  const TempFolder folder;
  TinyModel model({5, 32, DType::bf16});
  model.config.set("custom", "kept");
  model.write(folder);
  folder.write("tokenizer.json", "{\"x\": 1}");
  folder.write("generation_config.json", "{\"eos_token_id\": [2, 3]}");
  folder.write("secret.txt", "not copied");
  const auto report = convert(folder.path(), folder.file("out"), {});
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_TRUE(report->lossless);
  const auto after = *Checkpoint::open(folder.file("out"));
  for (const auto& tensor : model.tensors) {
    if (tensor.name.find(".weight") == std::string::npos || tensor.dtype != "U32") continue;
    const auto view =
        *after->weight(std::string_view(tensor.name).substr(0, tensor.name.size() - 7));
    EXPECT_EQ(std::memcmp(view.codes.data(), tensor.bytes.data(), tensor.bytes.size()), 0);
  }
  EXPECT_EQ(test::read_file(folder.file("out/tokenizer.json")), "{\"x\": 1}");
  EXPECT_EQ(after->config().eos_token_ids, (std::vector<std::int32_t>{2, 3}));
  EXPECT_NE(test::read_file(folder.file("out/config.json")).find("\"custom\": \"kept\""),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder.file("out/secret.txt")));
}

TEST(ConvertCheckpoint, ChangesScaleTypes) {
  const TempFolder folder;
  TinyModel({4, 32, DType::f16}).write(folder);
  ConvertOptions options;
  options.scale_dtype = DType::f32;
  auto report = convert(folder.path(), folder.file("wide"), options);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_TRUE(report->lossless);
  options.scale_dtype = DType::bf16;
  report = convert(folder.path(), folder.file("narrow"), options);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_FALSE(report->lossless);
  const auto wide = *Checkpoint::open(folder.file("wide"));
  EXPECT_EQ(wide->modules().front().spec.scale_dtype, DType::f32);
  EXPECT_EQ(decode(*wide, "model.embed_tokens"),
            decode(**Checkpoint::open(folder.path()), "model.embed_tokens"));
}

TEST(ConvertCheckpoint, RefusesBadOptions) {
  const TempFolder folder;
  TinyModel().write(folder);
  const auto attempt = [&folder](std::string_view patterns, std::optional<int> group_size) {
    ConvertOptions options;
    if (!patterns.empty()) options.patterns = *parse_quant_patterns(patterns);
    options.group_size = group_size;
    return convert(folder.path(), folder.file("out"), options);
  };
  expect_error(attempt("layers.9.*=4", {}), Errc::invalid_argument, "layers.9.*",
               "matches no module");
  expect_error(attempt("head=4", {}), Errc::invalid_argument, "use embed");
  expect_error(attempt("gate=4", 48), Errc::invalid_argument, "48");
  expect_error(attempt("", 64), Errc::invalid_argument, "--bits");
  EXPECT_FALSE(std::filesystem::exists(folder.file("out")));
}

TEST(ConvertCheckpoint, RefusesToQuantizeNonFiniteWeights) {
  TinyModel model(QuantSpec::dense(DType::f32));
  const float nan = std::nanf("");
  std::memcpy(model.tensor("model.layers.1.mlp.up_proj.weight").bytes.data() + 4 * (128 * 37 + 70),
              &nan, 4);
  const TempFolder folder;
  model.write(folder);
  ConvertOptions options;
  options.patterns = *parse_quant_patterns("up=4/32");
  expect_error(convert(folder.path(), folder.file("out"), options), Errc::unsupported,
               "model.layers.1.mlp.up_proj", "row 37", "column 64");
}

TEST(ConvertCheckpoint, WritesShards) {
  const TempFolder folder;
  TinyModel().write(folder);
  auto source = open_checkpoint_source(folder.path());
  ASSERT_TRUE(source.has_value()) << source.error().message;
  std::vector<std::string> notes;
  const auto targets = choose_targets(*source, {}, notes);
  ASSERT_TRUE(targets.has_value());
  std::filesystem::create_directory(folder.file("out"));
  const auto pool = *ThreadPool::create(2);
  const auto report = write_model(*source, *targets, {}, folder.file("out"), 30'000, *pool);
  ASSERT_TRUE(report.has_value()) << report.error().message;
  EXPECT_TRUE(std::filesystem::exists(folder.file("out/model.safetensors.index.json")));
  EXPECT_FALSE(std::filesystem::exists(folder.file("out/model.safetensors")));
  const auto before = *Checkpoint::open(folder.path());
  const auto after = Checkpoint::open(folder.file("out"));
  ASSERT_TRUE(after.has_value()) << after.error().message;
  EXPECT_EQ((*after)->tensors().size(), before->tensors().size());
  for (const ModuleInfo& info : before->modules()) {
    EXPECT_EQ(decode(**after, info.path), decode(*before, info.path));
  }
}

TEST(ConvertSafety, KeepsAnExistingFolder) {
  const TempFolder folder;
  const std::string source = folder.write("m.gguf", TinyGguf().build());
  const std::string out = folder.file("out");
  ASSERT_TRUE(convert(source, out + "/", {}).has_value());
  const std::string config = test::read_file(out + "/config.json");
  expect_error(convert(source, out, {}), Errc::invalid_argument, out, "exists already", "--force");
  ConvertOptions force;
  force.force = true;
  force.patterns = *parse_quant_patterns("up=8");
  ASSERT_TRUE(convert(source, out, force).has_value());
  EXPECT_NE(test::read_file(out + "/config.json"), config);
  EXPECT_EQ(others(folder, "m.gguf"), std::vector<std::string>{"out"});
}

TEST(ConvertSafety, DoesNotReplaceWhatIsNoModel) {
  const TempFolder folder;
  const std::string source = folder.write("m.gguf", TinyGguf().build());
  ConvertOptions force;
  force.force = true;
  std::filesystem::create_directory(folder.file("photos"));
  folder.write("photos/one.jpg", "x");
  expect_error(convert(source, folder.file("photos"), force), Errc::invalid_argument,
               "not a model folder");
  // A config.json alone makes no model of somebody's project.
  folder.write("photos/config.json", "{}");
  expect_error(convert(source, folder.file("photos"), force), Errc::invalid_argument,
               "no .safetensors file");
  folder.write("photos/model.safetensors", "x");
  std::filesystem::create_directory(folder.file("photos/src"));
  expect_error(convert(source, folder.file("photos"), force), Errc::invalid_argument,
               "the folder src");
  EXPECT_TRUE(std::filesystem::exists(folder.file("photos/one.jpg")));
  expect_error(convert(source, source, force), Errc::invalid_argument, "not a folder");
  expect_error(convert(source, folder.path(), force), Errc::invalid_argument,
               "holds the source itself");
  std::filesystem::create_directory(folder.file("empty"));
  EXPECT_TRUE(convert(source, folder.file("empty"), force).has_value());
  // A model folder as its own destination.
  expect_error(convert(folder.file("empty"), folder.file("empty"), force), Errc::invalid_argument,
               "holds the source itself");
  expect_error(convert(source, folder.file("no/such/parent"), {}), Errc::io, "cannot create");
  expect_error(convert(folder.file("none"), folder.file("out"), {}), Errc::io, "none",
               "does not exist");
  EXPECT_EQ(test::read_file(folder.file("photos/one.jpg")), "x");
}

TEST(ConvertSafety, AStopLeavesNothing) {
  const TempFolder folder;
  const std::string source = folder.write("m.gguf", TinyGguf().build());
  int polls = 0;
  std::string last;
  ConvertOptions options;
  options.stop_requested = [&polls] { return ++polls > 6; };
  options.progress = [&last](std::string_view what, std::int64_t done, std::int64_t total) {
    last = what;
    EXPECT_LT(done, total);
  };
  expect_error(convert(source, folder.file("out"), options), Errc::interrupted, "stopped");
  EXPECT_FALSE(last.empty());
  EXPECT_TRUE(others(folder, "m.gguf").empty());
  // The folder that was to be replaced stays.
  ASSERT_TRUE(convert(source, folder.file("out"), {}).has_value());
  options.force = true;
  polls = 0;
  expect_error(convert(source, folder.file("out"), options), Errc::interrupted, "stopped");
  EXPECT_TRUE(Checkpoint::open(folder.file("out")).has_value());
  EXPECT_EQ(others(folder, "m.gguf"), std::vector<std::string>{"out"});
}

TEST(ConvertSafety, AFullDiskLeavesNothing) {
  const TempFolder folder;
  const std::string source = folder.write("m.gguf", TinyGguf().build());
  {
    const test::FileLimit limit(5'000);
    expect_error(convert(source, folder.file("out"), {}), Errc::io, "cannot write");
  }
  EXPECT_TRUE(others(folder, "m.gguf").empty());
}

}  // namespace
}  // namespace qmlp
