#!/usr/bin/env python3
"""check_names.py PROGRAM: every kernel's name says what its table row says."""
import sys

import kernel_names


def main():
    rows = kernel_names.table(sys.argv[1])
    found = kernel_names.errors(rows)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{len(rows)} kernel names agree with their rows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
