#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "qmlp/status.h"
#include "text/file_reader.h"
#include "text/regex.h"

namespace qmlp::text {

// A piece of text on its way through the tokenizer.
struct Piece {
  std::string text;       // valid UTF-8
  bool at_start = false;  // its first character is the first of the whole text
};

// Rewrites text before it is cut into words: the steps of a tokenizer.json's normalizer in order.
class Normalizer {
 public:
  using Step = std::function<Status(Piece&, RegexScratch&)>;

  void add(Step step) { steps_.push_back(std::move(step)); }
  bool empty() const noexcept { return steps_.empty(); }
  Status run(Piece& piece, RegexScratch& scratch) const;

 private:
  std::vector<Step> steps_;
};

// Reads the member "normalizer", which may be null. What is not understood is refused by name.
Result<Normalizer> read_normalizer(const FileReader& reader, const Json* value);

}  // namespace qmlp::text
