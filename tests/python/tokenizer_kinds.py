"""Tokenizers with the structure of published families over small vocabularies trained here.

build(folder) writes NAME/tokenizer.json for each and returns the names. The vocabularies come from the
trainers of `tokenizers` and `sentencepiece`; normalizers, pre-tokenizers, decoders, post-processors and added
tokens are those of the families' own files.
"""
import base64
import functools
import io
import json
import pathlib
import sys
import sysconfig

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from check_tokenizer import NASTY

MARK = "\u2581"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
          r"|\s*[\r\n]|\s+(?!\S)|\s+")
DEEPSEEK = ("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **changes}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def metaspace(scheme="always", cut=True):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": cut}


def replace(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def prepend():
    return {"type": "Prepend", "prepend": MARK}


def sequence(member, *steps):
    return {"type": "Sequence", member: list(steps)}


def added(token_id, content, special=True, **changes):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special, **changes}


def template(bos=None, eos=None):
    parts = ([{"SpecialToken": {"id": bos[0], "type_id": 0}}] if bos else []) + [{"Sequence": {"id": "A", "type_id": 0}}]
    parts += [{"SpecialToken": {"id": eos[0], "type_id": 0}}] if eos else []
    pair = parts + [{"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in filter(None, (bos, eos))}
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": tokens}


SP_DECODER = sequence("decoders", replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                      {"type": "Strip", "content": " ", "start": 1, "stop": 0})
BYTE_DECODER = byte_level(add_prefix_space=True)
S_TEMPLATE = template(("<s>", 1))
S_TOKENS = [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")]


@functools.cache
def corpus():
    """Python's own sources and many scripts: on every machine, and large enough for some thousand tokens."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    lines = []
    for name in ("argparse.py", "textwrap.py", "random.py", "statistics.py", "typing.py"):
        lines += (library / name).read_text(encoding="utf-8").splitlines()
    lines += [text for text in NASTY if len(text) < 400] * 4
    return [line for line in lines if line.strip()]


@functools.cache
def byte_bpe(size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    return json.loads(tokenizer.to_str())["model"]


@functools.cache
def spm(kind, **options):
    """A trained SentencePiece model, serialized."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=out, model_type=kind, minloglevel=2,
        max_sentence_length=100000, num_threads=1, input_sentence_size=0, hard_vocab_limit=False, **options)
    return out.getvalue()


def pieces(data):
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(data)
    return model


def merges_of(vocab, scores):
    """Every way to make a piece of two others, best score first."""
    merges = []
    for piece, score in scores.items():
        parts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        merges += [(score, *part) for part in sorted(parts, key=lambda part: (vocab[part[0]], vocab[part[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


@functools.cache
def sp_bpe(**options):
    defaults = {"vocab_size": 2400, "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "character_coverage": 0.9995, "split_digits": True}
    model = pieces(spm("bpe", **{**defaults, **options}))
    vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": vocab, "merges": merges_of(vocab, normal)}


@functools.cache
def sp_unigram(**options):
    """The model and the compiled character map of its normalizer."""
    model = pieces(spm("unigram", **{"vocab_size": 2000, "character_coverage": 0.999, **options}))
    vocab = [[piece.piece, piece.score] for piece in model.pieces]
    return ({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": options.get("byte_fallback", False)},
            base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode())


def tokenizer(model, normalizer=None, pre_tokenizer=None, decoder=None, post_processor=None, added_tokens=()):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added_tokens),
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": post_processor,
            "decoder": decoder, "model": model}


def byte_kind(pre_tokenizer, specials, normalizer=None, post_processor=None, size=2000, more=(), **changes):
    model = {**byte_bpe(size), **changes}
    first = max(model["vocab"].values()) + 1
    tokens = [added(first + i, text) for i, text in enumerate(specials)]
    tokens += [{**token, "id": first + len(specials) + i} for i, token in enumerate(more)]
    return tokenizer(model, normalizer, pre_tokenizer, BYTE_DECODER, post_processor, tokens)


def byte_level_kinds():
    llama3_specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    after = max(byte_bpe(2000)["vocab"].values()) + 1
    im = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = byte_level(use_regex=False)
    yield "gpt2", byte_kind(byte_level(), ["<|endoftext|>"], post_processor=byte_level())
    yield "llama3", byte_kind(sequence("pretokenizers", split(LLAMA3), plain), llama3_specials,
                              post_processor=sequence("processors", byte_level(), template(("<|begin_of_text|>", after))),
                              ignore_merges=True)
    yield "qwen2", byte_kind(sequence("pretokenizers", split(QWEN2), plain), im, normalizer={"type": "NFC"},
                             post_processor=byte_level())
    yield "qwen3", byte_kind(sequence("pretokenizers", split(QWEN2), plain), im, normalizer={"type": "NFC"},
                             more=[added(0, text, False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    yield "smollm2", byte_kind(sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, byte_level()), im)
    yield "smollm3", byte_kind(sequence("pretokenizers", split(LLAMA3), plain), llama3_specials + ["<|im_end|>"],
                               more=[added(0, "<think>", False), added(0, "</think>", False)], ignore_merges=True)
    yield "granite3", byte_kind(sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, byte_level()),
                                ["<|end_of_text|>", "<fim_prefix>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
                                post_processor=byte_level())
    yield "tekken", byte_kind(sequence("pretokenizers", split(TEKKEN), plain), ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
                              post_processor=template(("<s>", after + 1)), ignore_merges=True)
    yield "o200k", byte_kind(sequence("pretokenizers", split(O200K), plain), ["<|endoftext|>"])
    yield "cl100k", byte_kind(sequence("pretokenizers", split(CL100K, "Removed", True), plain), ["<|endoftext|>"])
    yield "deepseek", byte_kind(
        sequence("pretokenizers", split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"), split(DEEPSEEK), plain),
        ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"],
        post_processor=template(("<\uff5cbegin\u2581of\u2581sentence\uff5c>", after)))
    # Every behaviour, and added tokens of every sort.
    yield "steps", byte_kind(sequence(
        "pretokenizers", split(r"\s+", "MergedWithPrevious"), split(r"\p{Lu}", "MergedWithNext"), split(r"[\d.,]", "Contiguous"),
        split("x", "Removed", kind="String"), split(r"[^\S\n]+|\P{L}", "Isolated", True),
        {"type": "Punctuation", "behavior": "MergedWithNext"}, byte_level()), ["<|endoftext|>"], more=[
            added(0, "zebra", False, single_word=True), added(0, "<pre>", False, lstrip=True), added(0, "<post>", False, rstrip=True),
            added(0, "\u6f22\u5b57", False, normalized=True), added(0, "  ", False, normalized=True, lstrip=True, rstrip=True),
            added(0, "<b>", False, single_word=True, lstrip=True, rstrip=True), added(0, "\u00e9t\u00e9", False, normalized=True)],
        normalizer={"type": "NFD"})


def sp_bpe_kinds():
    legacy = sequence("normalizers", prepend(), replace(" ", MARK))
    size = len(sp_bpe()["vocab"])
    yield "llama2", tokenizer(sp_bpe(), legacy, None, SP_DECODER, S_TEMPLATE, S_TOKENS)
    # Older files hold merges as strings and look for special tokens in normalized text.
    old = {**sp_bpe(), "merges": [" ".join(merge) for merge in sp_bpe()["merges"]]}
    yield "llama2_old", tokenizer(old, legacy, None, SP_DECODER, template(("<s>", 1), ("</s>", 2)),
                                  [{**token, "normalized": True} for token in S_TOKENS]
                                  + [added(size, "<pad>", False, normalized=True)])
    yield "mistral3", tokenizer(sp_bpe(), None, metaspace("first", False), SP_DECODER, S_TEMPLATE,
                                S_TOKENS + [added(size + i, text) for i, text in enumerate(
                                    ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"])])
    yield "phi3", tokenizer(sp_bpe(), legacy, None, SP_DECODER, S_TEMPLATE, [
        added(0, "<unk>"), added(1, "<s>"), added(2, "</s>", False, rstrip=True), added(size, "<|endoftext|>"),
        added(size + 1, "<|assistant|>", rstrip=True), added(size + 2, "<|user|>", rstrip=True), added(size + 3, "<|end|>", rstrip=True),
        added(size + 4, "<|placeholder|>", False, rstrip=True)])
    yield "minicpm", tokenizer(sp_bpe(vocab_size=3000, character_coverage=0.99, split_digits=False), legacy, None, SP_DECODER,
                               S_TEMPLATE, S_TOKENS)
    yield "gemma", tokenizer(sp_bpe(), replace(" ", MARK), split(" ", "MergedWithPrevious", kind="String"),
                             sequence("decoders", replace(MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}), S_TEMPLATE,
                             S_TOKENS + [added(size, "\n\n", False), added(size + 1, MARK * 4, False), added(size + 2, "<b>", False)])
    for scheme in ("first", "always", "never"):
        for cut in (True, False):
            yield f"metaspace_{scheme}_{'split' if cut else 'whole'}", tokenizer(
                sp_bpe(), None, metaspace(scheme, cut), metaspace(scheme, cut), S_TEMPLATE,
                S_TOKENS + [added(size, "<b>", False), added(size + 1, "zebra", False, lstrip=True, single_word=True)])
    lacking = json.loads(json.dumps(sp_bpe()))
    for byte in (0xE4, 0xF0, 0xCC, 0x09):
        del lacking["vocab"][f"<0x{byte:02X}>"]
    for fuse in (True, False):
        yield f"lacking_{'fused' if fuse else 'single'}", tokenizer({**lacking, "fuse_unk": fuse}, legacy, None, SP_DECODER, None, S_TOKENS)
    yield "no_unknown", tokenizer({**lacking, "unk_token": None, "byte_fallback": False}, legacy, None, SP_DECODER, None, S_TOKENS)
    yield "whole_words", tokenizer({**sp_bpe(), "ignore_merges": True}, None, sequence(
        "pretokenizers", {"type": "WhitespaceSplit"}, metaspace(), {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": False}), SP_DECODER, None, S_TOKENS)
    yield "words", tokenizer(sp_bpe(), sequence("normalizers", {"type": "NFKD"}, {"type": "Nmt"}), {"type": "Whitespace"},
                             SP_DECODER, None, S_TOKENS + [added(size, "  ", False, rstrip=True)])
    # Merges that reach over a word's start.
    crossing = json.loads(json.dumps(sp_bpe()))
    for word in ("a" + MARK, "a" + MARK + "b", "s" + MARK, "." + MARK, MARK + "a" + MARK):
        crossing["vocab"][word] = len(crossing["vocab"])
        crossing["merges"].insert(7, [word[:-1], word[-1]])
    yield "crossing", tokenizer(crossing, legacy, None, SP_DECODER, None, S_TOKENS)


def unigram_kinds():
    model, charsmap = sp_unigram()
    precompiled = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    tokens = [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")]
    yield "t5", tokenizer(model, sequence("normalizers", precompiled, {"type": "Strip", "strip_left": False, "strip_right": True},
                                          replace(" {2,}", MARK, "Regex")),
                          metaspace(), metaspace(), template(eos=("</s>", 2)), tokens)
    yield "xlmr", tokenizer(model, precompiled, sequence("pretokenizers", {"type": "WhitespaceSplit"}, metaspace()), metaspace(),
                            template(("<s>", 1), ("</s>", 2)), tokens)
    fallback, _ = sp_unigram(byte_fallback=True, vocab_size=2200, character_coverage=0.99)
    yield "unigram_bytes", tokenizer(fallback, sequence("normalizers", {"type": "NFKC"}, replace(" ", MARK), prepend()), None,
                                     SP_DECODER, S_TEMPLATE, tokens + [added(len(fallback["vocab"]), "<b>", False)])


def step_kinds():
    """One step each over a vocabulary of single bytes, so that ids show what it did to any character."""
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": True, "ignore_merges": False, "merges": [],
             "vocab": {"<unk>": 0, MARK: 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}}
    decoder = sequence("decoders", {"type": "ByteFallback"}, {"type": "Fuse"})
    _, charsmap = sp_unigram()
    normalizers = {form: {"type": form} for form in ("NFC", "NFD", "NFKC", "NFKD", "Nmt")}
    normalizers["Precompiled"] = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    normalizers["Replace"] = replace(r"[^\p{L}\s]+|\w", "-", "Regex")
    for name, normalizer in normalizers.items():
        yield f"step_{name}", tokenizer(model, normalizer, None, decoder)
    pre_tokenizers = {name: {"type": name} for name in ("Whitespace", "WhitespaceSplit")}
    pre_tokenizers["Digits"] = {"type": "Digits", "individual_digits": True}
    pre_tokenizers["Punctuation"] = {"type": "Punctuation", "behavior": "Isolated"}
    for name in ("L", "N", "P", "S", "M", "Lu", "Ll", "Lt", "Lm", "Lo", "Nd"):
        pre_tokenizers[f"Split_{name}"] = split(rf"\p{{{name}}}")
    pre_tokenizers["Split_space"] = split(r"\s")
    pre_tokenizers["Split_word"] = split(r"\w+")
    pre_tokenizers["Split_no_word"] = split(r"\W")
    pre_tokenizers["Split_class"] = split(r"[^\w\p{P}]|[\w.]")
    for name, step in pre_tokenizers.items():
        # A mark shows where each piece starts.
        yield f"step_{name}", tokenizer(model, None, sequence("pretokenizers", step, metaspace(cut=False)), decoder)


def build(folder):
    names = []
    for kinds in (byte_level_kinds, sp_bpe_kinds, unigram_kinds, step_kinds):
        for name, data in kinds():
            path = pathlib.Path(folder) / name
            path.mkdir(parents=True, exist_ok=True)
            (path / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
            names.append(name)
    return names


if __name__ == "__main__":
    print(*build(sys.argv[1]))
