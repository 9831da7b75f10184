#!/usr/bin/env python3
"""Looks in machine code for registers that are written while an asynchronous wgmma still reads them.

    check_wgmma.py FILE...      objects, libraries or programs; needs cuobjdump of the CUDA toolkit

ptxas keeps such registers apart as long as they are different variables; when a fragment is the very word
that a load brought, it has been seen to load the next one on top. Code is read in its own order, which in
the kernels here is the order of the main loop."""

import re
import shutil
import subprocess
import sys


def width(op: str) -> int:
    if ".128" in op or op.startswith("LDSM"):
        return 4
    return 2 if ".64" in op or "WIDE" in op else 1


def overwritten(code: str) -> list[str]:
    """Instructions of one function that write an operand of a wgmma in flight."""
    groups: list[set[int]] = []  # operand registers of each committed group that may still run
    current: set[int] = set()
    found = []
    for address, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code):
        text = re.sub(r"^@!?U?P\d+\s+", "", text).strip()
        if not text:
            continue
        op, *rest = text.split(None, 1)
        operands = [o.strip() for o in rest[0].split(",")] if rest else []
        if op.startswith("HGMMA"):
            register = re.match(r"R(\d+)", operands[1])
            if register:
                current |= set(range(int(register[1]), int(register[1]) + 4))
            if "gsb0" in text:
                groups.append(current)
                current = set()
        elif "DEPBAR" in op and "gsb0" in text:
            left = int(re.search(r"gsb0, (0x[0-9a-f]+)", text)[1], 16)
            groups = groups[-left:] if left else []
        elif operands and not op.startswith(("ST", "SYNCS", "RED", "BAR")):
            register = re.match(r"R(\d+)", operands[0])
            if register:
                first = int(register[1])
                if set(range(first, first + width(op))) & current.union(*groups):
                    found.append(f"{address}: {text}")
    return found


def main() -> int:
    tool = shutil.which("cuobjdump")
    if tool is None or len(sys.argv) < 2:
        print("check_wgmma.py: no cuobjdump in PATH" if tool is None else __doc__, file=sys.stderr)
        return 2
    bad = functions = 0
    for path in sys.argv[1:]:
        code = subprocess.run([tool, "--dump-sass", path], capture_output=True, text=True,
                              check=True).stdout
        for function in code.split("Function : ")[1:]:
            if "HGMMA" not in function:
                continue
            functions += 1
            found = overwritten(function)
            if found:
                bad += 1
                print(f"{function.splitlines()[0]}: {len(found)} writes, first {found[0]}")
    print(f"check_wgmma.py: {functions} functions, {bad} write a register that wgmma may still read")
    return int(bad > 0 or functions == 0)


if __name__ == "__main__":
    sys.exit(main())
