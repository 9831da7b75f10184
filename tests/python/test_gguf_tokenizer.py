"""Tokenizers of GGUF files: SentencePiece's and byte-level ones, against their own programs."""
import functools
import json
import random
import unicodedata
import unittest

import regex
import sentencepiece
import tokenizers
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges

import check_tokenizer
import support
import tokenizer_kinds
from test_gguf_models import base, convert, make

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
RANDOM_TEXTS = 1500
SP_OPTIONS = (("vocab_size", 1500), ("byte_fallback", True), ("normalization_rule_name", "identity"),
              ("remove_extra_whitespaces", False), ("character_coverage", 0.999), ("split_digits", True))


def encode_file():
    return support.program("tests/text/encode_file")


@functools.cache
def tiny_model(vocab):
    config = base(model_type="llama", head_dim=16, vocab_size=vocab, num_hidden_layers=1,
                  hidden_size=32, intermediate_size=32)
    return config, make(config)[1]


def convert_tokenizer(name, tokens, add):
    """A model of one layer whose file's tokenizer is what `add` writes."""
    config, weights = tiny_model(len(tokens))
    return convert(name, "llama", config, weights, tokenizer=add)


def texts(count, seed, avoid=()):
    rng = random.Random(seed)
    out = list(check_tokenizer.NASTY)
    out += [check_tokenizer.random_text(rng, check_tokenizer.PIECES) for _ in range(count)]
    return [text for text in out if not any(part in text for part in avoid)]


class SentencePiece(unittest.TestCase):
    def pieces(self, prefix):
        data = tokenizer_kinds.spm("bpe", add_dummy_prefix=prefix, **dict(SP_OPTIONS))
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        vocabulary = []  # text, score, type
        for i in range(processor.get_piece_size()):
            kind = (UNKNOWN if processor.is_unknown(i) else CONTROL if processor.is_control(i)
                    else BYTE if processor.is_byte(i) else NORMAL)
            vocabulary.append((processor.id_to_piece(i), processor.get_score(i), kind))
        vocabulary += [("<|im_start|>", -1000.0, CONTROL), ("<|im_end|>", -1000.0, CONTROL),
                       ("<tool>", -1000.0, USER_DEFINED), ("[PAD1]", -10000.0, 5)]
        return processor, vocabulary

    def check(self, prefix, **flags):
        processor, vocabulary = self.pieces(prefix)

        def add(writer):
            writer.add_tokenizer_model("llama")
            writer.add_tokenizer_pre("default")
            writer.add_token_list([text for text, _, _ in vocabulary])
            writer.add_token_scores([score for _, score, _ in vocabulary])
            writer.add_token_types([kind for _, _, kind in vocabulary])
            writer.add_bos_token_id(1)
            writer.add_eos_token_id(2)
            writer.add_unk_token_id(0)
            writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}"
                                     "<|im_end|>{% endfor %}")
            if not prefix:
                writer.add_add_space_prefix(False)
            for flag, value in flags.items():
                writer.add_bool(f"tokenizer.ggml.{flag}", value)

        folder, _ = convert_tokenizer(f"sentencepiece-{prefix}", vocabulary, add)
        ids = {text: i for i, (text, _, _) in enumerate(vocabulary)}
        with open(folder / "tokenizer.json", encoding="utf-8") as file:
            model = json.load(file)["model"]
        self.assertEqual(model["vocab"], ids)
        skipped = {text for text, _, kind in vocabulary if kind != NORMAL}
        merges = generate_merges(ids, {text: score for text, score, _ in vocabulary}, skipped)
        self.assertEqual(model["merges"], [" ".join(merge) for merge in merges])

        theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        given = texts(RANDOM_TEXTS, 5, ("<s>", "</s>", "<unk>", "<|im_", "<tool>"))
        for text in given:
            self.assertEqual(theirs.encode(text, add_special_tokens=False).ids,
                             processor.encode(text), repr(text))
            if "\ufffd" not in text:
                self.assertEqual(theirs.decode(theirs.encode(text).ids), text)
        print(f"{len(given)} texts as SentencePiece, "
              f"{check_tokenizer.compare(encode_file(), folder, RANDOM_TEXTS, 2)}")
        return folder, theirs

    def test_with_a_space_in_front(self):
        folder, theirs = self.check(True)
        self.assertEqual(theirs.encode("a").ids[0], 1)  # <s>, as llama.cpp adds it unless told not to
        self.assertEqual(support.config(folder)["bos_token_id"], 1)
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.assertEqual(ends, [2, theirs.token_to_id("<|im_end|>")])
        # mlx-lm loads it through this.
        auto = AutoTokenizer.from_pretrained(folder)
        for text in ("Hello  world", "<|im_start|>x<tool> y<|im_end|>", "漢字 é"):
            self.assertEqual(auto.encode(text), theirs.encode(text).ids)
            self.assertEqual(auto.decode(theirs.encode(text, add_special_tokens=False).ids),
                             theirs.decode(theirs.encode(text, add_special_tokens=False).ids,
                                           skip_special_tokens=False))
        # What spells a token in the middle of a text is not made of merges.
        plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain.encode_special_tokens = True
        self.assertNotIn(1, plain.encode("a <s> b", add_special_tokens=False).ids)

    def test_without_a_space_in_front(self):
        _, theirs = self.check(False, add_bos_token=False, add_eos_token=True)
        found = theirs.encode("a").ids
        self.assertEqual((found[-1], found[0] == 1), (2, False))


# How llama.cpp cuts text: each expression cuts what the ones before have left in one piece.
CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
LLAMA3 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES]
QWEN2 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES]
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = r"[^\r\n\p{L}\p{N}]?{0}*{1}+{2}|[^\r\n\p{L}\p{N}]?{0}+{1}*{2}|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES


def words(suffix):
    return WORDS.replace("{0}", UPPER).replace("{1}", LOWER).replace("{2}", suffix)


PRE_TOKENIZERS = {
    "gpt-2": GPT2, "phi-2": GPT2, "default": GPT2,
    "smollm": [r"\p{N}", *GPT2], "starcoder": [r"\p{N}", *GPT2], "refact": [r"\p{N}", *GPT2],
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "smaug-bpe": LLAMA3, "dbrx": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2,
    "tekken": [words("") + r"\p{N}" + REST],
    "gpt-4o": [words(CONTRACTIONS + "?") + r"\p{N}{1,3}" + REST],
}
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")


def cut(text, expressions):
    parts = [text]
    for expression in expressions:
        found = []
        for part in parts:
            at = 0
            for match in regex.finditer(expression, part):
                found += [part[at:match.start()], match.group()]
                at = match.end()
            found.append(part[at:])
        parts = [part for part in found if part]
    return parts


def is_settled(character):
    """Whether all versions of Unicode agree on it; the libraries compared do not have the same."""
    old = unicodedata.ucd_3_2_0.category(character)
    return old not in ("Cn", "Cc", "Cf") and old == unicodedata.category(character) or (
        character in "\t\n\r")


class ByteLevel(unittest.TestCase):
    def convert(self, pre, **flags):
        model = tokenizer_kinds.byte_bpe(1200)
        tokens = sorted(model["vocab"], key=model["vocab"].get) + ["<|begin|>", "<|im_end|>"]

        def add(writer):
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(tokens)
            writer.add_token_types([NORMAL] * (len(tokens) - 2) + [CONTROL, CONTROL])
            writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
            writer.add_bos_token_id(len(tokens) - 2)
            writer.add_eos_token_id(len(tokens) - 1)
            for flag, value in flags.items():
                writer.add_bool(f"tokenizer.ggml.{flag}", value)

        return convert_tokenizer("byte-level", tokens, add)[0]

    def test_each_pre_tokenizer(self):
        # Unicode's case folding takes U+017F for an s, the plain classes above do not.
        given = [text for text in texts(1500, 6, "\u017f\u212a") if all(map(is_settled, text))]
        for pre, expressions in PRE_TOKENIZERS.items():
            folder = self.convert(pre)
            theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            for text in given:
                normal = theirs.normalizer.normalize_str(text) if theirs.normalizer else text
                # Offsets are in characters of the normalized text.
                spans = [span for _, span in theirs.pre_tokenizer.pre_tokenize_str(normal)]
                self.assertEqual([normal[a:b] for a, b in spans], cut(normal, expressions),
                                 (pre, text))
            bos = theirs.encode("x").ids[0] == theirs.token_to_id("<|begin|>")
            self.assertEqual(bos, pre in WITH_BOS, pre)
            self.assertEqual(theirs.normalizer is not None, "qwen" in pre)
            check_tokenizer.compare(encode_file(), folder, 200, 3)
        print(f"{len(PRE_TOKENIZERS)} pre-tokenizers, {len(given)} texts each")

    def test_flags(self):
        theirs = tokenizers.Tokenizer.from_file(
            str(self.convert("llama-bpe", add_bos_token=False, add_eos_token=True) /
                "tokenizer.json"))
        ids = theirs.encode("x").ids
        self.assertEqual(ids[-1], theirs.token_to_id("<|im_end|>"))
        self.assertNotEqual(ids[0], theirs.token_to_id("<|begin|>"))


if __name__ == "__main__":
    unittest.main()
