#!/usr/bin/env python3
"""Prefill and greedy decoding of mlx-lm on a CPU, patched by qmlp.mlx against MLX alone.

    bench/patched_mlx.py MODEL [--dtype float32,float16,bfloat16] [--threads N,...] [--prompt N]
        [--new N] [--own-prompt N] [--own-new N] [--rounds N] [--json FILE]

MODEL: a checkpoint folder, or random:135m, random:1b, random:1b-mixed (tools/random_model.py). Each round
measures MLX alone, then the patched model with each number of threads; the medians of the rounds'
speeds and of their ratios are given. MLX alone may be given fewer tokens: in f16 and bf16 it takes
seconds for each. It computes products on one thread.
"""
import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import mlx.core as mx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import qmlp  # noqa: E402
import qmlp.mlx  # noqa: E402
import random_model  # noqa: E402


def speeds(model, prompt, new):
    """(prefill, decode) in tokens/s, as mlx_lm.stream_generate runs and counts them."""
    from mlx_lm.generate import generate_step

    ids = mx.array([(i * 37) % 1000 + 5 for i in range(prompt)])
    start = time.perf_counter()
    first = None
    for number, (token, _) in enumerate(generate_step(ids, model, max_tokens=new)):
        if number == 0:
            first = time.perf_counter()
    end = time.perf_counter()
    return prompt / (first - start), (new - 1) / (end - first)


def measure(folder, dtype, args):
    from mlx_lm.utils import load_model

    model, _ = load_model(pathlib.Path(folder))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    mx.set_default_device(mx.cpu)
    own, patched = [], {threads: [] for threads in args.threads}
    for round_number in range(args.rounds):
        own.append(speeds(model, args.own_prompt, args.own_new))
        with qmlp.mlx.patch(model):
            if round_number == 0:
                speeds(model, args.prompt, 4)
            for threads in args.threads:
                qmlp.set_num_threads(threads)
                patched[threads].append(speeds(model, args.prompt, args.new))
    rows = []
    for threads, found in patched.items():
        row = {"dtype": dtype, "threads": threads}
        for index, name in enumerate(("prefill", "decode")):
            row[name] = statistics.median(each[index] for each in found)
            row[f"{name}_alone"] = statistics.median(each[index] for each in own)
            row[f"{name}_ratio"] = statistics.median(
                mine[index] / theirs[index] for mine, theirs in zip(found, own))
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main():
    integers = lambda text: [int(part) for part in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=integers, default=[0], help="0: the default")
    parser.add_argument("--prompt", type=int, default=35)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--own-prompt", type=int)
    parser.add_argument("--own-new", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.own_prompt = args.own_prompt or args.prompt
    args.own_new = args.own_new or args.new
    result = {"model": args.model, "prompt": args.prompt, "new": args.new,
              "own_prompt": args.own_prompt, "own_new": args.own_new, "rounds": args.rounds,
              "mlx": mx.__version__, "rows": []}
    with tempfile.TemporaryDirectory(prefix="qmlp-") as scratch:
        folder = args.model
        if folder.startswith("random:"):
            shape = folder.removeprefix("random:")
            folder = pathlib.Path(scratch) / shape
            random_model.make(folder, shape.removesuffix("-mixed"), shape.endswith("-mixed"))
        for dtype in args.dtype.split(","):
            result["rows"] += measure(folder, dtype, args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
