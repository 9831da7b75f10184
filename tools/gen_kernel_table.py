#!/usr/bin/env python3
"""gen_kernel_table.py [--check] PROGRAM: writes docs/kernels.md, or checks that it is up to date."""
import pathlib
import sys

import kernel_names

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "kernels.md"

HEAD = """# Kernels

Written by `tools/gen_kernel_table.py build/qmlp` from `qmlp info --kernels --json`; do not edit.

## Names

A name is `<op>_<activation>_<codes>_<tile>_<isa>`.

| part | values |
| --- | --- |
| op | `linear`: x · wᵀ; `swiglu`: silu(x · gateᵀ) * (x · upᵀ) |
| activation | type of x and of the output: `bf16`, `f16`, `f32` |
| codes | widths of the weights: `any` reads them at run time; `u4u8` would be 4-bit gate, 8-bit up |
| tile | block of rows (m), output features (n) and, under the tensor contract, terms (k) of one step |
| isa | the instruction set that the code needs |

Each row takes bits 2, 3, 4, 5, 6 and 8, groups of 32, 64 and 128, scales of any stored type, dense
floats, any M, any N and any K that is a multiple of the group. A plan takes the first row that supports
the problem; rows of one contract give the same bits, so the choice changes speed alone
([dispatch.md](dispatch.md)).

"""


def page(rows):
    text = HEAD
    for device, title in (("cpu", "CPU"), ("cuda", "CUDA")):
        mine = [row for row in rows if row["device"] == device]
        if not mine:
            continue
        text += f"## {title}\n\n"
        if device != "cpu":
            text += ("The rows are in every build, so that plans can be made and read; their code is "
                     "built with `QMLP_CUDA=ON`.\n\n")
        text += "| name | isa | accumulation | activations | tile |\n| --- | --- | --- | --- | --- |\n"
        for row in mine:
            parts = row["parts"]
            text += (f"| `{row['name']}` | {row['isa']} | {row['accumulation']} | "
                     f"{parts['activation']} | {parts['tile']} |\n")
        text += "\n"
    return text.rstrip("\n") + "\n"


def main():
    check = sys.argv[1] == "--check"
    rows = kernel_names.table(sys.argv[-1])
    if found := kernel_names.errors(rows):
        print("\n".join(found), file=sys.stderr)
        return 1
    text = page(rows)
    if not check:
        PAGE.write_text(text)
        return 0
    if not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.name} is out of date: run tools/gen_kernel_table.py {sys.argv[-1]}",
              file=sys.stderr)
        return 1
    print(f"{PAGE.name} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
