#!/usr/bin/env python3
"""count_tests.py FILE: prints the number of tests in a JUnit file and how many did not pass.

A test that did not run, for whatever reason, did not pass.
"""
import sys
import xml.etree.ElementTree as ElementTree


def main():
    cases = list(ElementTree.parse(sys.argv[1]).getroot().iter("testcase"))
    bad = 0
    for case in cases:
        not_passed = [part for part in case if part.tag in ("failure", "error", "skipped")]
        if not_passed or case.get("status", "run") != "run":
            bad += 1
            print(f"did not pass: {case.get('classname')}.{case.get('name')}", file=sys.stderr)
    print(len(cases), bad)


if __name__ == "__main__":
    main()
