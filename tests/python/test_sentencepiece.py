"""Our reading of a tokenizer.model against the sentencepiece library."""
import json
import random
import struct
import subprocess
import unittest

import sentencepiece

import check_tokenizer
import support
import tokenizer_kinds

MODELS = {
    "llama": {"vocab_size": 2400, "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
              "character_coverage": 0.9995, "split_digits": True, "allow_whitespace_only_pieces": True},
    "defaults": {"vocab_size": 1500},
    "symbols": {"vocab_size": 1600, "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
                "add_dummy_prefix": False, "user_defined_symbols": "<b>,\n\n,ing,\u2581the", "control_symbols": "[INST],[/INST]",
                "split_by_whitespace": False},
    "nfkc_bytes": {"vocab_size": 1400, "byte_fallback": True, "normalization_rule_name": "nfkc_cf", "character_coverage": 0.98},
}


class SentencePiece(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = support.program("tests/text/encode_file")

    def write(self, name, data, config=None):
        folder = support.scratch() / "sentencepiece" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.model").write_bytes(data)
        path = folder / "tokenizer_config.json"
        path.unlink(missing_ok=True)
        if config is not None:
            path.write_text(json.dumps(config))
        return folder

    def test_same_ids_and_text(self):
        for seed, (name, options) in enumerate(MODELS.items()):
            with self.subTest(name):
                data = tokenizer_kinds.spm("bpe", **options)
                theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
                rng = random.Random(seed)
                pieces = [theirs.decode([i]) or " " for i in range(theirs.get_piece_size())]
                # The library ends a text at its first zero byte.
                texts = [text for text in check_tokenizer.NASTY if "\0" not in text]
                texts += [check_tokenizer.random_text(rng, pieces).replace("\0", "") for _ in range(3000)]
                expected = theirs.encode(texts)
                folder = self.write(name, data)
                ours = check_tokenizer.ask(self.program, folder, (b"e" + check_tokenizer.string(text.encode()) for text in texts))
                for text, ids in zip(texts, expected):
                    error = ours.error()
                    have = error if error else ours.ids()
                    if have != ids:
                        check_tokenizer.differ(f"encode ({name})", text, ids, have)
                ours = check_tokenizer.ask(self.program, folder, (b"d" + struct.pack(f"<I{len(ids)}I", len(ids), *ids) for ids in expected))
                for ids in expected:
                    self.assertIsNone(ours.error())
                    have = ours.string().decode()
                    if 0 not in ids:  # an unknown character has another text there
                        self.assertEqual(have, theirs.decode(ids), ids)
                print(f"{name}: {len(texts)} texts give the same {sum(map(len, expected))} ids")

    def test_what_the_config_says(self):
        data = tokenizer_kinds.spm("bpe", **MODELS["llama"])
        theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
        size = theirs.get_piece_size()
        bare = theirs.encode("ab c")

        def prompt(config):
            ours = check_tokenizer.ask(self.program, self.write("config", data, config), [b"p" + check_tokenizer.string(b"ab c")])
            return ours.error() or ours.ids()

        self.assertEqual(prompt(None), [1, *bare])
        self.assertEqual(prompt({"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}), [1, *bare, 2])
        self.assertEqual(prompt({"bos_token": "<s>", "add_bos_token": False}), bare)
        self.assertEqual(prompt({"add_bos_token": False, "added_tokens_decoder": {str(size): {"content": "b c"}}})[-1], size)
        self.assertIn("'<x>' is not in the vocabulary", self.refusal({"bos_token": "<x>", "add_bos_token": True}, data))

    def refusal(self, config, data):
        done = subprocess.run([self.program, self.write("refused", data, config)], capture_output=True, text=True, input="")
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr.count("\n"), 1)
        return done.stderr

    def test_refuses_other_types(self):
        self.assertIn("its model type is 'unigram'", self.refusal(None, tokenizer_kinds.spm("unigram", vocab_size=400)))
        self.assertIn("a broken field", self.refusal(None, b"\x0a\xff"))
        self.assertIn("it holds no pieces", self.refusal(None, b""))
        data = tokenizer_kinds.spm("bpe", **MODELS["llama"])
        # The pieces come first: what is cut off before the type was read is refused wherever the cut is.
        for cut in range(0, len(data) // 2, len(data) // 150):
            self.refusal(None, data[:cut])


if __name__ == "__main__":
    unittest.main()
