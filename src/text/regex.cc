#include "text/regex.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace qmlp::text {
namespace {

// Backtracking steps for one match. Tokenizer patterns backtrack at most once over a run of
// characters, so the count follows the text's length; a pattern that explodes is stopped.
constexpr std::uint64_t kBaseSteps = 10'000'000;
constexpr std::uint64_t kStepsPerByte = 64;

std::string pcre2_message(int code) {
  unsigned char text[160];
  if (pcre2_get_error_message(code, text, sizeof text) < 0) return std::to_string(code);
  return reinterpret_cast<const char*>(text);
}

Error no_memory() { return Error{Errc::out_of_memory, "regex: no memory"}; }

const pcre2_code* as_code(const void* code) { return static_cast<const pcre2_code*>(code); }

}  // namespace

struct RegexScratch::Impl {
  pcre2_match_data* data = nullptr;
  pcre2_match_context* context = nullptr;

  ~Impl() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }
};

RegexScratch::RegexScratch(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
RegexScratch::RegexScratch(RegexScratch&&) noexcept = default;
RegexScratch& RegexScratch::operator=(RegexScratch&&) noexcept = default;
RegexScratch::~RegexScratch() = default;

Result<RegexScratch> RegexScratch::make(std::size_t text_bytes) {
  auto impl = std::make_unique<Impl>();
  impl->data = pcre2_match_data_create(1, nullptr);
  impl->context = pcre2_match_context_create(nullptr);
  if (impl->data == nullptr || impl->context == nullptr) return no_memory();
  const std::uint64_t steps =
      kBaseSteps + kStepsPerByte * std::min<std::uint64_t>(text_bytes, UINT32_MAX);
  const auto limit = static_cast<std::uint32_t>(std::min<std::uint64_t>(steps, UINT32_MAX));
  pcre2_set_match_limit(impl->context, limit);
  pcre2_set_depth_limit(impl->context, limit);
  return RegexScratch(std::move(impl));
}

Result<Regex> Regex::build(const std::string& pattern, std::uint32_t options) {
  struct FreeContext {
    void operator()(pcre2_compile_context* context) const { pcre2_compile_context_free(context); }
  };
  const std::unique_ptr<pcre2_compile_context, FreeContext> context(
      pcre2_compile_context_create(nullptr));
  if (context == nullptr) return no_memory();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options | PCRE2_UTF, &error, &offset, context.get());
  if (code == nullptr) {
    return Error{Errc::unsupported, "regex: " + pcre2_message(error)};
  }
  Regex regex;
  regex.code_ = std::shared_ptr<const void>(code, [](const void* freed) {
    pcre2_code_free(static_cast<pcre2_code*>(const_cast<void*>(freed)));
  });
  std::uint32_t matches_empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) {
    return Error{Errc::unsupported, "regex: it can match empty text, which is not understood here"};
  }
  // Without a just-in-time compiler (or with writable code pages forbidden) it is interpreted.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return regex;
}

Result<Regex> Regex::compile(const std::string& pcre2_pattern) {
  return build(pcre2_pattern, PCRE2_UCP);
}

Result<Regex> Regex::literal(const std::string& text) { return build(text, PCRE2_LITERAL); }

Result<Match> Regex::find(std::string_view text, std::size_t from, RegexScratch& scratch) const {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const auto match = [&](std::uint32_t options) {
    // The text is known to be UTF-8; checking it again at every match would be quadratic.
    return pcre2_match(as_code(code_.get()), subject, text.size(), from,
                       options | PCRE2_NO_UTF_CHECK, scratch.impl_->data, scratch.impl_->context);
  };
  int found = match(0);
  // Compiled code has a fixed stack; the interpreter keeps its state on the heap.
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
  if (found == PCRE2_ERROR_NOMATCH) return Match{};
  if (found < 0) {
    return Error{found == PCRE2_ERROR_NOMEMORY ? Errc::out_of_memory : Errc::unsupported,
                 "regex: " + pcre2_message(found) + " at byte " + std::to_string(from)};
  }
  const PCRE2_SIZE* const ends = pcre2_get_ovector_pointer(scratch.impl_->data);
  return Match{ends[0], ends[1], true};
}

}  // namespace qmlp::text
