#!/usr/bin/env python3
"""peer_mlx_lm.py MODEL [--dtype float32|float16|bfloat16] [--tokens N]: greedy decoding speed of mlx-lm."""
import argparse
import importlib.metadata
import json
import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    model.set_dtype(getattr(mx, args.dtype))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Write a long story."}],
                                           add_generation_prompt=True)
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    token = mx.argmax(model(mx.array([prompt]), cache=cache)[0, -1]).item()
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(args.tokens):
        token = mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item()
    decode = time.perf_counter() - start
    print(json.dumps({"peer": "mlx-lm", "package": importlib.metadata.version("mlx-lm"),
                      "dtype": args.dtype, "prompt_tokens": len(prompt),
                      "prefill_tokens_per_s": len(prompt) / prefill,
                      "decode_tokens_per_s": args.tokens / decode}))


if __name__ == "__main__":
    main()
