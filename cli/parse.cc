#include "parse.h"

#include <charconv>
#include <cmath>

#include "context.h"

namespace qmlp::cli {
namespace {

[[noreturn]] void refuse(std::string_view name, std::string_view text, std::string_view need) {
  std::string shown(text.substr(0, 60));
  if (text.size() > 60) shown += "...";
  fail_usage(std::string(name) + ": \"" + shown + "\" is not " + std::string(need));
}

}  // namespace

std::int64_t parse_int(std::string_view name, std::string_view text, std::int64_t min,
                       std::int64_t max) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < min || value > max) {
    const std::string low = std::to_string(min);
    refuse(name, text,
           max == std::numeric_limits<std::int64_t>::max()
               ? "a whole number of at least " + low
               : "a whole number from " + low + " to " + std::to_string(max));
  }
  return value;
}

double parse_double(std::string_view name, std::string_view text, double min, double max) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= min && value <= max)) {
    const auto number = [](double v) {
      std::string shown = std::to_string(v);
      shown.erase(shown.find_last_not_of('0') + 1);
      if (shown.back() == '.') shown.pop_back();
      return shown;
    };
    refuse(name, text,
           max > 1e300 ? "a number of at least " + number(min)
                       : "a number from " + number(min) + " to " + number(max));
  }
  return value;
}

bool parse_switch(std::string_view name, std::string_view text) {
  if (text == "0") return false;
  if (text == "1") return true;
  refuse(name, text, "0 or 1");
}

std::size_t parse_choice(std::string_view name, std::string_view text,
                         std::span<const std::string_view> choices) {
  std::string list;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (text == choices[i]) return i;
    if (i > 0) list += i + 1 == choices.size() ? " or " : ", ";
    list += choices[i];
  }
  refuse(name, text, list);
}

DType parse_dtype(std::string_view name, std::string_view text) {
  constexpr std::string_view kNames[] = {"f32", "f16", "bf16"};
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
  return kTypes[parse_choice(name, text, kNames)];
}

Precision parse_precision(std::string_view name, std::string_view text) {
  constexpr std::string_view kNames[] = {"match", "wide"};
  return parse_choice(name, text, kNames) == 0 ? Precision::match : Precision::wide;
}

AccumulationChoice parse_accumulation(std::string_view name, std::string_view text) {
  constexpr std::string_view kNames[] = {"f32",      "tensor",   "tensor/1",
                                         "tensor/2", "tensor/4", "tensor/8"};
  constexpr int kSegments[] = {0, 0, 1, 2, 4, 8};
  const std::size_t choice = parse_choice(name, text, kNames);
  return {choice == 0 ? Accumulation::f32 : Accumulation::tensor, kSegments[choice]};
}

std::string_view parse_isa(std::string_view name, std::string_view text) {
  static constexpr std::string_view kNames[] = {"portable", "avx2", "avx512"};
  return kNames[parse_choice(name, text, kNames)];
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::vector<std::int64_t> parse_int_list(std::string_view name, std::string_view text,
                                         std::int64_t min, std::int64_t max) {
  std::vector<std::int64_t> values;
  for (const std::string_view part : split(text, ',')) {
    values.push_back(parse_int(name, part, min, max));
  }
  return values;
}

std::vector<std::int32_t> parse_token_ids(std::string_view name, std::string_view text,
                                          std::int64_t vocab_size) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const auto trim = [&](std::string_view part) {
    const std::size_t begin = part.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return std::string_view();
    return part.substr(begin, part.find_last_not_of(kBlanks) - begin + 1);
  };
  text = trim(text);
  if (text.size() >= 2 && text.front() == '[' && text.back() == ']') {
    text = trim(text.substr(1, text.size() - 2));
  }
  std::vector<std::int32_t> ids;
  while (!text.empty()) {
    const std::size_t end = text.find_first_of(", \t\r\n");
    const std::string_view part = text.substr(0, end);
    ids.push_back(static_cast<std::int32_t>(parse_int(name, part, 0, vocab_size - 1)));
    if (end == std::string_view::npos) break;
    text = trim(text.substr(end));
    if (text.starts_with(',')) {
      text = trim(text.substr(1));
      if (text.empty()) refuse(name, ",", "followed by a token id");
    }
  }
  return ids;
}

}  // namespace qmlp::cli
