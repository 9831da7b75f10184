#include "parse.h"

#include <gtest/gtest.h>

#include "context.h"

namespace qmlp::cli {
namespace {

template <class Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const Exception& error) {
    EXPECT_EQ(error.code(), Errc::invalid_argument);
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return "";
}

TEST(Parse, WholeNumbersAreWhole) {
  EXPECT_EQ(parse_int("-n", "0", 0), 0);
  EXPECT_EQ(parse_int("-n", "9223372036854775807", 0), 9223372036854775807);
  for (const char* text :
       {"", " 1", "1 ", "+1", "1.0", "0x10", "1e3", "9223372036854775808", "-1"}) {
    EXPECT_EQ(message_of([&] { parse_int("-n", text, 0); }),
              std::string("-n: \"") + text + "\" is not a whole number of at least 0");
  }
  EXPECT_EQ(message_of([] { parse_int("--x", "9", 1, 8); }),
            "--x: \"9\" is not a whole number from 1 to 8");
}

TEST(Parse, Numbers) {
  EXPECT_EQ(parse_double("--p", "0.25", 0.0, 1.0), 0.25);
  EXPECT_EQ(parse_double("--p", "1e-3", 0.0, 1.0), 1e-3);
  for (const char* text : {"", "nan", "inf", "1.01", "-0.1", "0.5x"}) {
    EXPECT_EQ(message_of([&] { parse_double("--p", text, 0.0, 1.0); }),
              std::string("--p: \"") + text + "\" is not a number from 0 to 1");
  }
}

TEST(Parse, Choices) {
  EXPECT_EQ(parse_dtype("--activations", "bf16"), DType::bf16);
  EXPECT_EQ(message_of([] { parse_dtype("--activations", "BF16"); }),
            "--activations: \"BF16\" is not f32, f16 or bf16");
  const AccumulationChoice choice = parse_accumulation("--accumulation", "tensor/4");
  EXPECT_EQ(choice.accumulation, Accumulation::tensor);
  EXPECT_EQ(choice.segments, 4);
  EXPECT_EQ(parse_accumulation("--accumulation", "tensor").segments, 0);
  EXPECT_TRUE(parse_switch("--fused", "1"));
  EXPECT_FALSE(parse_switch("--fused", "0"));
  message_of([] { parse_switch("--fused", "true"); });
}

TEST(Parse, LongTextIsCutInMessages) {
  const std::string message = message_of([] { parse_switch("--fused", std::string(1000, 'x')); });
  EXPECT_LT(message.size(), 120u);
}

TEST(Parse, TokenIds) {
  const std::vector<std::int32_t> expected = {1, 2, 30};
  for (const char* text : {"1,2,30", "[1, 2, 30]", " 1 2\n30\n", "1,\n2 , 30", "[ 1,2,30 ]\n"}) {
    EXPECT_EQ(parse_token_ids("--ids", text, 31), expected) << text;
  }
  EXPECT_TRUE(parse_token_ids("--ids", "[]", 31).empty());
  EXPECT_TRUE(parse_token_ids("--ids", " \n", 31).empty());
  for (const char* text : {"1,,2", "1,", ",1", "1;2", "[1", "31", "-1", "1.5"}) {
    message_of([&] { parse_token_ids("--ids", text, 31); });
  }
}

TEST(Parse, Lists) {
  EXPECT_EQ(parse_int_list("--m", "1,16,256", 1, 1024), (std::vector<std::int64_t>{1, 16, 256}));
  for (const char* text : {"", "1,", ",", "1,0", "1 2"}) {
    message_of([&] { parse_int_list("--m", text, 1, 1024); });
  }
}

}  // namespace
}  // namespace qmlp::cli
