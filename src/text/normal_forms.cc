#include "text/normal_forms.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "text/normal_form_tables.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr char32_t kFirstCombining = 0x300;

// Below it the form changes no character. Canonical decompositions compose again up to 0x300.
constexpr char32_t first_unstable(NormalForm form) {
  switch (form) {
    case NormalForm::nfc:
      return kFirstCombining;
    case NormalForm::nfd:
      return 0xC0;
    default:
      return 0xA0;
  }
}

// Hangul syllables, as the Unicode standard numbers them (section 3.12).
constexpr char32_t kSyllables = 0xAC00;
constexpr char32_t kLeading = 0x1100;
constexpr char32_t kVowels = 0x1161;
constexpr char32_t kTrailing = 0x11A7;  // one before the first
constexpr char32_t kLeadingCount = 19;
constexpr char32_t kVowelCount = 21;
constexpr char32_t kTrailingCount = 28;
constexpr char32_t kSyllableCount = kLeadingCount * kVowelCount * kTrailingCount;

struct Character {
  char32_t code;
  std::uint8_t combining_class;
};

std::uint8_t combining_class(char32_t code) {
  if (code < kFirstCombining) return 0;
  const auto table = combining_ranges();
  const auto after =
      std::upper_bound(table.begin(), table.end(), code,
                       [](char32_t c, const CombiningRange& range) { return c < range.first; });
  if (after == table.begin()) return 0;
  const CombiningRange& range = *(after - 1);
  return code <= range.last ? range.combining_class : std::uint8_t{0};
}

void decompose(char32_t code, bool compatibly, std::vector<Character>& out) {
  if (code >= kSyllables && code < kSyllables + kSyllableCount) {
    const char32_t index = code - kSyllables;
    out.push_back({kLeading + index / (kVowelCount * kTrailingCount), 0});
    out.push_back({kVowels + index / kTrailingCount % kVowelCount, 0});
    if (index % kTrailingCount != 0) out.push_back({kTrailing + index % kTrailingCount, 0});
    return;
  }
  if (compatibly) {
    const auto known = compatible();
    const auto entry =
        std::lower_bound(known.begin(), known.end(), code,
                         [](const Compatible& row, char32_t c) { return row.code < c; });
    if (entry != known.end() && entry->code == code) {
      for (const char32_t part : compatible_text().subspan(entry->begin, entry->length)) {
        out.push_back({part, combining_class(part)});
      }
      return;
    }
  }
  const auto table = decompositions();
  const auto found =
      std::lower_bound(table.begin(), table.end(), code,
                       [](const Decomposition& entry, char32_t c) { return entry.code < c; });
  if (found == table.end() || found->code != code) {
    out.push_back({code, combining_class(code)});
    return;
  }
  decompose(found->first, false, out);
  if (found->second != 0) decompose(found->second, false, out);
}

// The character that two compose to, or 0.
char32_t compose(char32_t first, char32_t second) {
  if (first >= kLeading && first < kLeading + kLeadingCount && second >= kVowels &&
      second < kVowels + kVowelCount) {
    return kSyllables + ((first - kLeading) * kVowelCount + (second - kVowels)) * kTrailingCount;
  }
  const bool open_syllable = first >= kSyllables && first < kSyllables + kSyllableCount &&
                             (first - kSyllables) % kTrailingCount == 0;
  if (open_syllable && second > kTrailing && second < kTrailing + kTrailingCount) {
    return first + (second - kTrailing);
  }
  const auto table = compositions();
  const auto found =
      std::lower_bound(table.begin(), table.end(), Composition{first, second, 0},
                       [](const Composition& a, const Composition& b) {
                         return a.first != b.first ? a.first < b.first : a.second < b.second;
                       });
  return found != table.end() && found->first == first && found->second == second ? found->code : 0;
}

// Puts each run of combining characters into the order of their classes.
void sort_combining(std::vector<Character>& text) {
  for (auto at = text.begin(); at != text.end();) {
    if (at->combining_class == 0) {
      ++at;
      continue;
    }
    const auto end =
        std::find_if(at, text.end(), [](const Character& c) { return c.combining_class == 0; });
    std::stable_sort(at, end, [](const Character& a, const Character& b) {
      return a.combining_class < b.combining_class;
    });
    at = end;
  }
}

// Composes in place: each character with the last starter unless one between them blocks it.
void compose_all(std::vector<Character>& text) {
  constexpr std::size_t kNoStarter = ~std::size_t{0};
  std::size_t starter = kNoStarter;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const Character c = text[i];
    if (starter != kNoStarter) {
      const bool adjacent = starter + 1 == kept;
      const bool blocked = !adjacent && text[kept - 1].combining_class >= c.combining_class;
      const char32_t composed = blocked ? 0 : compose(text[starter].code, c.code);
      if (composed != 0) {
        text[starter].code = composed;
        continue;
      }
    }
    if (c.combining_class == 0) starter = kept;
    text[kept++] = c;
  }
  text.resize(kept);
}

}  // namespace

std::optional<std::string> to_normal_form(std::string_view text, NormalForm form) {
  const bool compatibly = form == NormalForm::nfkc || form == NormalForm::nfkd;
  const bool composed = form == NormalForm::nfc || form == NormalForm::nfkc;
  bool stable = true;
  std::vector<Character> characters;
  for (std::string_view rest = text; !rest.empty() && stable;) {
    const Utf8Unit unit = first_utf8_unit(rest);
    stable = unit.code < first_unstable(form);
    rest.remove_prefix(unit.length);
  }
  if (stable) return std::nullopt;
  characters.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    const Utf8Unit unit = first_utf8_unit(rest);
    decompose(unit.code, compatibly, characters);
    rest.remove_prefix(unit.length);
  }
  sort_combining(characters);
  if (composed) compose_all(characters);
  std::string out;
  out.reserve(text.size());
  for (const Character& c : characters) append_utf8(c.code, out);
  if (out == text) return std::nullopt;
  return out;
}

}  // namespace qmlp::text
