"""Our tokenizer against Hugging Face's on the converted model (check_tokenizer.py)."""
import pathlib
import sys
import unittest

import support

HERE = pathlib.Path(__file__).resolve().parent


class Tokenizer(unittest.TestCase):
    def test_same_ids(self):
        print(support.run(sys.executable, HERE / "check_tokenizer.py",
                          support.program("tests/text/encode_file"), support.model()).strip())


if __name__ == "__main__":
    unittest.main()
