#include "qmlp/checkpoint.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>

#include "io/tiny_model.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

using test::expect_error;
using test::TempFolder;
using test::TinyModel;

constexpr const char* kGate = "model.layers.0.mlp.gate_proj";

Result<std::shared_ptr<const Checkpoint>> open(const TinyModel& model) {
  const TempFolder folder;
  model.write(folder);
  // Reading into memory lets the folder go.
  return Checkpoint::open(folder.path(), {.use_mmap = false});
}

std::string all_warnings(const Checkpoint& checkpoint) {
  std::string out;
  for (const std::string& warning : checkpoint.warnings()) out += warning + "\n";
  return out;
}

TEST(Checkpoint, ListsModulesAndTensors) {
  const TempFolder folder;
  TinyModel model;
  model.write(folder);
  const auto result = Checkpoint::open(folder.path());
  ASSERT_TRUE(result.has_value()) << result.error().message;
  const Checkpoint& checkpoint = **result;
  EXPECT_TRUE(checkpoint.mapped());
  EXPECT_EQ(checkpoint.modules().size(), 15u);
  EXPECT_EQ(checkpoint.modules().front().path, "model.embed_tokens");
  EXPECT_EQ(checkpoint.modules()[1].path, "model.layers.0.self_attn.q_proj");
  EXPECT_EQ(checkpoint.tensors().size(), model.tensors.size());
  EXPECT_TRUE(checkpoint.warnings().empty()) << all_warnings(checkpoint);
  EXPECT_EQ(checkpoint.file_bytes(), std::filesystem::file_size(folder.file("model.safetensors")));
  const ModuleInfo* gate = checkpoint.find_module(kGate);
  ASSERT_NE(gate, nullptr);
  EXPECT_EQ(gate->N, TinyModel::kIntermediate);
  EXPECT_EQ(gate->K, TinyModel::kHidden);
  EXPECT_EQ(gate->spec, (QuantSpec{4, 32, DType::bf16}));
  EXPECT_EQ(gate->spec_source, "config quantization");
  EXPECT_EQ(gate->bytes, 160u * 64 + 2 * 160u * 4 * 2);
  EXPECT_EQ(checkpoint.find_module("model.layers.2.mlp.gate_proj"), nullptr);
  expect_error(checkpoint.weight("lm_head"), Errc::invalid_argument, "lm_head");
}

TEST(Checkpoint, ViewsHoldTheStoredBytes) {
  const TempFolder folder;
  TinyModel model({5, 64, DType::f16});
  // 160 is no multiple of 64: a group of 32 for down.
  for (const char* layer : {"0", "1"}) {
    const std::string path = std::string("model.layers.") + layer + ".mlp.down_proj";
    model.add_matrix(path, TinyModel::kHidden, TinyModel::kIntermediate, {3, 32, DType::f32});
    model.set_override(path, TinyModel::spec_json(3, 32));
  }
  model.write(folder);
  const auto mapped = Checkpoint::open(folder.path());
  const auto read = Checkpoint::open(folder.path(), {.use_mmap = false});
  ASSERT_TRUE(mapped.has_value()) << mapped.error().message;
  ASSERT_TRUE(read.has_value()) << read.error().message;
  EXPECT_FALSE((*read)->mapped());
  for (const ModuleInfo& info : (*mapped)->modules()) {
    (*mapped)->release(info.path);
    for (const auto* checkpoint : {&*mapped, &*read}) {
      const auto view = (*checkpoint)->weight(info.path);
      ASSERT_TRUE(view.has_value()) << view.error().message;
      const std::string& stored = model.tensor(info.path + ".weight").bytes;
      ASSERT_EQ(view->codes.size(), stored.size());
      EXPECT_EQ(std::memcmp(view->codes.data(), stored.data(), stored.size()), 0) << info.path;
    }
  }
  const ModuleInfo* down = (*mapped)->find_module("model.layers.1.mlp.down_proj");
  EXPECT_EQ(down->spec, (QuantSpec{3, 32, DType::f32}));
  EXPECT_EQ(down->spec_source, "config quantization.model.layers.1.mlp.down_proj");
}

TEST(Checkpoint, AFileThatShrinksIsAnErrorBeforeItIsRead) {
  const TempFolder folder;
  TinyModel model;
  model.write(folder);
  const std::string name = folder.file("model.safetensors");
  const auto mapped = Checkpoint::open(folder.path());
  const auto read = Checkpoint::open(folder.path(), {.use_mmap = false});
  ASSERT_TRUE(mapped.has_value()) << mapped.error().message;
  ASSERT_TRUE(read.has_value()) << read.error().message;

  // A shorter successor under the same name is another file: the old bytes stay.
  const std::string bytes = test::read_file(name);
  std::filesystem::rename(name, folder.file("old"));
  folder.write("model.safetensors", bytes.substr(0, 100));
  EXPECT_TRUE((*mapped)->weight(kGate).has_value());
  std::filesystem::rename(folder.file("old"), name);
  EXPECT_TRUE((*mapped)->weight(kGate).has_value());

  std::filesystem::resize_file(name, bytes.size() - 1);
  const std::string sizes = "holds " + std::to_string(bytes.size() - 1) + " bytes, held " +
                            std::to_string(bytes.size()) + " when";
  expect_error((*mapped)->weight(kGate), Errc::io, name, "shrank", sizes);
  expect_error((*mapped)->float_tensor("model.norm.weight"), Errc::io, name, sizes);
  EXPECT_TRUE((*read)->weight(kGate).has_value());
  EXPECT_TRUE((*read)->float_tensor("model.norm.weight").has_value());
}

TEST(Checkpoint, RefusesWhatIsNoModelFolder) {
  const TempFolder folder;
  expect_error(Checkpoint::open(folder.file("none")), Errc::io, "none", "does not exist");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "config.json");
  expect_error(Checkpoint::open(folder.write("m.gguf", "GGUF")), Errc::unsupported, "GGUF",
               "qmlp convert");
  expect_error(Checkpoint::open(folder.write("m.txt", "")), Errc::invalid_argument, "not a folder");
  TinyModel().write_config(folder);
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "no model*.safetensors",
               "m.gguf can be converted");
  folder.write("config.json", "{\"model_type\": ");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "config.json", "byte ");
  folder.write("config.json", "[]");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "an array");
}

TEST(Checkpoint, NamesABrokenWeightFile) {
  const TempFolder folder;
  TinyModel().write_config(folder);
  folder.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:1\n");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "model.safetensors", "Git LFS");
  std::filesystem::remove(folder.file("model.safetensors"));
  std::filesystem::create_directory(folder.file("model.safetensors"));
  expect_error(Checkpoint::open(folder.path()), Errc::io, "model.safetensors", "is a directory");
}

TEST(Checkpoint, RefusesOtherQuantizationFirst) {
  // An AWQ folder holds other tensors altogether; the format is what the user must hear.
  TinyModel model;
  model.config.erase("quantization");
  JsonObject awq;
  awq.set("quant_method", "awq");
  awq.set("bits", 4);
  model.config.set("quantization_config", Json(std::move(awq)));
  for (auto& tensor : model.tensors) {
    if (tensor.name.find("proj.weight") != std::string::npos) {
      tensor.name.replace(tensor.name.size() - 6, 6, "qweight");
    }
  }
  expect_error(open(model), Errc::unsupported, "\"awq\"");
}

TEST(Checkpoint, NamesMissingParts) {
  for (const char* name : {"model.layers.1.mlp.up_proj.biases", "model.layers.1.mlp.up_proj.scales",
                           "model.layers.1.mlp.up_proj.weight", "model.norm.weight",
                           "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"}) {
    TinyModel model;
    model.remove(name);
    const auto result = open(model);
    ASSERT_FALSE(result.has_value()) << name;
    EXPECT_NE(result.error().message.find(name), std::string::npos) << result.error().message;
  }
  TinyModel model;
  model.config.set("num_hidden_layers", 3);
  expect_error(open(model), Errc::corrupt_file, "model.layers.2.");
}

TEST(Checkpoint, ChecksShapesAgainstConfig) {
  {
    TinyModel model;  // an entry of its own is a promise
    model.set_override(kGate, TinyModel::spec_json(4, 32));
    model.add_matrix(kGate, 160, 128, {6, 128, DType::bf16});
    expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "[160, 24]", "4 bits",
                 "[160, 16]", "the shapes fit 6 bits, group 128");
  }
  {
    TinyModel model;  // the same count of words, another group
    model.set_override(kGate, TinyModel::spec_json(4, 32));
    model.add_matrix(kGate, 160, 128, {4, 64, DType::bf16});
    expect_error(open(model), Errc::corrupt_file, "gate_proj.scales", "[160, 2]", "[160, 4]");
  }
  {
    TinyModel model;
    model.add_matrix(kGate, 128, 160, {4, 32, DType::bf16});
    expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "[128, 20]", "[160, 16]");
  }
  {
    TinyModel model;
    model.tensor(std::string(kGate) + ".biases").shape = {80, 8};
    expect_error(open(model), Errc::corrupt_file, "gate_proj.biases", "[80, 8]", "[160, 4]");
  }
  {
    TinyModel model;
    auto& biases = model.tensor(std::string(kGate) + ".biases");
    biases.dtype = "F16";
    expect_error(open(model), Errc::corrupt_file, "gate_proj.biases", "F16", "BF16");
  }
  {
    TinyModel model;
    model.tensor(std::string(kGate) + ".weight").dtype = "I32";
    expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "I32", "U32");
  }
  {
    TinyModel model;
    model.add_vector("model.norm.weight", 64, DType::bf16);
    expect_error(open(model), Errc::corrupt_file, "model.norm.weight", "[64]", "[128]");
  }
}

TEST(Checkpoint, RecoversEveryWidth) {
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      TinyModel model({bits, 32, dtype});
      const auto result = open(model);
      ASSERT_TRUE(result.has_value()) << bits << ": " << result.error().message;
      const ModuleInfo* down = (*result)->find_module("model.layers.0.mlp.down_proj");
      EXPECT_EQ(down->K, 160);
      EXPECT_EQ(down->spec, (QuantSpec{bits, 32, dtype}));
    }
  }
}

TEST(Checkpoint, FindsOverridesUnderEveryPrefix) {
  for (const char* key :
       {"model.layers.0.mlp.gate_proj", "language_model.model.layers.0.mlp.gate_proj",
        "model.language_model.layers.0.mlp.gate_proj"}) {
    TinyModel model;
    model.add_matrix(kGate, 160, 128, {6, 128, DType::bf16});
    model.set_override(key, TinyModel::spec_json(6, 128));
    const auto result = open(model);
    ASSERT_TRUE(result.has_value()) << key << ": " << result.error().message;
    EXPECT_EQ((*result)->find_module(kGate)->spec, (QuantSpec{6, 128, DType::bf16}));
    EXPECT_EQ((*result)->warnings().size(), std::string(key) == kGate ? 0u : 1u);
  }
}

TEST(Checkpoint, ReportsOverridesThatMatchNothing) {
  TinyModel model;
  model.set_override("vision.layers.0.mlp.gate_proj", TinyModel::spec_json(6, 128));
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_NE(all_warnings(**result).find("'vision.layers.0.mlp.gate_proj' matches no module"),
            std::string::npos);
}

TEST(Checkpoint, RefusesOverridesThatDisagree) {
  TinyModel model;
  model.set_override("language_model.model.layers.0.mlp.gate_proj", TinyModel::spec_json(6, 128));
  model.set_override("model.language_model.layers.0.mlp.gate_proj", TinyModel::spec_json(4, 32));
  expect_error(open(model), Errc::corrupt_file, "both name", kGate);
}

TEST(Checkpoint, AnOverrideDoesNotInherit) {
  TinyModel model({8, 32, DType::bf16});
  JsonObject only_group;
  only_group.set("group_size", 32);
  model.set_override(kGate, Json(only_group));  // MLX reads this as 4 bits
  expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "4 bits");
  model.add_matrix(kGate, 160, 128, {4, 32, DType::bf16});
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->find_module(kGate)->spec.bits, 4);
}

TEST(Checkpoint, DenseModulesBesideQuantizedOnes) {
  TinyModel model;
  model.add_matrix(kGate, 160, 128, QuantSpec::dense(DType::bf16));  // no .scales, no override
  model.add_matrix("model.layers.1.mlp.up_proj", 160, 128, QuantSpec::dense(DType::f32));
  model.set_override("model.layers.1.mlp.up_proj", Json(false));
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->find_module(kGate)->spec, QuantSpec::dense(DType::bf16));
  EXPECT_EQ((*result)->find_module(kGate)->spec_source, "unquantized");
  EXPECT_EQ((*result)->find_module("model.layers.1.mlp.up_proj")->spec,
            QuantSpec::dense(DType::f32));
  EXPECT_EQ((*result)->weight(kGate)->codes.size(), 160u * 128 * 2);

  model.set_override("model.layers.0.mlp.up_proj", Json(false));
  expect_error(open(model), Errc::corrupt_file, "model.layers.0.mlp.up_proj.scales",
               "not quantized");
}

TEST(Checkpoint, RefusesScalesWithoutAQuantizationEntry) {
  TinyModel model;
  model.config.erase("quantization");
  expect_error(open(model), Errc::corrupt_file, "model.embed_tokens.scales", "quantization");
}

TEST(Checkpoint, RefusesOtherFloatTypes) {
  TinyModel model(QuantSpec::dense(DType::f32));
  auto& weight = model.tensor(std::string(kGate) + ".weight");
  weight.dtype = "F8_E4M3";
  weight.bytes.resize(160 * 128);
  expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "F8_E4M3", "F32, F16 or BF16");
}

TEST(Checkpoint, LinearBiases) {
  const auto add_biases = [](TinyModel& model, const char* layer) {
    const std::string mlp = std::string("model.layers.") + layer + ".mlp.";
    model.add_vector(mlp + "gate_proj.bias", 160, DType::bf16);
    model.add_vector(mlp + "up_proj.bias", 160, DType::f32);
    model.add_vector(mlp + "down_proj.bias", 128, DType::bf16);
  };
  TinyModel model;
  model.config.set("mlp_bias", true);
  add_biases(model, "0");
  expect_error(open(model), Errc::corrupt_file, "model.layers.1.mlp.gate_proj.bias", "missing");
  add_biases(model, "1");
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_TRUE((*result)->find_module(kGate)->has_linear_bias);
  EXPECT_FALSE((*result)->find_module("model.layers.0.self_attn.q_proj")->has_linear_bias);
  EXPECT_EQ((*result)->float_tensor("model.layers.0.mlp.up_proj.bias")->size(), 160u);
  EXPECT_TRUE((*result)->warnings().empty());

  model.config.set("mlp_bias", false);
  expect_error(open(model), Errc::corrupt_file, "model.layers.0.mlp.gate_proj.bias", "mlp_bias");
  model.config.set("mlp_bias", true);
  model.add_vector("model.layers.1.mlp.down_proj.bias", 160, DType::bf16);
  expect_error(open(model), Errc::corrupt_file, "model.layers.1.mlp.down_proj.bias", "[160]",
               "[128]");
}

TEST(Checkpoint, TiedAndUntiedHeads) {
  const QuantSpec spec{4, 32, DType::bf16};
  {
    TinyModel model;
    model.config.set("tie_word_embeddings", false);
    expect_error(open(model), Errc::corrupt_file, "lm_head.weight", "missing");
    model.add_matrix("lm_head", TinyModel::kVocab, TinyModel::kHidden, spec);
    const auto result = open(model);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    EXPECT_EQ((*result)->modules().back().path, "lm_head");
  }
  {
    TinyModel model;  // a copy of the embedding
    for (const char* part : {".weight", ".scales", ".biases"}) {
      auto copy = model.tensor(std::string("model.embed_tokens") + part);
      copy.name = std::string("lm_head") + part;
      model.tensors.push_back(copy);
    }
    auto result = open(model);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    EXPECT_NE(all_warnings(**result).find("it equals the embedding"), std::string::npos);
    model.tensor("lm_head.scales").bytes[0] ^= 1;
    result = open(model);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    EXPECT_NE(all_warnings(**result).find("it DIFFERS from the embedding"), std::string::npos);
  }
  {
    TinyModel model;  // the embedding at its own width, no head
    model.add_matrix("model.embed_tokens", TinyModel::kVocab, TinyModel::kHidden,
                     {8, 64, DType::bf16});
    model.set_override("model.embed_tokens", TinyModel::spec_json(8, 64));
    const auto result = open(model);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    EXPECT_EQ((*result)->modules().front().spec.bits, 8);
  }
}

// One stored tensor for q, k and v, and one for gate and up, as phi3 has them.
TinyModel stacked_model(const QuantSpec& spec) {
  TinyModel model(spec);
  model.config.set("model_type", "phi3");
  for (const char* layer : {"0", "1"}) {
    const std::string path = std::string("model.layers.") + layer;
    for (const auto& [stacked, parts] :
         {std::pair(path + ".self_attn.qkv_proj", std::vector<std::string>{"q", "k", "v"}),
          std::pair(path + ".mlp.gate_up_proj", std::vector<std::string>{"gate", "up"})}) {
      const std::string stem = stacked.substr(0, stacked.rfind('.') + 1);
      for (const char* suffix : {".weight", ".scales", ".biases"}) {
        if (spec.is_dense() && std::string(suffix) != ".weight") continue;
        test::TinyTensor whole = model.tensor(stem + parts[0] + "_proj" + suffix);
        for (std::size_t i = 1; i < parts.size(); ++i) {
          const test::TinyTensor& more = model.tensor(stem + parts[i] + "_proj" + suffix);
          whole.shape[0] += more.shape[0];
          whole.bytes += more.bytes;
        }
        whole.name = stacked + suffix;
        for (const std::string& part : parts) model.remove(stem + part + "_proj" + suffix);
        model.tensors.push_back(std::move(whole));
      }
    }
  }
  return model;
}

TEST(Checkpoint, StackedProjectionsAreRowsOfTheOneStored) {
  for (const QuantSpec& spec : {QuantSpec{4, 32, DType::bf16}, QuantSpec{3, 32, DType::f32},
                                QuantSpec::dense(DType::f16)}) {
    TinyModel apart(spec);
    const auto want = open(apart);
    ASSERT_TRUE(want.has_value()) << want.error().message;
    TinyModel model = stacked_model(spec);
    model.config.set("tie_word_embeddings", true);
    const TempFolder folder;
    model.write(folder);
    const auto got = Checkpoint::open(folder.path());
    ASSERT_TRUE(got.has_value()) << got.error().message;
    EXPECT_TRUE((*got)->warnings().empty()) << all_warnings(**got);
    ASSERT_EQ((*got)->modules().size(), (*want)->modules().size());
    EXPECT_EQ((*got)->stored_modules().size(), 1u + 2 * 4);
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < (*want)->modules().size(); ++i) {
      const ModuleInfo& a = (*want)->modules()[i];
      const ModuleInfo& b = (*got)->modules()[i];
      EXPECT_EQ(a.path, b.path);
      EXPECT_EQ(a.bytes, b.bytes);
      EXPECT_EQ(a.spec, b.spec);
      bytes += b.bytes;
      // Pages of other rows stay when those of one part are given back.
      (*got)->release(b.path);
      const auto first = (*want)->weight(a.path);
      const auto second = (*got)->weight(b.path);
      ASSERT_TRUE(second.has_value()) << second.error().message;
      for (const auto& [x, y] :
           {std::pair(first->codes, second->codes), std::pair(first->scales, second->scales),
            std::pair(first->biases, second->biases)}) {
        ASSERT_EQ(x.size(), y.size()) << a.path;
        EXPECT_TRUE(x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0) << a.path;
      }
    }
    for (const ModuleInfo& info : (*got)->stored_modules()) bytes -= info.bytes;
    EXPECT_EQ(bytes, 0u);
    const ModuleInfo* v = (*got)->find_module("model.layers.1.self_attn.v_proj");
    ASSERT_NE(v, nullptr);
    EXPECT_EQ(v->stored_path, "model.layers.1.self_attn.qkv_proj");
    EXPECT_EQ(v->row_begin, 128 + 64);
    EXPECT_EQ((*got)->find_module("model.layers.1.self_attn.qkv_proj")->N, 256);
  }
}

TEST(Checkpoint, StackedProjectionsAreCheckedAsOne) {
  const QuantSpec spec{4, 32, DType::bf16};
  {
    TinyModel model = stacked_model(spec);
    model.config.set("tie_word_embeddings", true);
    model.add_matrix("model.layers.0.mlp.gate_up_proj", 160, 128, spec);
    expect_error(open(model), Errc::corrupt_file, "gate_up_proj.weight", "[160, 16]", "[320, 16]");
    model.remove("model.layers.0.mlp.gate_up_proj.weight");
    expect_error(open(model), Errc::corrupt_file, "gate_up_proj.weight' is missing");
  }
  {
    TinyModel model = stacked_model(spec);  // stored at a width of its own
    model.config.set("tie_word_embeddings", true);
    model.add_matrix("model.layers.0.mlp.gate_up_proj", 320, 128, {6, 64, DType::f16});
    model.set_override("model.layers.0.mlp.gate_up_proj", TinyModel::spec_json(6, 64));
    const auto result = open(model);
    ASSERT_TRUE(result.has_value()) << result.error().message;
    const ModuleInfo* up = (*result)->find_module("model.layers.0.mlp.up_proj");
    EXPECT_EQ(up->spec, (QuantSpec{6, 64, DType::f16}));
    EXPECT_EQ(up->spec_source, "config quantization.model.layers.0.mlp.gate_up_proj");
  }
  {
    TinyModel model = stacked_model(spec);  // and one of its parts again
    model.config.set("tie_word_embeddings", true);
    model.add_matrix("model.layers.0.mlp.up_proj", 160, 128, spec);
    expect_error(open(model), Errc::corrupt_file, "gate_up_proj.weight", "up_proj.weight",
                 "both there");
  }
  // Either form for any model, biases included.
  TinyModel model = stacked_model(spec);
  model.config.set("model_type", "llama");
  model.config.set("mlp_bias", true);
  for (const char* layer : {"0", "1"}) {
    const std::string mlp = std::string("model.layers.") + layer + ".mlp.";
    model.add_vector(mlp + "gate_up_proj.bias", 320, DType::f32);
    model.add_vector(mlp + "down_proj.bias", 128, DType::f32);
  }
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  const auto whole = (*result)->float_tensor("model.layers.1.mlp.gate_up_proj.bias");
  const auto up = (*result)->linear_bias("model.layers.1.mlp.up_proj");
  ASSERT_TRUE(up.has_value());
  EXPECT_EQ(*up, std::vector<float>(whole->begin() + 160, whole->end()));
  EXPECT_TRUE((*result)->linear_bias("model.layers.1.self_attn.q_proj")->empty());
  expect_error((*result)->linear_bias("model.layers.1.mlp"), Errc::invalid_argument, "no module");
}

TEST(Checkpoint, AModuleThatConfigDoesNotNameHasTheFormatOfItsShapes) {
  TinyModel model;
  model.add_matrix(kGate, 160, 128, {6, 128, DType::f16});
  model.add_matrix("model.layers.1.mlp.down_proj", 128, 160, {3, 32, DType::f32});
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->find_module(kGate)->spec, (QuantSpec{6, 128, DType::f16}));
  EXPECT_EQ((*result)->find_module(kGate)->spec_source, "tensor shapes");
  EXPECT_EQ((*result)->find_module("model.layers.1.mlp.down_proj")->spec,
            (QuantSpec{3, 32, DType::f32}));
  EXPECT_EQ((*result)->find_module("model.layers.0.mlp.up_proj")->spec_source,
            "config quantization");
  ASSERT_EQ((*result)->warnings().size(), 1u);
  EXPECT_NE(all_warnings(**result).find("shapes of 2 modules"), std::string::npos);
  EXPECT_NE(all_warnings(**result).find(kGate), std::string::npos);
  // No width has these shapes.
  model.tensor(std::string(kGate) + ".weight").shape = {160, 28};
  model.tensor(std::string(kGate) + ".weight").bytes.resize(160 * 28 * 4);
  expect_error(open(model), Errc::corrupt_file, "gate_proj.weight", "[160, 28]");
}

TEST(Checkpoint, ScalesOfEveryTypeSideBySide) {
  TinyModel model;
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  for (int i = 0; i < 3; ++i) {
    const char* names[] = {"q_proj", "k_proj", "v_proj"};
    model.add_matrix(std::string("model.layers.0.self_attn.") + names[i], i == 0 ? 128 : 64, 128,
                     {4, 32, types[i]});
  }
  model.add_vector("model.norm.weight", 128, DType::f32);
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->find_module("model.layers.0.self_attn.q_proj")->spec.scale_dtype,
            DType::f32);
  EXPECT_EQ((*result)->find_module("model.layers.0.self_attn.k_proj")->spec.scale_dtype,
            DType::f16);
}

TEST(Checkpoint, NormsOfQueriesAndKeys) {
  TinyModel model;
  model.config.set("model_type", "qwen3");
  model.config.set("head_dim", 32);
  model.config.set("rope_theta", 1e6);
  model.config.set("max_position_embeddings", 512);
  expect_error(open(model), Errc::corrupt_file, "model.layers.0.self_attn.q_norm.weight",
               "missing");
  for (const char* layer : {"0", "1"}) {
    for (const char* norm : {"q_norm", "k_norm"}) {
      model.add_vector(std::string("model.layers.") + layer + ".self_attn." + norm + ".weight", 32,
                       DType::bf16);
    }
  }
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_TRUE((*result)->warnings().empty()) << all_warnings(**result);
  // The same tensors in a model without such norms would be left out of its answer.
  model.config.set("model_type", "llama");
  expect_error(open(model), Errc::corrupt_file, "model.layers.0.self_attn.k_norm.weight",
               "a llama model", "no such tensor");
}

TEST(Checkpoint, RefusesTensorsOfLayersThatTheConfigDoesNotHave) {
  TinyModel model;
  model.config.set("num_hidden_layers", 1);
  expect_error(open(model), Errc::corrupt_file, "model.layers.1.", "of 1 layers");
}

TEST(Checkpoint, AMissingHeadMayBeTheEmbedding) {
  TinyModel model;
  model.config.set("model_type", "minicpm");
  model.config.set("scale_emb", 12);
  model.config.set("scale_depth", 1.4);
  model.config.set("dim_model_base", 64);
  model.config.set("tie_word_embeddings", false);
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_TRUE((*result)->config().tie_word_embeddings);
  EXPECT_EQ((*result)->config().head_input_scale, 0.5);
  EXPECT_NE(all_warnings(**result).find("lm_head is missing"), std::string::npos);
  model.add_matrix("lm_head", TinyModel::kVocab, TinyModel::kHidden, {4, 32, DType::bf16});
  const auto own = open(model);
  ASSERT_TRUE(own.has_value()) << own.error().message;
  EXPECT_FALSE((*own)->config().tie_word_embeddings);
}

TEST(Checkpoint, RefusesAnotherExportersQuantizationFile) {
  const TempFolder folder;
  TinyModel model(QuantSpec::dense(DType::bf16));
  model.write(folder);
  folder.write("hf_quant_config.json", R"({"quantization": {"quant_algo": "NVFP4"}})");
  expect_error(Checkpoint::open(folder.path()), Errc::unsupported, "hf_quant_config.json",
               "ModelOpt");
}

TEST(Checkpoint, BothQuantizationEntries) {
  TinyModel model;
  model.config.set("quantization_config", *model.config.find("quantization"));
  const auto result = open(model);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_TRUE((*result)->warnings().empty());
  model.set_override(kGate, TinyModel::spec_json(6, 32));
  expect_error(open(model), Errc::corrupt_file, "config.json", "quantization_config differ", kGate);
}

TEST(Checkpoint, IgnoresRotaryTablesAndReportsOtherExtras) {
  TinyModel model;
  model.add_vector("model.layers.0.self_attn.rotary_emb.inv_freq", 16, DType::f32);
  auto result = open(model);
  ASSERT_TRUE(result.has_value());
  EXPECT_TRUE((*result)->warnings().empty()) << all_warnings(**result);
  for (int i = 0; i < 7; ++i) {
    model.add_vector("vision.tower." + std::to_string(i), 4, DType::f32);
  }
  result = open(model);
  ASSERT_TRUE(result.has_value());
  EXPECT_NE(all_warnings(**result).find("vision.tower.0"), std::string::npos);
  EXPECT_NE(all_warnings(**result).find("and 2 more"), std::string::npos);
}

TEST(Checkpoint, ShardsWithAndWithoutIndex) {
  for (const bool with_index : {true, false}) {
    const TempFolder folder;
    TinyModel model;
    model.write_shards(folder, 3, with_index);
    const auto result = Checkpoint::open(folder.path());
    ASSERT_TRUE(result.has_value()) << result.error().message;
    EXPECT_EQ((*result)->tensors().size(), model.tensors.size());
    std::filesystem::remove(folder.file(TinyModel::shard_name(1, 3)));
    expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file,
                 "model-00002-of-00003.safetensors is missing");
  }
}

TEST(Checkpoint, IndexMustAgreeWithShards) {
  const TempFolder folder;
  TinyModel model;
  model.write_shards(folder, 3, true);
  const std::string second = model.tensors[1].name;
  // One tensor less in its shard, still in the index.
  std::vector<test::TinyTensor> part;
  for (std::size_t i = 4; i < model.tensors.size(); i += 3) part.push_back(model.tensors[i]);
  folder.write(TinyModel::shard_name(1, 3), TinyModel::safetensors(part));
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, second,
               "model-00002-of-00003.safetensors");
  // The index absent: completeness against config.json.
  std::filesystem::remove(folder.file("model.safetensors.index.json"));
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, second);

  const TempFolder other;
  model.write_shards(other, 2, false);
  folder.write("model.safetensors.index.json", "{}");
  other.write("model.safetensors.index.json",
              R"({"weight_map": {"ghost.weight": "model-00001-of-00002.safetensors"}})");
  expect_error(Checkpoint::open(other.path()), Errc::corrupt_file, "'ghost.weight'");
  other.write("model.safetensors.index.json",
              R"({"weight_map": {"x": "../model-00001-of-00002.safetensors"}})");
  expect_error(Checkpoint::open(other.path()), Errc::corrupt_file, "needs the name of");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "weight_map");
}

TEST(Checkpoint, RefusesATensorInTwoFiles) {
  const TempFolder folder;
  TinyModel model;
  model.write(folder);
  folder.write("model-extra.safetensors", TinyModel::safetensors({model.tensors[0]}));
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, model.tensors[0].name,
               "model.safetensors", "model-extra.safetensors");
}

TEST(Checkpoint, UnalignedDataGiveTheSameBits) {
  TinyModel model;
  const auto plain = open(model);
  ASSERT_TRUE(plain.has_value());
  model.tensors.insert(model.tensors.begin(), {"aaa", "U8", {1}, "x"});
  const auto odd = open(model);
  ASSERT_TRUE(odd.has_value()) << odd.error().message;
  for (const ModuleInfo& info : (*plain)->modules()) {
    const auto a = (*plain)->weight(info.path);
    const auto b = (*odd)->weight(info.path);
    std::vector<float> decoded_a(static_cast<std::size_t>(info.N * info.K));
    std::vector<float> decoded_b = decoded_a;
    ASSERT_TRUE(dequantize(*a, 0, info.N, DType::bf16, decoded_a).has_value());
    ASSERT_TRUE(dequantize(*b, 0, info.N, DType::bf16, decoded_b).has_value());
    EXPECT_EQ(decoded_a, decoded_b) << info.path;
  }
  EXPECT_EQ(*(*plain)->float_tensor("model.norm.weight"),
            *(*odd)->float_tensor("model.norm.weight"));
}

TEST(Checkpoint, ReadsGenerationConfig) {
  const TempFolder folder;
  TinyModel().write(folder);
  folder.write("generation_config.json", R"({"eos_token_id": [2, 3]})");
  const auto result = Checkpoint::open(folder.path());
  ASSERT_TRUE(result.has_value()) << result.error().message;
  EXPECT_EQ((*result)->config().eos_token_ids, (std::vector<std::int32_t>{2, 3}));
  folder.write("generation_config.json", "<html>");
  expect_error(Checkpoint::open(folder.path()), Errc::corrupt_file, "generation_config.json");
}

}  // namespace
}  // namespace qmlp
