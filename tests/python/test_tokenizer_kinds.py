"""Our tokenizers against Hugging Face's over the structures of published families (tokenizer_kinds.py)."""
import time
import unittest
import unicodedata

import check_tokenizer
import support
import tokenizer_kinds

RANDOM = 3200  # texts for each kind: more than 100,000 in all


class TokenizerKinds(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = support.scratch() / "tokenizers"
        cls.names = tokenizer_kinds.build(cls.folder)
        cls.program = support.program("tests/text/encode_file")

    def test_same_ids_and_text(self):
        kinds = [name for name in self.names if not name.startswith("step_")]
        self.assertGreater(len(kinds) * RANDOM, 100_000)
        for seed, name in enumerate(kinds):
            with self.subTest(name):
                print(f"{name}: {check_tokenizer.compare(self.program, self.folder / name, RANDOM, seed)}")

    def test_every_character(self):
        codes = [code for code in (*range(0x20000), *range(0xE0000, 0xE0200), *range(0x20000, 0x110000, 997))
                 if not 0xD800 <= code < 0xE000]
        self.assertGreater(len(codes), 130_000)
        texts = ["".join(f"a{chr(code)}" for code in codes[i:i + 50]) for i in range(0, len(codes), 50)]
        for name in self.names:
            if name.startswith("step_"):
                with self.subTest(name):
                    check_tokenizer.compare_texts(self.program, self.folder / name, texts)

    def test_graphemes_of_a_character_map(self):
        normalize = check_tokenizer.Reference(self.folder / "step_Precompiled").tokenizer.normalizer.normalize_str
        mapped = [chr(code) for code in range(0x800) if normalize(chr(code)) != chr(code)]
        self.assertGreater(len(mapped), 50)
        marks = [chr(code) for code in range(0x300, 0x10000) if unicodedata.category(chr(code)) in ("Mn", "Mc", "Me", "Cf", "Sk")]
        marks += map(chr, (0x897, 0xCF3, 0xECE, *range(0x1AB0, 0x1B00)))
        texts = [base + mark for mark in marks for base in [*mapped[::6], "\r", "\n", "e", "\u0600"]]
        texts += [f"{mark}{base}\u0301" for mark in marks[::9] for base in mapped]
        check_tokenizer.compare_texts(self.program, self.folder / "step_Precompiled", texts)

    def test_long_texts_take_no_quadratic_time(self):
        size = 1_000_000
        texts = [unit * (size // len(unit.encode())) for unit in ("a", " ", "ab ", "\U0001f600")]
        for name in ("llama2", "metaspace_first_whole", "crossing", "unigram_bytes"):
            with self.subTest(name):
                expected = check_tokenizer.Reference(self.folder / name).encode(texts)
                start = time.monotonic()
                ours = check_tokenizer.ask(self.program, self.folder / name,
                                           (b"e" + check_tokenizer.string(text.encode()) for text in texts))
                # Linear time is a second or two; quadratic time would be an hour.
                self.assertLess(time.monotonic() - start, 60)
                for text, ids in zip(texts, expected):
                    self.assertIsNone(ours.error())
                    self.assertTrue(ours.ids() == ids, f"{name}: {text[:3]!r} repeated gives other ids")


if __name__ == "__main__":
    unittest.main()
