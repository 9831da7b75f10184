#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "qmlp/status.h"

namespace qmlp::text {

struct Match {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool found = false;
};

// Working memory of one thread's matching, for any number of patterns.
class RegexScratch {
 public:
  // Texts up to that size will be searched.
  static Result<RegexScratch> make(std::size_t text_bytes);
  RegexScratch(RegexScratch&&) noexcept;
  RegexScratch& operator=(RegexScratch&&) noexcept;
  ~RegexScratch();

 private:
  friend class Regex;
  struct Impl;
  explicit RegexScratch(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

// A compiled pattern; immutable and safe to share between threads.
class Regex {
 public:
  // A pattern in PCRE2's syntax. Refused if it can match empty text.
  static Result<Regex> compile(const std::string& pcre2_pattern);
  // Finds that text itself.
  static Result<Regex> literal(const std::string& text);

  // The first match that begins at or after `from` in valid UTF-8. Time is linear in what it
  // scans for patterns that do not backtrack over backtracking; fails past a bound on the steps.
  Result<Match> find(std::string_view text, std::size_t from, RegexScratch& scratch) const;

 private:
  static Result<Regex> build(const std::string& pattern, std::uint32_t options);
  std::shared_ptr<const void> code_;
};

}  // namespace qmlp::text
