#include "convert/patterns.h"

#include <charconv>
#include <string>

#include "base/concat.h"
#include "base/try.h"
#include "qmlp/quant.h"

namespace qmlp {
namespace {

struct ShortName {
  std::string_view name;
  std::string_view module;  // the last component of the path
};
constexpr ShortName kShortNames[] = {
    {"gate", "gate_proj"},
    {"up", "up_proj"},
    {"down", "down_proj"},
    {"q", "q_proj"},
    {"k", "k_proj"},
    {"v", "v_proj"},
    {"o", "o_proj"},
    {"embed", "embed_tokens"},
    {"head", "lm_head"},
    {"qkv", "qkv_proj"},
    {"gate_up", "gate_up_proj"},
};

bool glob(std::string_view pattern, std::string_view text) noexcept {
  std::size_t p = 0;
  std::size_t t = 0;
  std::size_t star = std::string_view::npos;
  std::size_t star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

bool parse_int(std::string_view text, int& out) {
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), out);
  return code == std::errc() && end == text.data() + text.size();
}

Result<QuantPattern> parse_one(std::string_view item) {
  const auto bad = [item](std::string_view rest) {
    return Error{Errc::invalid_argument, concat("--bits '", item, "': ", rest)};
  };
  QuantPattern out;
  std::string_view value = item;
  const auto equals = item.find('=');
  if (equals == std::string_view::npos) {
    out.pattern = "*";
  } else {
    out.pattern = trim(item.substr(0, equals));
    value = trim(item.substr(equals + 1));
  }
  if (out.pattern.empty()) return bad("no module before '='");
  if (out.pattern.find_first_of(".*") == std::string::npos) {
    bool known = false;
    std::string names;
    for (const ShortName& name : kShortNames) {
      known = known || name.name == out.pattern;
      names += concat(names.empty() ? "" : ", ", name.name);
    }
    if (!known) return bad(concat("'", out.pattern, "' is none of ", names, ", and no path"));
  }
  const auto slash = value.find('/');
  if (!parse_int(value.substr(0, slash), out.bits)) return bad("needs BITS or BITS/GROUP");
  QuantSpec probe{out.bits, 64, DType::f32};
  if (slash != std::string_view::npos) {
    if (!parse_int(value.substr(slash + 1), out.group_size)) return bad("needs BITS or BITS/GROUP");
    probe.group_size = out.group_size == 0 ? -1 : out.group_size;
  }
  if (const Status status = validate(probe); !status) return bad(status.error().message);
  return out;
}

}  // namespace

bool matches(const QuantPattern& pattern, std::string_view module_path) noexcept {
  const std::string_view text = pattern.pattern;
  if (text.find_first_of(".*") == std::string_view::npos) {
    const auto dot = module_path.rfind('.');
    const std::string_view last =
        dot == std::string_view::npos ? module_path : module_path.substr(dot + 1);
    for (const ShortName& name : kShortNames) {
      if (name.name == text) return name.module == last;
    }
    return false;
  }
  constexpr std::string_view kRoot = "model.";
  return glob(text, module_path) ||
         (module_path.starts_with(kRoot) && glob(text, module_path.substr(kRoot.size())));
}

Result<std::vector<QuantPattern>> parse_quant_patterns(std::string_view text) {
  std::vector<QuantPattern> out;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    std::size_t end = text.find(',', begin);
    if (end == std::string_view::npos) end = text.size();
    const std::string_view item = trim(text.substr(begin, end - begin));
    if (item.empty()) {
      return Error{Errc::invalid_argument,
                   concat("--bits '", text, "': an empty item, needs MODULE=BITS[/GROUP],...")};
    }
    QMLP_ASSIGN(QuantPattern pattern, parse_one(item));
    out.push_back(std::move(pattern));
    begin = end + 1;
  }
  return out;
}

}  // namespace qmlp
