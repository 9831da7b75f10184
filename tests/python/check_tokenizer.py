#!/usr/bin/env python3
"""Compares qmlp's tokenizer with Hugging Face's `tokenizers` on the same tokenizer.json.

  check_tokenizer.py ENCODE_FILE CHECKPOINT [--random 20000] [--seed 1]

ENCODE_FILE is the program built from tests/text/encode_file.cc, CHECKPOINT a folder with a
tokenizer.json. Every text of a nasty corpus and RANDOM strings of mixed scripts must give the same
ids, with special tokens in a text kept as text, and must decode to the same text, whole and token by
token. Ends with status 1 at the first difference, which it prints.
"""

import argparse
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

import tokenizers

NASTY = [
    "", " ", "  ", "\n", "\n\n", " \n ", "\t", "\t\t x", "\r\n\r\n", "a\r\nb\rc", "a", "a b", " a",
    "Hello, world!", "Hello,  world !", "I'll we've don't 'S 'Tis it'd 'RE x'ſ y'LL", "''''", "'s's's",
    "x" * 300, "=" * 1000, " " * 1000, "\n" * 1000, " \n" * 500, "\t" * 333 + "x", "ab" * 5000,
    "a" * 20000, "é" * 3000, "漢" * 3000, "1" * 2000, "1234567890" * 20, "3.14159e-10 0x1F 1,000,000",
    "٣٤٥ ०१२ Ⅷ ½ ² ①②③ 一二三 𝟘𝟙𝟚", "\U00011de0\U00011de5 \U00016ff4 \U00010d40\U0001e4f0",
    "naïve café résumé", "nai\u0308ve cafe\u0301", "\u0301\u0302 \u0301", "a\u0300\u0301\u0302\u0303b",
    "Ünïcödé ẞß ﬁ ﬂ ﬆ İı ſ K Å", "Привет, мир! Ёлка", "Γειά σου Κόσμε ς", "שלום עולם", "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया क्षत्रिय", "สวัสดีชาวโลก", "你好，世界！今天天气很好。", "こんにちは世界、カタカナ・ひらがな", "안녕하세요 세계", "ㄱㅏ 각",
    "\U00020000\U0002ebf0\U00031350\U000323af", "😀😃😄", "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇫🇷🇩🇪", "❤️ ☺︎ #️⃣", "\u200d\u200b\u200c\ufeff\u2060",
    "a\u00a0b \u00a0 c\u00a0\u00a0", "a\u180eb \u180e \u180e\u180ex", "a\u2003b\u3000c\u1680d\u2028e\u2029f\u0085g\u000bh\u000ci",
    "\u001c\u001d\u001e\u001f x\u001cy", "\u0000\u0001\u0004\u0006\u0013\u0014\u0016\u007f", "a\u0004b\u0013\u0014 c",
    "def f(x):\n    if x == 0:\n\t\treturn  {'a': [1, 2]}  # done\n\n\n", "for(i=0;i<n;++i){a[i]+=b[i]*c;}//x",
    "<html><body class=\"x\">&nbsp;</body></html>", "https://example.com/a?b=c&d=%20#frag", "C:\\Users\\x\\y.txt",
    "SELECT * FROM t WHERE a='b';--", "$\\frac{1}{2}\\sum_{i=0}^\\infty x_i$", "!!!???...---___***", "\\n\\t\\u0041",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "a<|endoftext|>b <|im_start|>",
    "<|im_start|", "|im_start|>", "<|im_start|><|im_end|><|endoftext|><repo_name><file_sep>", "<s></s><unk><pad>",
    "\U000e0041\U000f0000\U0010fffd\U00050000 x", "\ud7ff\ue000\ufffd\ufffe\uffff", "Ġ Ċ Ã© âĢĻ ĉ", "\u00ad\u00ad a\u00adb",
    "𝓗𝓮𝓵𝓵𝓸 𝕳𝖊𝖑𝖑𝖔 Ｈｅｌｌｏ", "ᚠᚢᚦ ꙮ ࿄ ༄ ᠠᠡ ⠁⠂", "  leading", "trailing  ", " \t \n mixed \r\n \t", "a  \n\n  b   c    d\n   \n e",
]

# Ranges that random characters come from, with weights.
SCRIPTS = [
    (30, [(0x20, 0x7e)]), (10, [(0x61, 0x7a)]), (8, [(0x20, 0x20)]), (5, [(0x09, 0x0d)]), (4, [(0x30, 0x39)]),
    (2, [(0x00, 0x1f), (0x7f, 0xa0)]), (4, [(0xa0, 0x17f)]), (2, [(0x180, 0x2ff)]), (3, [(0x300, 0x36f)]),
    (3, [(0x370, 0x3ff)]), (4, [(0x400, 0x52f)]), (2, [(0x590, 0x5ff)]), (3, [(0x600, 0x6ff)]), (3, [(0x900, 0xdff)]),
    (2, [(0xe00, 0xfff)]), (2, [(0x1000, 0x17ff)]), (2, [(0x1800, 0x1fff), (0x180e, 0x180e)]),
    (4, [(0x2000, 0x206f), (0x2000, 0x200d)]), (2, [(0x2070, 0x2bff)]), (3, [(0x3000, 0x30ff)]), (5, [(0x4e00, 0x9fff)]),
    (2, [(0xa000, 0xabff)]), (3, [(0xac00, 0xd7a3)]), (1, [(0xe000, 0xf8ff)]), (2, [(0xf900, 0xffff)]),
    (2, [(0x10000, 0x11fff)]), (1, [(0x12000, 0x1bfff)]), (1, [(0x1d000, 0x1ffff)]), (5, [(0x1f300, 0x1faff)]),
    (1, [(0x20000, 0x323af)]), (1, [(0xe0000, 0xe01ff)]), (1, [(0x40000, 0x10ffff)]),
]
WEIGHTS = list(itertools.accumulate(weight for weight, _ in SCRIPTS))
PIECES = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'ſ", "  ", "\n\n", " \n", "\r\n", "\t\t", "    ",
          " the", "ing", "tion", "https://", "->", "!=", "==", "...", "\u200d", "\ufe0f", "\u00a0", "\u180e", "\u3000",
          "👩\u200d💻", "🇫🇷", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|", "|>", "ſ", "ß", "İ", "1,000", "3.14"]


def random_text(rng, vocabulary):
    style = rng.random()
    scripts = rng.choices(SCRIPTS, cum_weights=WEIGHTS, k=rng.randint(1, 4))
    out = []
    for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 30, 60))):
        kind = rng.random()
        if kind < 0.15:
            out.append(rng.choice(PIECES))
        elif kind < 0.3:
            out.append(rng.choice(vocabulary))
        elif kind < 0.36:
            first, last = rng.choice(rng.choice(scripts)[1])
            out.append(chr(rng.randint(first, last)) * rng.randint(2, 70))
        else:
            chosen = scripts if style < 0.5 else [rng.choices(SCRIPTS, cum_weights=WEIGHTS)[0]]
            first, last = rng.choice(rng.choice(chosen)[1])
            out.append(chr(rng.randint(first, last)))
        if rng.random() < 0.2:
            out.append(" ")
    text = "".join(c for c in "".join(out) if not 0xD800 <= ord(c) < 0xE000)
    if rng.random() < 0.1:
        text = unicodedata.normalize(rng.choice(("NFC", "NFD", "NFKC")), text)
    return text


def string(data):
    return struct.pack("<I", len(data)) + data


class Answers:
    """Reads the answers of encode_file in the order of the requests."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self):
        self.at += 4
        return struct.unpack_from("<I", self.data, self.at - 4)[0]

    def string(self):
        length = self.number()
        self.at += length
        return self.data[self.at - length:self.at]

    def error(self):
        return self.string().decode() if self.number() else None

    def ids(self):
        count = self.number()
        self.at += 4 * count
        return list(struct.unpack_from(f"<{count}I", self.data, self.at - 4 * count))


def ask(program, checkpoint, requests):
    with tempfile.TemporaryFile() as file:
        for request in requests:
            file.write(request)
        file.seek(0)
        done = subprocess.run([program, checkpoint], stdin=file, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"{program} ended with status {done.returncode}")
    return Answers(done.stdout)


def fallback_bytes(tokens, decoder):
    """The bytes of tokens whose decoder has byte fallback: what Hugging Face's gives unless bytes make no character."""
    out = b""
    for token in tokens:
        text = token.replace("\u2581", " ")
        is_byte = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        out += bytes([int(text[3:5], 16)]) if is_byte else text.encode()
    strips = any(step["type"] == "Strip" for step in decoder.get("decoders", []))
    return out[1:] if strips and out.startswith(b" ") else out


class Reference:
    """Hugging Face's tokenizer of a folder, with special tokens in a text kept as text."""

    def __init__(self, folder):
        path = os.path.join(folder, "tokenizer.json")
        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        with open(path, encoding="utf-8") as file:
            self.data = json.load(file)
        self.known = sorted(self.tokenizer.get_vocab().values())
        specials = [token["content"] for token in self.data["added_tokens"] if token["special"]]
        # Its unigram model takes such text for the token all the same.
        self.unsure = specials if self.data["model"]["type"] == "Unigram" else []

    def sure(self, text):
        return not any(special in text for special in self.unsure)

    def encode(self, texts, around=False):
        return [one.ids for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=around)]

    def decode(self, ids):
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        decoder = self.data["decoder"]
        if "\ufffd" in text and any(step["type"] == "ByteFallback" for step in decoder.get("decoders", [])):
            # It then replaces each byte of a run, also of its good characters.
            return fallback_bytes(map(self.tokenizer.id_to_token, ids), decoder).decode(errors="replace")
        return text


def differ(what, given, want, have):
    sys.exit(f"{what} differs\n given {given!r}\n want {want!r}\n have {have!r}")


def compare(program, folder, count, seed):
    """Compares encoding, prompts, decoding and streaming; a line of what was compared."""
    theirs = Reference(folder)
    rng = random.Random(seed)
    # With errors="replace" a token that is part of a character gives U+FFFD, which is fine here.
    vocabulary = [t for t in (theirs.tokenizer.decode([i], skip_special_tokens=False) for i in theirs.known) if t]
    texts = list(NASTY)
    texts += ["".join(rng.sample(NASTY, 4)) for _ in range(60)]
    texts += [random_text(rng, vocabulary) for _ in range(count)]
    texts = [text for text in texts if theirs.sure(text)]
    expected = theirs.encode(texts)
    for request, want in ((b"e", expected), (b"p", theirs.encode(texts[:500], True))):
        ours = ask(program, folder, (request + string(text.encode()) for text, _ in zip(texts, want)))
        for text, ids in zip(texts, want):
            error = ours.error()
            found = error if error else ours.ids()
            if found != ids:
                differ(f"encode ({request.decode()})", text, ids, found)

    # Random ids need not be whole characters: Hugging Face replaces what is not, as Python does.
    lists = expected[:1500] + [rng.choices(theirs.known, k=rng.randint(0, 12)) for _ in range(count // 5 + 300)]
    for request in (b"d", b"s"):
        ours = ask(program, folder, (request + struct.pack(f"<I{len(ids)}I", len(ids), *ids) for ids in lists))
        for ids in lists:
            error = ours.error()
            found = error if error else ours.string().decode(errors="replace" if request == b"d" else "strict")
            want = theirs.decode(ids)
            if found != want:
                differ(f"decode ({request.decode()})", ids, want, found)
    return f"{len(texts)} texts give the same {sum(map(len, expected))} ids, {len(lists)} id lists the same text"


def compare_texts(program, folder, texts):
    """Compares encoding alone."""
    expected = Reference(folder).encode(texts)
    ours = ask(program, folder, (b"e" + string(text.encode()) for text in texts))
    for text, ids in zip(texts, expected):
        error = ours.error()
        found = error if error else ours.ids()
        if found != ids:
            differ("encode", text, ids, found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("checkpoint")
    parser.add_argument("--random", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(compare(args.program, args.checkpoint, args.random, args.seed))


if __name__ == "__main__":
    main()
