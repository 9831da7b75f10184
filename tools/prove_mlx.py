#!/usr/bin/env python3
"""Proves on a model of any size that qmlp.mlx.patch changes no text, on the CPU at f32.

    tools/prove_mlx.py MODEL [--tokens N] [--steps N] [--own-half N] [--json FILE]

MODEL is a checkpoint folder, or random:135m, random:1b, random:1b-mixed, which are made on the fly
(tools/random_model.py). Checked, each exactly:
  - a prompt of N random tokens in one pass, in pieces and token by token: equal bits;
  - greedy decoding for some steps after it; then MLX alone reads prompt and answer in one pass, and its
    best token is the patched model's wherever its two best logits are more than 1e-3 apart.
Reported: the largest difference of logits, and agreement of bf16 with f32 (patched; with --own-half,
MLX alone over as many positions, at seconds to minutes a token). Status 1 when a check fails.
"""
import argparse
import gc
import json
import pathlib
import sys
import tempfile
import time

import numpy

import random_model

GAP = 1e-3


def load(folder, dtype):
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(pathlib.Path(folder))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def rows(model, ids, cuts=None):
    """Logits [tokens, vocabulary] in f32, of one pass or of several."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    kv = make_prompt_cache(model)
    out, at = [], 0
    for count in cuts or (len(ids),):
        out.append(numpy.array(model(mx.array([ids[at:at + count]]), cache=kv)[0].astype(mx.float32)))
        at += count
    return numpy.concatenate(out)


def greedy(model, ids, steps):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    kv = make_prompt_cache(model)
    logits = model(mx.array([ids]), cache=kv)
    answer = []
    for _ in range(steps):
        answer.append(mx.argmax(logits[0, -1]).item())
        logits = model(mx.array([answer[-1:]]), cache=kv)
    return answer


def agreement(got, want):
    """Mean KL divergence of want from got, and the share of equal best tokens."""
    def log_softmax(x):
        x = x.astype(numpy.float64)
        x = x - x.max(axis=1, keepdims=True)
        return x - numpy.log(numpy.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(want), log_softmax(got)
    kl = (numpy.exp(p) * (p - q)).sum(axis=1).mean()
    return {"positions": len(want), "mean_kl": float(kl),
            "best_token_equal": float((got.argmax(axis=1) == want.argmax(axis=1)).mean())}


def prove(folder, args):
    import mlx.core as mx
    import qmlp.mlx

    started = time.perf_counter()
    result = {"failed": []}
    model = load(folder, "float32")
    vocab = model.args.vocab_size
    ids = numpy.random.default_rng(args.seed).integers(3, vocab, args.tokens).tolist()
    report = qmlp.mlx.patch(model)
    result["replaced"] = len(report.replaced)
    result["left"] = len(report.left)

    whole = rows(model, ids)
    for name, cuts in (("pieces", (args.tokens - args.tokens // 2, args.tokens // 2)),
                       ("token by token", (1,) * args.tokens)):
        if not numpy.array_equal(rows(model, ids, cuts), whole):
            result["failed"].append(f"{name}: other bits than in one pass")
    answer = greedy(model, ids, args.steps)
    text = ids + answer[:-1]
    patched = rows(model, text)
    if not numpy.array_equal(patched[:len(ids)], whole):
        result["failed"].append("a longer pass changes the bits of its first rows")
    if patched[len(ids) - 1:].argmax(axis=1).tolist() != answer:
        result["failed"].append("decoding and one pass choose different tokens")

    qmlp.mlx.unpatch(model)
    start = time.perf_counter()
    own = rows(model, text)
    result["mlx_alone_tokens_per_s"] = len(text) / (time.perf_counter() - start)
    del model
    gc.collect()
    mx.clear_cache()
    best_two = numpy.sort(numpy.partition(own, -2, axis=1)[:, -2:], axis=1)
    clear = best_two[:, 1] - best_two[:, 0] > GAP
    same = own.argmax(axis=1) == patched.argmax(axis=1)
    result.update(positions=len(text), clear_positions=int(clear.sum()),
                  equal_positions=int((same & clear).sum()),
                  largest_difference=float(numpy.abs(own - patched).max()),
                  largest_logit=float(numpy.abs(own).max()))
    if not same[clear].all():
        result["failed"].append(f"{int((~same & clear).sum())} positions with another best token")
    if clear.sum() < 0.5 * len(text):
        result["failed"].append("too few positions whose best token is clear")

    model = load(folder, "bfloat16")
    if args.own_half:
        start = time.perf_counter()
        result["bf16_mlx_alone"] = agreement(rows(model, text[:args.own_half]), own[:args.own_half])
        result["bf16_mlx_alone"]["tokens_per_s"] = args.own_half / (time.perf_counter() - start)
    # bf16 activations as in a checkpoint of that type: its scales are bf16 too now.
    qmlp.mlx.patch(model)
    half = rows(model, text)
    result["bf16_patched"] = agreement(half, own)
    if args.own_half:
        result["bf16_patched_same_positions"] = agreement(half[:args.own_half], own[:args.own_half])
    result["seconds"] = time.perf_counter() - started
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--own-half", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    args = parser.parse_args()
    results = {}
    for name in args.model:
        with tempfile.TemporaryDirectory(prefix="qmlp-") as scratch:
            folder = name
            if name.startswith("random:"):
                shape = name.removeprefix("random:")
                folder = pathlib.Path(scratch) / shape
                random_model.make(folder, shape.removesuffix("-mixed"), shape.endswith("-mixed"))
            results[name] = prove(folder, args)
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    failed = [f"{name}: {why}" for name, result in results.items() for why in result["failed"]]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
