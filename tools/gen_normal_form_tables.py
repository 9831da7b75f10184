#!/usr/bin/env python3
"""Writes src/text/normal_form_tables.cc: decompositions, compositions and combining classes.

Of the characters of Unicode 9, which is what Hugging Face's normalizers know; later versions only
add characters. Needs Python 3.11 and perl: gen_normal_form_tables.py > src/text/normal_form_tables.cc
"""

import subprocess
import unicodedata

VERSION = "9.0"
HANGUL = range(0xAC00, 0xAC00 + 11172)


def characters():
    script = r"for (0..0xD7FF, 0xE000..0x10FFFF) { print qq($_\n) if chr($_) =~ /\p{Present_In: %s}/ }" % VERSION
    out = subprocess.run(["perl", "-e", script], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in out.split()]


def rows(entries, per_line):
    cells = ["{" + ",".join(f"0x{value:X}" for value in entry) + "}," for entry in entries]
    return "\n".join("".join(cells[i:i + per_line]) for i in range(0, len(cells), per_line))


def main():
    decompositions, compositions, classes, compatible, pool = [], [], [], [], []
    for code in characters():
        combining = unicodedata.combining(chr(code))
        if combining:
            if classes and classes[-1][1] == code - 1 and classes[-1][2] == combining:
                classes[-1][1] = code
            else:
                classes.append([code, code, combining])
        full = unicodedata.normalize("NFKD", chr(code))
        if full != unicodedata.normalize("NFD", chr(code)):
            assert code not in HANGUL
            compatible.append((code, len(pool), len(full)))
            pool += [ord(c) for c in full]
        mapping = unicodedata.decomposition(chr(code))
        if not mapping or mapping.startswith("<"):
            continue
        parts = [int(part, 16) for part in mapping.split()]
        first, second = parts if len(parts) == 2 else (parts[0], 0)
        decompositions.append((code, first, second))
        if second and unicodedata.normalize("NFC", chr(code)) == chr(code):
            compositions.append((first, second, code))
    print("// Made by tools/gen_normal_form_tables.py.")
    print('#include "text/normal_form_tables.h"\n')
    print("namespace qmlp::text {\nnamespace {\n\n// clang-format off")
    print("constexpr Decomposition kDecompositions[] = {\n" + rows(decompositions, 4) + "\n};")
    print("constexpr Composition kCompositions[] = {\n" + rows(sorted(compositions), 4) + "\n};")
    print("constexpr CombiningRange kCombining[] = {\n" + rows(classes, 5) + "\n};")
    print("constexpr Compatible kCompatible[] = {\n" + rows(compatible, 5) + "\n};")
    lines = [",".join(f"0x{c:X}" for c in pool[i:i + 14]) + "," for i in range(0, len(pool), 14)]
    print("constexpr char32_t kCompatibleText[] = {\n" + "\n".join(lines) + "\n};")
    print("// clang-format on\n\n}  // namespace\n")
    for name, kind, table in (("decompositions", "Decomposition", "kDecompositions"),
                              ("compositions", "Composition", "kCompositions"),
                              ("combining_ranges", "CombiningRange", "kCombining"),
                              ("compatible", "Compatible", "kCompatible"),
                              ("compatible_text", "char32_t", "kCompatibleText")):
        print(f"std::span<const {kind}> {name}() noexcept {{ return {table}; }}")
    print("\n}  // namespace qmlp::text")


if __name__ == "__main__":
    main()
