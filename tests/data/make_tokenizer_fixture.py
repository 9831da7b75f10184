#!/usr/bin/env python3
"""Writes tests/data/tokenizer/: small tokenizers with what Hugging Face makes of nasty texts.

Needs the packages tokenizers and transformers (with jinja2). Made with tokenizers 0.23.3 and
transformers 5.24.0: make_tokenizer_fixture.py [OUTPUT]
"""

import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
from check_tokenizer import NASTY  # noqa: E402
from chat_templates import CHATML_SYSTEM, TEMPLATES  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ENGLISH = """The quick brown fox jumps over the lazy dog while the other dogs are watching and waiting.
What is the capital of France? The capital of France is Paris, and there are more than two million people.
You are a helpful assistant. Write the answer in one sentence, then explain why it is right.
    for (int i = 0; i < count; ++i) { total += values[i]; }  // the sum of the values
def main(arguments):\n    return [value for value in arguments if value is not None]\n"""

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **changes}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def added(token_id, content, **changes):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False, **changes}


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=640, special_tokens=[AddedToken(t, special=True) for t in SPECIAL],
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    corpus = [ENGLISH] * 20 + [text for text in NASTY if len(text) < 200 and "<|" not in text]
    tokenizer.train_from_iterator(corpus, trainer)
    return json.loads(tokenizer.to_str())


def without_bytes(data, letters):
    """As in SmolLM2, whose vocabulary lacks some bytes: their ids become holes."""
    for letter in letters:
        del data["model"]["vocab"][letter]
    vocab = data["model"]["vocab"]
    data["model"]["merges"] = [m for m in data["model"]["merges"] if all(x in vocab for x in (*m, m[0] + m[1]))]
    return data


def variants(base):
    def make(pre_tokenizer, **model):
        data = json.loads(json.dumps(base))
        data["pre_tokenizer"] = pre_tokenizer
        data["model"].update(model)
        return data

    size = max(base["model"]["vocab"].values()) + 1
    smollm = without_bytes(make(sequence({"type": "Digits", "individual_digits": True}, byte_level())), "ĄÀÁÿ")
    # Older files hold merges as strings.
    smollm["model"]["merges"] = [" ".join(merge) for merge in smollm["model"]["merges"]]
    llama3 = make(sequence(split(LLAMA3), byte_level(use_regex=False)), ignore_merges=True)
    # A word that no merge makes: only ignore_merges finds them.
    assert "ĠLyon" not in llama3["model"]["vocab"]
    llama3["model"]["vocab"]["ĠLyon"] = size
    llama3["added_tokens"] += [
        added(size + 1, "<think>"), added(size + 2, "</think>", lstrip=True), added(size + 3, "<|tool|>", rstrip=True),
        added(size + 4, "   ", normalized=True), added(size + 5, "漢字", normalized=True),
        added(size + 6, "<|hidden|>", special=True), added(size + 7, "hidden"),
    ]
    nfc = make(sequence(split(LLAMA3.replace("{1,3}", "")), byte_level(use_regex=False)))
    nfc["normalizer"] = {"type": "NFC"}
    unknown = without_bytes(make(byte_level(add_prefix_space=True), unk_token=SPECIAL[0], fuse_unk=True), "ĄÀÁÿĠé")
    steps = make(sequence(split(r"\s+", "MergedWithPrevious"), split(r"\p{Lu}", "MergedWithNext"),
                          split(r"[\d.,]", "Contiguous"), split("x", "Removed", kind="String"),
                          split(r"[^\S\n]+|\P{L}", "Isolated", True), byte_level()))
    return {"smollm": smollm, "llama3": llama3, "nfc": nfc, "unknown": unknown, "steps": steps}


def texts():
    rng = random.Random(3)
    out = [text if len(text) < 1200 else text[:1200] for text in NASTY]
    out += ["The capital of France is Paris.", " Lyon", "Lyon", "x Lyon Lyon's", "<think>\n a </think> b <|tool|>  \n c",
            "  </think></think>  x", "a   b    c       d", "漢字漢字 漢", "<|hidden|> hidden <|hiddenhidden|>", "e\u0301 é \u212b \u1e9b\u0323 각"]
    out += ["".join(rng.sample([text[:80] for text in NASTY], 3)) for _ in range(60)]
    return out


def conversations():
    rng = random.Random(4)
    roles = ["user", "assistant", "system", "user", "assistant", "tool"]
    parts = ["Hello", " there", "\n", " ", "\t", "é😀", "\u00a0", "\u001c", "</think>", "<tool_response>", "</tool_response>", "a", "\\n"]
    out = [[{"role": "user", "content": "What is the capital of France?"}],
           [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "  Bye\n\n"}],
           [{"role": "user", "content": ""}], [{"role": "user", "content": "\n\n x"}]]
    for _ in range(20):
        out.append([{"role": rng.choice(roles), "content": "".join(rng.choices(parts, k=rng.randint(0, 6)))}
                    for _ in range(rng.randint(1, 4))])
    return out


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "tokenizer"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
              "unk_token": {"content": "<|endoftext|>", "special": True}, "chat_template": CHATML_SYSTEM}
    for name, data in variants(train()).items():
        folder = out / name
        write(folder / "tokenizer.json", data)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.encode_special_tokens = True
        cases = []
        for text in texts():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False)})
        (folder / "expected.json").write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
    write(out / "smollm" / "tokenizer_config.json", config)

    model = PreTrainedTokenizerFast(tokenizer_file=str(out / "smollm" / "tokenizer.json"), bos_token="<|im_start|>",
                                    eos_token="<|im_end|>", unk_token="<|endoftext|>")
    chats = []
    for name, template in TEMPLATES.items():
        model.chat_template = template
        cases = []
        for messages in conversations():
            try:
                text = model.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                ids = model(text, add_special_tokens=False)["input_ids"]
            except Exception:  # what the template raises
                text, ids = None, None
            cases.append({"messages": messages, "text": text, "ids": ids})
        chats.append({"name": name, "template": template, "cases": cases})
    (out / "chat.json").write_text("[\n" + ",\n".join(map(json.dumps, chats)) + "\n]\n")


if __name__ == "__main__":
    main()
