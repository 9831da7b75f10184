#!/usr/bin/env python3
"""Checks of the committed text: no path of one machine, no stray bytes, links that lead somewhere, and
the README's example equal to the file that the tests build."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = {".safetensors", ".gguf", ".png"}
# Home folders, and the places where people keep checkouts and scratch.
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:home|Users|root|work|mnt|tmp|media)/[\w.]+")
MAX_LINES = 1000
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def committed():
    text = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    return [ROOT / name for name in text.decode().split("\0") if name]


def check_text(path, text):
    name = path.relative_to(ROOT)
    for number, line in enumerate(text.split("\n"), 1):
        if MACHINE_PATH.search(line):
            yield f"{name}:{number}: names a path of one machine: {line.strip()[:80]}"
        if line != line.rstrip() and path.suffix in {".cc", ".h", ".cmake", ".md", ""}:
            yield f"{name}:{number}: white space at the end of the line"
        if "\t" in line and path.suffix in {".cc", ".h", ".py", ".md"}:
            yield f"{name}:{number}: a tab"
    if text and not text.endswith("\n") and path.suffix != ".json":
        yield f"{name}: no newline at the end"
    if path.suffix in {".cc", ".h"} and not text.startswith("// Made by tools/"):
        if text.count("\n") > MAX_LINES:
            yield f"{name}: {text.count(chr(10))} lines, at most {MAX_LINES}"


def check_links(path, text):
    for target, _ in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        if not (path.parent / target).exists():
            yield f"{path.relative_to(ROOT)}: link to {target}, which is not there"


def check_readme_example(text):
    blocks = re.findall(r"```cpp\n(.*?)```", text, re.S)
    example = (ROOT / "examples" / "swiglu.cc").read_text()
    for block in blocks:
        if block not in example:
            yield "README.md: its C++ example is no part of examples/swiglu.cc"


def main():
    found = []
    for path in committed():
        is_data = any(folder in path.as_posix() for folder in ("tests/data/", "fuzz/seeds/"))
        if path.suffix in BINARY or is_data or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            found.append(f"{path.relative_to(ROOT)}: not UTF-8 at byte {error.start}")
            continue
        found += check_text(path, text)
        if path.suffix == ".md":
            found += check_links(path, text)
        if path == ROOT / "README.md":
            found += check_readme_example(text)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
