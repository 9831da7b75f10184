"""Checkpoints that `qmlp convert` writes load in mlx-lm unchanged and say the same in f32."""
import functools
import unittest

import mlx.core as mx
import numpy
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

import support

PROMPTS = ["Name two planets.", "Écris une phrase sur la mer. 🌊", "if x == 1:\n    print('a  b')"]
TOKENS = 24


@functools.cache
def loaded(folder):
    """The model with every float widened to f32, and the tokenizer."""
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    return model, tokenizer


def greedy(model, ids, count, ends):
    """Greedy tokens of mlx-lm, each with the distance of the two best logits."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([ids]), cache=cache)
    found = []
    for _ in range(count):
        row = numpy.array(logits[0, -1])
        second, best = numpy.partition(row, -2)[-2:]
        found.append((int(row.argmax()), float(best - second)))
        if found[-1][0] in ends:
            break
        logits = model(mx.array([[found[-1][0]]]), cache=cache)
    return found


class MlxLm(unittest.TestCase):
    def compare(self, folder, prompts):
        model, tokenizer = loaded(folder)
        for prompt in prompts:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}],
                                                add_generation_prompt=True)
            ours = support.qmlp_json("generate", folder, "--activations", "f32", "--greedy", "--chat",
                                     "-p", prompt, "-n", TOKENS)
            self.assertEqual(ours["prompt_ids"], list(ids), prompt)
            theirs = greedy(model, ids, TOKENS, tokenizer.eos_token_ids)
            for n, (token, gap) in enumerate(theirs):
                if gap <= support.GAP and ours["token_ids"][n] != token:
                    break
                self.assertEqual(ours["token_ids"][n], token, f"{prompt!r} token {n}, gap {gap}")
            print(f"{prompt!r}: {ours['text'][:60]!r}")

    def test_same_tokens(self):
        self.compare(support.model(), PROMPTS)

    def test_mixed_model(self):
        self.compare(support.mixed_model(), PROMPTS[:1])

    def test_end_tokens(self):
        _, tokenizer = loaded(support.model())
        self.assertIn(2, tokenizer.eos_token_ids)


if __name__ == "__main__":
    unittest.main()
