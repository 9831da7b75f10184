#include "convert/patterns.h"

#include <gtest/gtest.h>

#include "io/temp_folder.h"

namespace qmlp {
namespace {

using test::expect_error;

TEST(QuantPatterns, ReadsTheCommandLineForm) {
  const auto patterns = parse_quant_patterns("gate=4, up=8,down=6/32,layers.0.*=8/128,3");
  ASSERT_TRUE(patterns.has_value()) << patterns.error().message;
  ASSERT_EQ(patterns->size(), 5u);
  EXPECT_EQ((*patterns)[0].pattern, "gate");
  EXPECT_EQ((*patterns)[0].bits, 4);
  EXPECT_EQ((*patterns)[0].group_size, 0);
  EXPECT_EQ((*patterns)[2].bits, 6);
  EXPECT_EQ((*patterns)[2].group_size, 32);
  EXPECT_EQ((*patterns)[3].pattern, "layers.0.*");
  EXPECT_EQ((*patterns)[3].group_size, 128);
  EXPECT_EQ((*patterns)[4].pattern, "*");
  EXPECT_EQ((*patterns)[4].bits, 3);
}

TEST(QuantPatterns, RefusesWhatItDoesNotKnow) {
  expect_error(parse_quant_patterns("gates=4"), Errc::invalid_argument, "gates", "gate, up");
  expect_error(parse_quant_patterns("gate=7"), Errc::invalid_argument, "gate=7", "bits: 7");
  expect_error(parse_quant_patterns("gate=4/48"), Errc::invalid_argument, "group_size: 48");
  expect_error(parse_quant_patterns("gate=4/0"), Errc::invalid_argument, "gate=4/0");
  expect_error(parse_quant_patterns("gate=4x"), Errc::invalid_argument, "BITS");
  expect_error(parse_quant_patterns("gate="), Errc::invalid_argument, "BITS");
  expect_error(parse_quant_patterns("=4"), Errc::invalid_argument, "no module");
  expect_error(parse_quant_patterns(""), Errc::invalid_argument, "empty");
  expect_error(parse_quant_patterns("gate=4,,up=8"), Errc::invalid_argument, "empty");
}

TEST(QuantPatterns, MatchesNamesAndPaths) {
  const auto match = [](const char* pattern, const char* path) {
    return matches({pattern, 4, 0}, path);
  };
  EXPECT_TRUE(match("gate", "model.layers.3.mlp.gate_proj"));
  EXPECT_FALSE(match("gate", "model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(match("o", "model.layers.3.self_attn.o_proj"));
  EXPECT_TRUE(match("embed", "model.embed_tokens"));
  EXPECT_TRUE(match("head", "lm_head"));
  EXPECT_TRUE(match("layers.0.*", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(match("layers.0.*", "model.layers.10.mlp.gate_proj"));
  EXPECT_TRUE(match("model.layers.0.*", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(match("*.mlp.*", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(match("*", "lm_head"));
  EXPECT_TRUE(match("*gate*proj", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(match("*gate*projx", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(match("mlp.gate_proj", "model.layers.0.mlp.gate_proj"));
}

}  // namespace
}  // namespace qmlp
