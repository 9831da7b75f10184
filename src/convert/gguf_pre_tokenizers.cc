#include "convert/gguf_pre_tokenizers.h"

#include "base/concat.h"

namespace qmlp {
namespace {

constexpr const char* kLlama3Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kTekkenRegex =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
    R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kGpt4oRegex =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Columns: name, regex, digits, nfc, ignore_merges, adds_bos.
constexpr PreTokenizer kPreTokenizers[] = {
    {"gpt-2", nullptr, false, false, false, false},
    {"default", nullptr, false, false, false, false},
    {"phi-2", nullptr, false, false, false, false},
    {"smollm", nullptr, true, false, false, false},
    {"starcoder", nullptr, true, false, false, false},
    {"refact", nullptr, true, false, false, false},  // granite 3
    {"llama-bpe", kLlama3Regex, false, false, true, true},
    {"llama3", kLlama3Regex, false, false, true, true},
    {"llama-v3", kLlama3Regex, false, false, true, true},
    {"smaug-bpe", kLlama3Regex, false, false, false, false},  // SmolLM3
    {"dbrx", kLlama3Regex, false, false, false, false},       // phi-4, granite 4
    {"qwen2", kQwen2Regex, false, true, false, false},
    {"deepseek-r1-qwen", kQwen2Regex, false, true, false, false},
    {"tekken", kTekkenRegex, false, false, true, true},
    {"gpt-4o", kGpt4oRegex, false, false, false, false},  // phi-4-mini
};

}  // namespace

Json json_object(std::initializer_list<std::pair<const char*, Json>> members) {
  JsonObject out;
  for (const auto& [name, value] : members) out.append(name, value);
  return Json(std::move(out));
}

const PreTokenizer* find_pre_tokenizer(std::string_view name) noexcept {
  for (const PreTokenizer& pre : kPreTokenizers) {
    if (pre.name == name) return &pre;
  }
  return nullptr;
}

std::string known_pre_tokenizers() {
  std::string out;
  for (const PreTokenizer& pre : kPreTokenizers) out += concat(out.empty() ? "" : ", ", pre.name);
  return out;
}

Json byte_level_json(bool add_prefix_space, bool use_regex) {
  return json_object({{"type", "ByteLevel"},
                      {"add_prefix_space", add_prefix_space},
                      {"trim_offsets", true},
                      {"use_regex", use_regex}});
}

Json pre_tokenizer_json(const PreTokenizer& pre) {
  if (pre.split_regex == nullptr && !pre.digits) return byte_level_json(false, true);
  JsonArray steps;
  if (pre.digits) steps.push_back(json_object({{"type", "Digits"}, {"individual_digits", true}}));
  if (pre.split_regex != nullptr) {
    steps.push_back(json_object({{"type", "Split"},
                                 {"pattern", json_object({{"Regex", pre.split_regex}})},
                                 {"behavior", "Isolated"},
                                 {"invert", false}}));
  }
  steps.push_back(byte_level_json(false, pre.split_regex == nullptr));
  return json_object({{"type", "Sequence"}, {"pretokenizers", Json(std::move(steps))}});
}

}  // namespace qmlp
