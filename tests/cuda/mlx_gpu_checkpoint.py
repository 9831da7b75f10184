#!/usr/bin/env python3
"""Checks of qmlp.mlx on a GPU with a real checkpoint: mlx_gpu_checkpoint.py MODEL [NAME...]

MODEL: a folder that mlx_lm.load reads, of a chat model small enough to be loaded twice (SmolLM2-135M).
Patched and unpatched models run in the types of the checkpoint's scales. Prints a line for each check
and ends with status 1 when one failed. Texts may part where the unpatched model's two best logits are
within GAP of each other; from there on they are two texts.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as caches

import qmlp.mlx

from mlx_checks import NotRun, check, compare_logits, main, need, same

GAP = {mx.float16: 0.05, mx.bfloat16: 0.3}
# Mean over positions, of the patched model's distribution from the unpatched one's.
MOST_KL = {mx.float16: 1e-4, mx.bfloat16: 5e-3}
PROMPTS = ("What is the capital of France?", "Write a short poem about the sea.",
           "Explain why the sky is blue, in two sentences.", "Name five fruits and a color for each.",
           "What is 12 times 11?")
FOLDER = None


@functools.cache
def loaded(patched):
    """The model as it is and, loaded again, patched."""
    model, tokenizer = mlx_lm.load(str(FOLDER))
    if patched:
        report = qmlp.mlx.patch(model)
        need(report.device.startswith("cuda"), str(report))
        need(not report.left, str(report))
    return model, tokenizer


def dtype_of(model):
    return model.model.norm.weight.dtype


def prompt_ids(text):
    return loaded(False)[1].apply_chat_template([{"role": "user", "content": text}],
                                                add_generation_prompt=True)


def tokens_of(model, ids, count, **options):
    ends = loaded(False)[1].eos_token_ids
    found = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=count, **options):
        found.append(int(token))
        if found[-1] in ends:
            break
    return found


def compare_texts(ids, got, want, dtype=None):
    """Until the texts end, or part at a near tie of the unpatched model: the number of equal tokens."""
    for n, (a, b) in enumerate(zip(got, want)):
        if a == b:
            continue
        logits = loaded(False)[0](mx.array([ids + want[:n]]))[0, -1].astype(mx.float32)
        gap = float(logits[b] - logits[a])
        most = GAP[dtype or dtype_of(loaded(False)[0])]
        need(abs(gap) < most, f"token {n}: {a}, not {b}, whose logit is larger by {gap}")
        return n
    need(len(got) == len(want), f"{len(got)} tokens, not {len(want)}")
    return len(want)


def compare_all(answers, wanted, ids):
    equal = [compare_texts(i, a, b) for i, a, b in zip(ids, answers, wanted)]
    return f"{sum(equal)} of {sum(map(len, wanted))} tokens equal before a near tie"


@functools.cache
def unpatched_texts(count=48):
    return [tokens_of(loaded(False)[0], prompt_ids(text), count) for text in PROMPTS]


# ---- text and numbers ----


@check
def greedy_text():
    ids = [prompt_ids(text) for text in PROMPTS]
    answers = [tokens_of(loaded(True)[0], i, 48) for i in ids]
    need("Paris" in loaded(True)[1].decode(answers[0]), loaded(True)[1].decode(answers[0]))
    return compare_all(answers, unpatched_texts(), ids)


@check
def logits():
    """KL divergence over texts of both models, by one pass, and the last 24 tokens by one."""
    last = 24
    details = []
    for dtype in (None, mx.bfloat16):
        plain, _ = mlx_lm.load(str(FOLDER))
        other, _ = mlx_lm.load(str(FOLDER))
        for model in (plain, other):
            if dtype is not None:
                model.set_dtype(dtype)
        qmlp.mlx.patch(other)
        dtype = dtype_of(plain)
        for stepped in (False, True):
            kls, equal, positions, worst = [], [], 0, 0.0
            for text, answer in zip(PROMPTS, unpatched_texts()):
                ids = mx.array([prompt_ids(text) + answer])
                rows = []
                for model in (plain, other):
                    kv = caches.make_prompt_cache(model)
                    cuts = [ids.shape[1] - last] + [1] * last if stepped else [ids.shape[1]]
                    out, at = [], 0
                    for cut in cuts:
                        out.append(model(ids[:, at:at + cut], cache=kv))
                        at += cut
                    rows.append(mx.concatenate(out[stepped:], axis=1).astype(mx.float32))
                kl, agree, most = compare_logits(*rows)
                count = rows[0].shape[1]
                kls.append(kl * count)
                equal.append(agree * count)
                positions += count
                worst = max(worst, most)
            kl, agree = sum(kls) / positions, sum(equal) / positions
            need(kl < MOST_KL[dtype] and agree > 0.97, f"{dtype}: KL {kl}, best token equal {agree}")
            details.append(f"{str(dtype).split('.')[-1]} {'by one' if stepped else 'one pass'}, {positions} positions: "
                           f"KL {kl:.1e}, best token equal {agree:.4f}, logits within {worst:.2g}")
    return "; ".join(details)


# ---- caches ----


@check
def saved_prompt_cache():
    model, _ = loaded(True)
    ids = prompt_ids(PROMPTS[1])
    kv = caches.make_prompt_cache(model)
    mx.eval(model(mx.array([ids[:-1]]), cache=kv))
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "cache.safetensors")
        caches.save_prompt_cache(path, kv)
        again = caches.load_prompt_cache(path)
    straight = tokens_of(model, ids[-1:], 40, prompt_cache=kv)
    reloaded = tokens_of(model, ids[-1:], 40, prompt_cache=again)
    need(straight == reloaded, "another text after loading")
    (whole,) = [tokens_of(model, ids, 40)]
    compare_texts(ids, straight, whole)
    return f"{len(straight)} tokens"


def other_cache(make, most, **options):
    """KL over the texts, fed token by token through caches that `make` makes of filled ones; then the
    patched model's own text with such a cache."""
    kls, equal, positions = 0.0, 0.0, 0
    for text, answer in zip(PROMPTS, unpatched_texts()):
        ids, rows = mx.array([prompt_ids(text) + answer]), []
        prompt = ids.shape[1] - len(answer)
        for patched in (False, True):
            model = loaded(patched)[0]
            kv = make(model, ids[:, :prompt])
            out = [model(ids[:, at:at + 1], cache=kv) for at in range(prompt, ids.shape[1])]
            rows.append(mx.concatenate(out, axis=1).astype(mx.float32))
        kl, agree, _ = compare_logits(*rows)
        kls, equal, positions = (kls + kl * len(answer), equal + agree * len(answer),
                                 positions + len(answer))
    kl, agree = kls / positions, equal / positions
    need(kl < most and agree > 0.9, f"KL {kl}, best token equal {agree}")
    count = len(tokens_of(loaded(True)[0], prompt_ids(PROMPTS[1]), 40, **options))
    need(count == 40, f"a text of {count} tokens")
    return f"KL {kl:.1e}, best token equal {agree:.3f} of {positions}"


@check
def quantized_cache():
    def make(bits):
        def quantized(model, ids):
            kv = caches.make_prompt_cache(model)
            mx.eval(model(ids, cache=kv))
            return [c.to_quantized(group_size=64, bits=bits) for c in kv]
        return quantized

    # MLX has no such product for every shape on every backend.
    refused = {patched: refusal_of(loaded(patched)[0], make(8)) for patched in (False, True)}
    need(refused[True] == refused[False], f"refusals: patched {refused[True]}, alone {refused[False]}")
    if refused[False] is not None:
        raise NotRun(f"MLX alone: {refused[False]}; patched the same")
    return "; ".join(f"{bits} bits: " + other_cache(make(bits), most, kv_bits=bits, quantized_kv_start=start)
                     for bits, most, start in ((8, 1e-2, 0), (8, 1e-2, 50), (4, 0.2, 0)))


def refusal_of(model, make):
    """What a model says that cannot take a token with such a cache; None for one that can."""
    ids = mx.array([prompt_ids(PROMPTS[0])])
    try:
        mx.eval(model(ids[:, -1:], cache=make(model, ids[:, :-1])))
    except (RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[0]
    return None


@check
def rotating_cache():
    """A window smaller than prompt and answer."""
    def make(model, ids):
        kv = [caches.RotatingKVCache(max_size=48, keep=4) for _ in model.layers]
        mx.eval(model(ids, cache=kv))
        return kv

    return other_cache(make, 1e-2, max_kv_size=48)


# ---- ways to generate ----


@check
def batch_generation():
    model, tokenizer = loaded(True)
    ids = [prompt_ids(text) for text in PROMPTS]
    wanted = [tokens_of(model, i, 40) for i in ids]
    answers = mlx_lm.batch_generate(model, tokenizer, ids, max_tokens=40, verbose=False,
                                    return_token_ids=True, return_prompt_caches=True)
    ends = tokenizer.eos_token_ids
    trimmed = [[t for t in tokens if t not in ends] for tokens in wanted]
    got = [[t for t in tokens if t not in ends] for tokens in answers.token_ids]
    equal = sum(compare_texts(i, a[:len(b)], b[:len(a)]) for i, a, b in zip(ids, got, trimmed))
    # Sequences that come while others are being answered, of which some end early.
    made = BatchGenerator(model, stop_tokens=[[t] for t in ends])
    first = made.insert(ids[:2], [30, 5])
    found = {}
    for n in range(200):
        if n == 3:
            first += made.insert(ids[2:], [12, 30, 8])
        responses = made.next_generated()
        if not responses and n > 3:
            break
        for r in responses:
            if r.finish_reason != "stop":
                found.setdefault(r.uid, []).append(r.token)
    made.close()
    for uid, i, limit, want in zip(first, ids, (30, 5, 12, 30, 8), trimmed):
        got = found[uid]
        need(len(got) <= limit, f"{len(got)} tokens of {limit}")
        compare_texts(i, got, want[:len(got)])
    # A batch goes on from caches of its own.
    more = mlx_lm.batch_generate(model, tokenizer, [[t] for t in (28, 28)], max_tokens=6, verbose=False,
                                 prompt_caches=answers.caches[:2])
    need(len(more.texts) == 2, str(more))
    return f"{equal} of {sum(map(len, trimmed))} tokens equal to each sequence's own; 5 sequences joining"


@check
def speculative_decoding():
    from mlx_lm.generate import speculative_generate_step

    model, _ = loaded(True)
    drafted = total = 0
    for text, plain in zip(PROMPTS[:3], unpatched_texts()):
        ids = prompt_ids(text)
        want = tokens_of(model, ids, 40)
        got = []
        for token, _, from_draft in speculative_generate_step(mx.array(ids), model, model, max_tokens=40,
                                                              num_draft_tokens=3):
            got.append(int(token))
            drafted += from_draft
            total += 1
            if len(got) == len(want):
                break
        compare_texts(ids, got, want)
        compare_texts(ids, got[:len(plain)], plain[:len(got)])
    need(drafted > total / 2, f"{drafted} of {total} tokens are the draft's")
    return f"{drafted} of {total} tokens are the draft's"


# ---- training ----


@check
def lora_and_saving():
    import mlx.optimizers as optim
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import save_model

    model, _ = mlx_lm.load(str(FOLDER))
    before = dict(tree_flatten(model.parameters()))
    mx.eval(before)
    qmlp.mlx.patch(model)
    with tempfile.TemporaryDirectory() as folder:
        save_model(pathlib.Path(folder), model)
        saved = {}
        for path in pathlib.Path(folder).glob("*.safetensors"):
            saved.update(mx.load(str(path)))
        need(saved.keys() == before.keys(), "other names were saved")
        for name, value in before.items():
            need(saved[name].dtype == value.dtype and same(saved[name], value), f"saved {name}")
    del saved, before
    qmlp.mlx.patch(model)
    model.freeze()
    mx.random.seed(1)
    linear_to_lora_layers(model, 8, {"rank": 8, "scale": 4.0, "dropout": 0.0})
    ids = mx.array([prompt_ids(PROMPTS[0]) + unpatched_texts()[0]])
    optimizer = optim.Adam(learning_rate=1e-4)

    def loss(m):
        return nn.losses.cross_entropy(m(ids[:, :-1]).astype(mx.float32), ids[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)
    series = []
    for _ in range(6):
        value, gradient = step(model)
        optimizer.update(model, gradient)
        mx.eval(model.trainable_parameters(), value)
        series.append(float(value))
    need(all(np.isfinite(series)) and series[-1] < series[0], str(series))
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "adapters.safetensors")
        mx.save_safetensors(path, dict(tree_flatten(model.trainable_parameters())))
        tuned = model(ids)
        mx.eval(tuned)
        again, _ = mlx_lm.load(str(FOLDER))
        qmlp.mlx.patch(again)
        again.freeze()
        linear_to_lora_layers(again, 8, {"rank": 8, "scale": 4.0, "dropout": 0.0})
        again.load_weights(path, strict=False)
        need(same(again(ids), tuned), "adapters saved and loaded")
    return f"weights saved bit for bit; loss {series[0]:.3f} to {series[-1]:.3f}; adapters saved and loaded"


# ---- commands ----


def command(*arguments):
    return subprocess.Popen([sys.executable, "-m", "qmlp.mlx", *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "HF_HUB_OFFLINE": "1"})


@check
def commands():
    out, err = command("generate", FOLDER, "--prompt", PROMPTS[0], "--max-tokens", 10, "--temp",
                       0).communicate(timeout=120)
    need("Paris" in out and "fused MLP" in err, out + err)
    out, err = command("bench", FOLDER, "--quiet", "-p", 128, "-g", 32, "-n", 2).communicate(timeout=120)
    averages = re.search(r"Averages: (.*)", out)
    need(averages is not None, out + err)
    return f"generate; bench: {averages.group(1)}"


@check
def server():
    """mlx_lm.server, patched, answering several clients at once."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = command("server", FOLDER, "--port", port, "--temp", "0")
    said = []
    readers = [threading.Thread(target=lambda s=s: said.extend(s)) for s in (process.stdout, process.stderr)]
    for reader in readers:
        reader.start()

    def ask(text, stream=False):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/chat/completions", json.dumps({
            "messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0,
            "stream": stream}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read().decode()
        need(answer.status == 200, f"{answer.status}: {body}")
        if not stream:
            return json.loads(body)["choices"][0]["message"]["content"]
        pieces = [json.loads(line[6:]) for line in body.splitlines()
                  if line.startswith("data: {")]
        return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces
                       if piece.get("choices"))

    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                first = ask(PROMPTS[0])
                break
            except ConnectionRefusedError:
                need(process.poll() is None and time.monotonic() < deadline, "".join(said[-20:]))
                time.sleep(0.2)
        need("Paris" in first, first)
        alone = [ask(text) for text in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [(text, stream) for stream in (False, True) for text in PROMPTS]
            together = list(pool.map(lambda a: ask(*a), asked))
        alike = sum(a == b for a, b in zip(together, alone * 2))
        need(all("Paris" in together[i] for i in (0, 5)), str(together))
        need(all(len(text) > 4 for text in together), str(together))
        need(ask(PROMPTS[0]) == first, "the first question, asked again, has another answer")
    finally:
        process.terminate()
        process.wait(30)
        for reader in readers:
            reader.join(30)
    need(any("fused MLP" in line for line in said), "".join(said[:20]))
    return f"10 requests of 8 clients at once, {alike} answers as when asked alone"


if __name__ == "__main__":
    if len(sys.argv) < 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    FOLDER = pathlib.Path(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
