"""mlx_lm_patch.py MODEL QUESTION: an mlx-lm model on qmlp's kernels."""
import sys

import mlx_lm

import qmlp.mlx

path, question = sys.argv[1:]
model, tokenizer = mlx_lm.load(path)
print(qmlp.mlx.patch(model), file=sys.stderr)  # what was replaced, what not and why

prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}],
                                       add_generation_prompt=True)
print(mlx_lm.generate(model, tokenizer, prompt, max_tokens=48))
