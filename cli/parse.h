#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/types.h"

// Turns the text of options and variables into values. `name` is the option or variable that an
// error names; every function throws Exception (Errc::invalid_argument).
namespace qmlp::cli {

std::int64_t parse_int(std::string_view name, std::string_view text, std::int64_t min,
                       std::int64_t max = std::numeric_limits<std::int64_t>::max());
double parse_double(std::string_view name, std::string_view text, double min, double max);
bool parse_switch(std::string_view name, std::string_view text);  // "0" or "1"
// Index of `text` in `choices`.
std::size_t parse_choice(std::string_view name, std::string_view text,
                         std::span<const std::string_view> choices);

DType parse_dtype(std::string_view name, std::string_view text);
Precision parse_precision(std::string_view name, std::string_view text);
struct AccumulationChoice {
  Accumulation accumulation = Accumulation::f32;
  int segments = 0;  // of tensor; 0: the plan's choice
};
AccumulationChoice parse_accumulation(std::string_view name, std::string_view text);
std::string_view parse_isa(std::string_view name, std::string_view text);

// "1,2,3": whole numbers within [min, max], at least one.
std::vector<std::int64_t> parse_int_list(std::string_view name, std::string_view text,
                                         std::int64_t min, std::int64_t max);
// Token ids separated by commas, white space or both; brackets of a JSON array are allowed.
std::vector<std::int32_t> parse_token_ids(std::string_view name, std::string_view text,
                                          std::int64_t vocab_size);
std::vector<std::string_view> split(std::string_view text, char separator);

}  // namespace qmlp::cli
