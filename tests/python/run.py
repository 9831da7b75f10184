"""Runs the checks of this folder: run.py --build DIR --gguf FILE [--junit FILE] [NAME...]

NAME is a module, class or method as unittest spells it; without one, everything runs.
"""
import argparse
import os
import pathlib
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent


class Result(unittest.TextTestResult):
    """Keeps each test's time and outcome for the JUnit file."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cases = []

    def startTest(self, test):
        self.started = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        bad = [text for kind in (self.failures, self.errors) for item, text in kind
               if item is test or getattr(item, "test_case", None) is test]
        skipped = [text for item, text in self.skipped if item is test]
        self.cases.append((test.id(), time.monotonic() - self.started, bad + skipped))


def write_junit(path, result):
    suite = ElementTree.Element("testsuite", name="python")
    cases = list(result.cases)
    known = {name for name, _, _ in cases}
    # A class or module that could not be set up counts as one test that failed.
    for item, text in result.errors:
        if not isinstance(item, unittest.TestCase) and item.id() not in known:
            cases.append((item.id(), 0.0, [text]))
    for name, seconds, bad in cases:
        owner, _, method = name.rpartition(".")
        case = ElementTree.SubElement(suite, "testcase", classname=owner, name=method,
                                      time=f"{seconds:.3f}")
        for text in bad:
            ElementTree.SubElement(case, "failure").text = text
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, help="build folder with the program and dump_*")
    parser.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--junit", help="write the results to this file")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    sys.path.insert(0, str(HERE))
    import support

    support.setup(pathlib.Path(args.build).resolve(), pathlib.Path(args.gguf).resolve())
    loader = unittest.defaultTestLoader
    if args.names:
        tests = loader.loadTestsFromNames(args.names)
    else:
        tests = loader.discover(str(HERE), "test_*.py")
    result = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result).run(tests)
    if args.junit:
        write_junit(args.junit, result)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
