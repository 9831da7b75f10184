"""The worked examples of docs/format.md."""
import doctest
import pathlib
import unittest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


class Docs(unittest.TestCase):
    def test_format(self):
        failures, tests = doctest.testfile(str(DOCS / "format.md"), module_relative=False)
        self.assertEqual(failures, 0)
        self.assertGreater(tests, 5)


if __name__ == "__main__":
    unittest.main()
