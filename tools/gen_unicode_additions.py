#!/usr/bin/env python3
"""Writes src/text/unicode_additions.cc: characters assigned after Unicode 14, by general category.

PCRE2 10.42 knows Unicode 14. Hugging Face's regex engine knows Unicode 16, and its Digits
pre-tokenizer Unicode 17. Run with Python 3.11, whose own tables are Unicode 14, and the package
unicodedata2 16.0.0: gen_unicode_additions.py > src/text/unicode_additions.cc
"""

import unicodedata

import unicodedata2

OLD, NEW = "14.0.0", "16.0.0"
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So".split()


def ranges(codes):
    out = []
    for code in codes:
        if out and out[-1][1] == code - 1:
            out[-1][1] = code
        else:
            out.append([code, code])
    return out


def main():
    assert unicodedata.unidata_version == OLD, unicodedata.unidata_version
    assert unicodedata2.unidata_version == NEW, unicodedata2.unidata_version
    added = {category: [] for category in CATEGORIES}
    for code in range(0x110000):
        old, new = unicodedata.category(chr(code)), unicodedata2.category(chr(code))
        if old == new:
            continue
        if old != "Cn":
            # Additions cannot take a character out of a category; the top level must not change.
            assert old[0] == new[0], hex(code)
            continue
        if new in added:
            added[new].append(code)
    print("// Made by tools/gen_unicode_additions.py.")
    print('#include "text/unicode_additions.h"\n')
    print("namespace qmlp::text {\nnamespace {\n")
    print(f"// Unicode {NEW} less {OLD}.")
    print("constexpr CategoryRange kAdditions[] = {")
    for category in CATEGORIES:
        for first, last in ranges(added[category]):
            print(f'    {{"{category}", 0x{first:X}, 0x{last:X}}},')
    print("};\n\n}  // namespace\n")
    print("std::span<const CategoryRange> unicode_additions() noexcept { return kAdditions; }\n")
    print("}  // namespace qmlp::text")


if __name__ == "__main__":
    main()
