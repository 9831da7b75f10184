#!/usr/bin/env python3
"""peer_llama_cpp.py GGUF [--threads N] [--tokens N]: greedy decoding speed of llama.cpp, as JSON."""
import argparse
import json
import time

import llama_cpp

PROMPT = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
          "<|im_end|>\n<|im_start|>user\nWrite a long story.<|im_end|>\n<|im_start|>assistant\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    model = llama_cpp.Llama(args.gguf, n_ctx=2048, n_threads=args.threads,
                            n_threads_batch=args.threads, verbose=False)
    prompt = model.tokenize(PROMPT.encode(), add_bos=False, special=True)
    model.eval(prompt[:4])  # the first call pages the file in
    model.reset()

    start = time.perf_counter()
    model.eval(prompt)
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(args.tokens):
        token = model.sample(temp=0.0)
        model.eval([token])
    decode = time.perf_counter() - start
    print(json.dumps({"peer": "llama.cpp", "package": llama_cpp.__version__,
                      "threads": args.threads, "prompt_tokens": len(prompt),
                      "prefill_tokens_per_s": len(prompt) / prefill,
                      "decode_tokens_per_s": args.tokens / decode}))


if __name__ == "__main__":
    main()
