#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "qmlp/status.h"
#include "text/file_reader.h"
#include "text/regex.h"

namespace qmlp::text {

// What becomes of the matches of a splitting pattern, in Hugging Face's terms.
enum class SplitBehavior : std::uint8_t {
  removed,
  isolated,
  merged_with_previous,
  merged_with_next,
  contiguous,
};

struct SplitStep {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;        // what the pattern leaves over counts as the match
  bool prefix_space = false;  // before matching, puts a space before a piece without one
};

// SentencePiece's word starts: spaces become a mark, and a piece without one at its start gets it.
struct MetaspaceStep {
  enum class Prepend : std::uint8_t { never, first, always };
  std::string mark;
  Prepend prepend = Prepend::always;  // first: only at the start of the whole text
  bool split = true;                  // cuts before each mark
};

// Cuts text into words. Each step sees every piece of the step before it as a text of its own.
class PreTokenizer {
 public:
  using Sink = std::function<void(std::string_view)>;

  void add(SplitStep step) { steps_.emplace_back(std::move(step)); }
  void add(MetaspaceStep step) { steps_.emplace_back(std::move(step)); }
  // The last thing done to each piece.
  void set_prefix_space(bool on) { prefix_space_ = on; }
  // Words are bytes of a byte-level vocabulary, not its characters.
  void set_byte_level() { byte_level_ = true; }
  bool byte_level() const noexcept { return byte_level_; }

  // Hands the words of valid UTF-8 text to `sink` in order. `at_start`: the text is the start of
  // the whole text.
  Status run(std::string_view text, bool at_start, RegexScratch& scratch, const Sink& sink) const;

 private:
  Status step(std::size_t index, std::string_view piece, bool at_start, RegexScratch& scratch,
              const Sink& sink) const;
  Status split(const SplitStep& split, std::size_t index, std::string_view piece, bool at_start,
               RegexScratch& scratch, const Sink& sink) const;
  Status mark_spaces(const MetaspaceStep& metaspace, std::size_t index, std::string_view piece,
                     bool at_start, RegexScratch& scratch, const Sink& sink) const;

  std::vector<std::variant<SplitStep, MetaspaceStep>> steps_;
  bool prefix_space_ = false;
  bool byte_level_ = false;
};

// Reads the member "pre_tokenizer", which may be null. What is not understood is refused by name.
Result<PreTokenizer> read_pre_tokenizer(const FileReader& reader, const Json* value);
// Reads a Metaspace step of the pre-tokenizer or of the decoder (`where`).
Result<MetaspaceStep> read_metaspace(const FileReader& reader, const Json& value,
                                     std::string_view where);

}  // namespace qmlp::text
