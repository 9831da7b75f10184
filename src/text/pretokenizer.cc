#include "text/pretokenizer.h"

#include <algorithm>
#include <utility>

namespace qmlp::text {
namespace {

struct Span {
  std::size_t begin;
  std::size_t end;
  bool is_match;
};

// Joins each match (`first_is_match`) or non-match with the span after it, as merged_with_* ask.
void merge_pairs(std::vector<Span>& spans, bool with_previous) {
  if (!with_previous) std::reverse(spans.begin(), spans.end());
  std::vector<Span> merged;
  bool after_match = false;
  for (const Span& span : spans) {
    if (span.is_match && !after_match && !merged.empty()) {
      merged.back().begin = std::min(merged.back().begin, span.begin);
      merged.back().end = std::max(merged.back().end, span.end);
    } else {
      merged.push_back(span);
    }
    after_match = span.is_match;
  }
  if (!with_previous) std::reverse(merged.begin(), merged.end());
  spans = std::move(merged);
}

void merge_runs(std::vector<Span>& spans) {
  std::vector<Span> merged;
  for (const Span& span : spans) {
    if (!merged.empty() && merged.back().is_match == span.is_match) {
      merged.back().end = span.end;
    } else {
      merged.push_back(span);
    }
  }
  spans = std::move(merged);
}

}  // namespace

Status PreTokenizer::run(std::string_view text, RegexScratch& scratch, const Sink& sink) const {
  if (text.empty()) return {};
  return step(0, text, scratch, sink);
}

Status PreTokenizer::step(std::size_t index, std::string_view piece, RegexScratch& scratch,
                          const Sink& sink) const {
  std::string prefixed;
  const bool prefix = index < steps_.size() ? steps_[index].prefix_space : prefix_space_;
  if (prefix && piece.front() != ' ') {
    prefixed.reserve(piece.size() + 1);
    prefixed += ' ';
    prefixed += piece;
    piece = prefixed;
  }
  if (index == steps_.size()) {
    sink(piece);
    return {};
  }
  const SplitStep& split = steps_[index];
  const auto pass_on = [&](const Span& span) {
    return step(index + 1, piece.substr(span.begin, span.end - span.begin), scratch, sink);
  };
  // The common behaviour needs no list of the spans.
  const bool direct = split.behavior == SplitBehavior::isolated;
  std::vector<Span> spans;
  const auto found = [&](std::size_t begin, std::size_t end, bool is_match) -> Status {
    if (begin == end) return {};
    const Span span{begin, end, is_match != split.invert};
    if (direct) return pass_on(span);
    spans.push_back(span);
    return {};
  };
  for (std::size_t at = 0; at < piece.size();) {
    const Result<Match> match = split.pattern.find(piece, at, scratch);
    if (!match) return match.error();
    const std::size_t begin = match->found ? match->begin : piece.size();
    if (Status status = found(at, begin, false); !status) return status;
    if (!match->found) break;
    if (Status status = found(begin, match->end, true); !status) return status;
    at = match->end;
  }
  switch (split.behavior) {
    case SplitBehavior::isolated:
      return {};
    case SplitBehavior::removed:
      std::erase_if(spans, [](const Span& span) { return span.is_match; });
      break;
    case SplitBehavior::merged_with_previous:
      merge_pairs(spans, true);
      break;
    case SplitBehavior::merged_with_next:
      merge_pairs(spans, false);
      break;
    case SplitBehavior::contiguous:
      merge_runs(spans);
      break;
  }
  for (const Span& span : spans) {
    if (Status status = pass_on(span); !status) return status;
  }
  return {};
}

}  // namespace qmlp::text
