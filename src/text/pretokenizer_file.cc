#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "text/pretokenizer.h"
#include "text/quote.h"
#include "text/regex_syntax.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::size_t kMaxSteps = 32;  // bounds the recursion over them

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class Steps {
 public:
  explicit Steps(const FileReader& reader) : reader_(reader) {}

  Result<PreTokenizer> read(const Json* value) {
    std::vector<const Json*> steps;
    if (value != nullptr && !value->is_null()) {
      QMLP_TRY(flatten(*value, 0, steps));
    }
    if (steps.size() > kMaxSteps) {
      return reader_.unsupported(concat("pre_tokenizer: it has ", steps.size(), " steps, at most ",
                                        kMaxSteps, " are supported"));
    }
    for (std::size_t i = 0; i < steps.size(); ++i) {
      QMLP_ASSIGN(const std::string type, reader_.string(*steps[i], "pre_tokenizer", "type", ""));
      // After it pieces are in the byte-level alphabet, which nothing else is written for.
      if (type == "ByteLevel" && i + 1 < steps.size()) {
        return reader_.unsupported(concat("pre_tokenizer: its step ", i + 1,
                                          " is 'ByteLevel', which is supported only as the last"));
      }
      QMLP_TRY(step(*steps[i], type));
    }
    return std::move(out_);
  }

 private:
  Status flatten(const Json& value, int depth, std::vector<const Json*>& steps) const {
    if (value.object() == nullptr) {
      return reader_.corrupt(
          concat("pre_tokenizer: a step is ", value.kind_name(), ", an object is required"));
    }
    const Json* type = value.find("type");
    if (type == nullptr || type->string() == nullptr || *type->string() != "Sequence") {
      steps.push_back(&value);
      return {};
    }
    if (depth == 8) return reader_.unsupported("pre_tokenizer: Sequences are nested too deep");
    QMLP_ASSIGN(const JsonArray* list, reader_.array(value, "pre_tokenizer", "pretokenizers"));
    for (const Json& element : *list) QMLP_TRY(flatten(element, depth + 1, steps));
    return {};
  }

  Status step(const Json& value, const std::string& type) {
    if (type == "ByteLevel") return byte_level(value);
    if (type == "Metaspace") return metaspace(value);
    if (type == "Split") return split(value);
    if (type == "Digits") {
      QMLP_ASSIGN(const bool individual, reader_.flag(value, "Digits", "individual_digits", false));
      const std::string digit = "[" + digits_class() + "]";
      return add(individual ? digit : digit + "+", SplitBehavior::isolated);
    }
    if (type == "Punctuation") {
      QMLP_ASSIGN(const SplitBehavior behavior, read_behavior(value, "Punctuation", "Isolated"));
      return add(punctuation_pattern(), behavior);
    }
    if (type == "Whitespace") {
      const std::string word = word_class();
      const std::string space = space_class();
      // What is neither is dropped.
      return add("[" + word + "]+|[^" + word + space + "]+", SplitBehavior::removed, true);
    }
    if (type == "WhitespaceSplit") return add("[" + space_class() + "]", SplitBehavior::removed);
    return reader_.unsupported(concat("pre_tokenizer ", quote(type), " is not supported"));
  }

  // A pattern of our own, in PCRE2's syntax.
  Status add(const std::string& pattern, SplitBehavior behavior, bool invert = false) {
    Result<Regex> regex = Regex::compile(pattern);
    if (!regex) return reader_.within("pre_tokenizer", regex.error());
    out_.add(SplitStep{*std::move(regex), behavior, invert, false});
    return {};
  }

  Status byte_level(const Json& value) {
    QMLP_ASSIGN(const bool use_regex, reader_.flag(value, "ByteLevel", "use_regex", true));
    QMLP_ASSIGN(const bool prefix_space,
                reader_.flag(value, "ByteLevel", "add_prefix_space", true));
    out_.set_byte_level();
    if (!use_regex) {
      out_.set_prefix_space(prefix_space);
      return {};
    }
    QMLP_ASSIGN(SplitStep split, make_split(kGpt2Pattern, false));
    split.prefix_space = prefix_space;
    out_.add(std::move(split));
    return {};
  }

  Status metaspace(const Json& value) {
    Result<MetaspaceStep> step = read_metaspace(reader_, value, "pre_tokenizer");
    if (!step) return step.error();
    out_.add(*std::move(step));
    return {};
  }

  Result<SplitBehavior> read_behavior(const Json& value, std::string_view where,
                                      std::string_view otherwise) const {
    static constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {
        {"Removed", SplitBehavior::removed},
        {"Isolated", SplitBehavior::isolated},
        {"MergedWithPrevious", SplitBehavior::merged_with_previous},
        {"MergedWithNext", SplitBehavior::merged_with_next},
        {"Contiguous", SplitBehavior::contiguous},
    };
    QMLP_ASSIGN(const std::string behavior, reader_.string(value, where, "behavior", otherwise));
    const auto* known = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                     [&](const auto& entry) { return entry.first == behavior; });
    if (known == std::end(kBehaviors)) {
      return reader_.unsupported(
          concat(where, ".behavior is ", quote(behavior), ", which is not known"));
    }
    return known->second;
  }

  Status split(const Json& value) {
    const Json* pattern = value.find("pattern");
    const Json* regex = pattern != nullptr ? pattern->find("Regex") : nullptr;
    const Json* literal = pattern != nullptr ? pattern->find("String") : nullptr;
    const Json* source = regex != nullptr ? regex : literal;
    if (source == nullptr || source->string() == nullptr || source->string()->empty()) {
      return reader_.corrupt("Split.pattern holds no text 'Regex' or 'String'");
    }
    QMLP_ASSIGN(SplitStep step, make_split(*source->string(), regex == nullptr));
    QMLP_ASSIGN(step.invert, reader_.flag(value, "Split", "invert", false));
    QMLP_ASSIGN(step.behavior, read_behavior(value, "Split", ""));
    out_.add(std::move(step));
    return {};
  }

  Result<SplitStep> make_split(std::string_view pattern, bool is_literal) const {
    Result<Regex> regex =
        is_literal ? Regex::literal(std::string(pattern)) : compile_pattern(pattern);
    if (!regex) {
      return reader_.within(concat("pre_tokenizer pattern ", quote(pattern)), regex.error());
    }
    return SplitStep{*std::move(regex)};
  }

  const FileReader& reader_;
  PreTokenizer out_;
};

}  // namespace

Result<PreTokenizer> read_pre_tokenizer(const FileReader& reader, const Json* value) {
  return Steps(reader).read(value);
}

Result<MetaspaceStep> read_metaspace(const FileReader& reader, const Json& value,
                                     std::string_view where) {
  using Prepend = MetaspaceStep::Prepend;
  static constexpr std::pair<std::string_view, Prepend> kSchemes[] = {
      {"always", Prepend::always}, {"first", Prepend::first}, {"never", Prepend::never}};
  MetaspaceStep out;
  QMLP_ASSIGN(out.mark, reader.string(value, "Metaspace", "replacement", ""));
  if (out.mark.empty() || first_utf8_unit(out.mark).length != out.mark.size()) {
    return reader.corrupt(concat(where, ": Metaspace.replacement is ", quote(out.mark),
                                 ", one character is required"));
  }
  QMLP_ASSIGN(const std::string scheme, reader.string(value, "Metaspace", "prepend_scheme", ""));
  const auto* known = std::find_if(std::begin(kSchemes), std::end(kSchemes),
                                   [&](const auto& entry) { return entry.first == scheme; });
  if (!scheme.empty() && known == std::end(kSchemes)) {
    return reader.unsupported(
        concat(where, ": Metaspace.prepend_scheme is ", quote(scheme), ", which is not known"));
  }
  // Older files have add_prefix_space alone, or beside the scheme.
  QMLP_ASSIGN(const bool prefix, reader.flag(value, "Metaspace", "add_prefix_space", true));
  out.prepend = !scheme.empty() ? known->second : prefix ? Prepend::always : Prepend::never;
  if (!prefix && out.prepend != Prepend::never) {
    return reader.corrupt(concat(where, ": Metaspace.add_prefix_space is false, prepend_scheme is ",
                                 quote(scheme), ": they contradict each other"));
  }
  QMLP_ASSIGN(out.split, reader.flag(value, "Metaspace", "split", true));
  return out;
}

}  // namespace qmlp::text
