#include "text/pretokenizer.h"

#include <algorithm>
#include <utility>

#include "base/try.h"

namespace qmlp::text {
namespace {

struct Span {
  std::size_t begin;
  std::size_t end;
  bool is_match;
};

// Joins each match with the span before it, or after it, as merged_with_* ask.
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

std::string with_prefix(std::string_view prefix, std::string_view text) {
  std::string out;
  out.reserve(prefix.size() + text.size());
  out += prefix;
  out += text;
  return out;
}

}  // namespace

Status PreTokenizer::run(std::string_view text, bool at_start, RegexScratch& scratch,
                         const Sink& sink) const {
  if (text.empty()) return {};
  return step(0, text, at_start, scratch, sink);
}

Status PreTokenizer::step(std::size_t index, std::string_view piece, bool at_start,
                          RegexScratch& scratch, const Sink& sink) const {
  if (index == steps_.size()) {
    if (prefix_space_ && piece.front() != ' ') {
      sink(with_prefix(" ", piece));
    } else {
      sink(piece);
    }
    return {};
  }
  if (const auto* metaspace = std::get_if<MetaspaceStep>(&steps_[index])) {
    return mark_spaces(*metaspace, index, piece, at_start, scratch, sink);
  }
  const auto& pattern = *std::get_if<SplitStep>(&steps_[index]);
  if (pattern.prefix_space && piece.front() != ' ') {
    return split(pattern, index, with_prefix(" ", piece), at_start, scratch, sink);
  }
  return split(pattern, index, piece, at_start, scratch, sink);
}

Status PreTokenizer::mark_spaces(const MetaspaceStep& metaspace, std::size_t index,
                                 std::string_view piece, bool at_start, RegexScratch& scratch,
                                 const Sink& sink) const {
  using Prepend = MetaspaceStep::Prepend;
  const std::string& mark = metaspace.mark;
  const bool prepend =
      metaspace.prepend == Prepend::always || (metaspace.prepend == Prepend::first && at_start);
  std::string marked;
  marked.reserve(piece.size() + piece.size() / 2 + mark.size());
  if (prepend && piece.front() != ' ' && !piece.starts_with(mark)) marked += mark;
  for (const char c : piece) {
    if (c == ' ') {
      marked += mark;
    } else {
      marked += c;
    }
  }
  const std::string_view rest = marked;
  std::size_t begin = 0;
  while (metaspace.split) {
    const std::size_t end = rest.find(mark, begin + 1);
    if (end == std::string_view::npos) break;
    QMLP_TRY(
        step(index + 1, rest.substr(begin, end - begin), at_start && begin == 0, scratch, sink));
    begin = end;
  }
  return step(index + 1, rest.substr(begin), at_start && begin == 0, scratch, sink);
}

Status PreTokenizer::split(const SplitStep& split, std::size_t index, std::string_view piece,
                           bool at_start, RegexScratch& scratch, const Sink& sink) const {
  const auto pass_on = [&](const Span& span) {
    return step(index + 1, piece.substr(span.begin, span.end - span.begin),
                at_start && span.begin == 0, scratch, sink);
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
