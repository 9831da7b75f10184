#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "qmlp/status.h"
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

// Cuts text into words. Each step sees every piece of the step before it as a text of its own.
class PreTokenizer {
 public:
  using Sink = std::function<void(std::string_view)>;

  void add(SplitStep step) { steps_.push_back(std::move(step)); }
  // The last thing done to each piece.
  void set_prefix_space(bool on) { prefix_space_ = on; }

  // Hands the words of valid UTF-8 text to `sink` in order.
  Status run(std::string_view text, RegexScratch& scratch, const Sink& sink) const;

 private:
  Status step(std::size_t index, std::string_view piece, RegexScratch& scratch,
              const Sink& sink) const;

  std::vector<SplitStep> steps_;
  bool prefix_space_ = false;
};

}  // namespace qmlp::text
