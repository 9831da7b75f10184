#!/usr/bin/env python3
"""Patched against unpatched mlx-lm on a GPU: times of whole models with random 4-bit weights.

    bench/mlx_gpu.py run MODEL [PART...] [--sides SIDE,SIDE] >> FILE    a line of JSON for each measurement
    bench/mlx_gpu.py report FILE --to bench/results/DATE-GPU-mlx     writes .json and the table, .md

MODEL: smollm2, minicpm5, llama8b. PART: what to run, of decode1, decode8, prefill (default: all). SIDE:
unpatched and patched, or one of them.
Both sides run in one process on the same weights, unpatched first. Decoding feeds each argmax back,
one step ahead of the one that is waited for, as mlx_lm.generate does. MLX compiles some of its own
kernels at their first use, for minutes, and keeps them on disk: each part runs once before it counts.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time

MODELS = {
    "smollm2": ("SmolLM2-135M", dict(
        hidden_size=576, num_hidden_layers=30, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, rope_theta=1e5)),
    "minicpm5": ("MiniCPM5-1B-like", dict(
        hidden_size=1536, num_hidden_layers=24, intermediate_size=4608, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=130560, tie_word_embeddings=False, rope_theta=1e4,
        head_dim=128)),
    "llama8b": ("Llama-8B", dict(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False, rope_theta=5e5)),
}
PARTS = {"decode1": (1, 128, 128), "decode8": (8, 128, 96), "prefill": (1, 2048, 0)}


def build(config):
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, **config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    mx.clear_cache()
    return model


def one(model, batch, prompt, steps):
    """Seconds of a prefill and of a decoding step."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    tokens = mx.random.randint(0, 40000, (batch, prompt), key=mx.random.key(batch))
    mx.eval(tokens)
    cache = make_prompt_cache(model)
    mx.synchronize()
    start = time.perf_counter()
    y = mx.argmax(model(tokens, cache=cache)[:, -1], -1)
    mx.eval(y)
    prefill = time.perf_counter() - start
    if steps == 0:
        return prefill, None
    start = time.perf_counter()
    for _ in range(steps):
        following = mx.argmax(model(y[:, None], cache=cache)[:, -1], -1)
        mx.async_eval(following)
        mx.eval(y)
        y = following
    mx.eval(y)
    return prefill, (time.perf_counter() - start) / steps


def measure(model, part, repeats):
    batch, prompt, steps = PARTS[part]
    runs = [one(model, batch, prompt, steps) for _ in range(repeats + 1)][1:]
    index = 0 if part == "prefill" else 1
    return statistics.median(run[index] for run in runs), batch * (prompt if index == 0 else 1)


def run(name, parts, sides):
    import mlx.core as mx

    import qmlp.mlx

    title, config = MODELS[name]
    model = build(config)
    for side in sides:
        if side == "patched":
            start = time.perf_counter()
            report = qmlp.mlx.patch(model)
            mx.synchronize()
            print(f"# patched in {time.perf_counter() - start:.1f} s\n# "
                  + str(report).replace("\n", "\n# "), file=sys.stderr, flush=True)
        for part in parts:
            seconds, tokens = measure(model, part, 3)
            print(json.dumps({"model": title, "part": part, "side": side,
                              "ms": round(seconds * 1e3, 4),
                              "tokens_per_second": round(tokens / seconds, 1)}), flush=True)
        gc.collect()


def report(path, to):
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()
            if line.startswith("{")]
    cells = {(row["model"], row["part"], row["side"]): row for row in rows}
    pathlib.Path(f"{to}.json").write_text(json.dumps(rows, indent=1) + "\n")
    titles = {"decode1": "decode, batch 1", "decode8": "decode, batch 8", "prefill": "prefill of 2,048"}
    lines = ["| model | | MLX alone, ms | tokens/s | patched, ms | tokens/s | times as fast |",
             "|---|---|--:|--:|--:|--:|--:|"]
    for title, _ in MODELS.values():
        for part in PARTS:
            old, new = (cells.get((title, part, side)) for side in ("unpatched", "patched"))
            if old and new:
                lines.append(
                    f"| {title} | {titles[part]} | {old['ms']:.2f} | {old['tokens_per_second']:,.0f} | "
                    f"{new['ms']:.2f} | {new['tokens_per_second']:,.0f} | {old['ms'] / new['ms']:.2f} |")
    text = "\n".join(lines) + "\n"
    pathlib.Path(f"{to}.md").write_text(text)
    print(text, end="")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("model", choices=MODELS)
    runner.add_argument("parts", nargs="*", metavar="PART")
    runner.add_argument("--sides", default="unpatched,patched", type=lambda text: text.split(","))
    reporter = commands.add_parser("report")
    reporter.add_argument("file")
    reporter.add_argument("--to", required=True)
    options = parser.parse_args()
    if options.command == "run":
        run(options.model, options.parts or list(PARTS), options.sides)
    else:
        report(options.file, options.to)


if __name__ == "__main__":
    main()
