"""docs/models.md, written from what the tests measure: models_page.py --build DIR --gguf FILE"""
import argparse
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "models.md"

HEAD = """\
# Models

Which models run, how that is proved, and what is refused. `tests/python/models_page.py` writes this page from the
cases of `tests/python/architectures.py`; a test fails when it is stale. `qmlp inspect MODEL` says the same of one
checkpoint.

## What runs

A model type is what `model_type` in config.json says, as mlx-lm names it. Each has small random checkpoints that mlx-lm
builds, saves and loads: 4 layers, widths of 2 to 8 bits and groups of 32 to 128 mixed with float modules, scales of f32,
f16 and bf16. For each of them

- the f32 logits of a prefill of {prefill} tokens and {decode} decode steps are mlx-lm's, up to the difference named here
  (of the largest logit; at most 1e-4 is allowed, 1e-6 is what other orders of summation give);
- other passes, threads, instruction sets, truncated and restored caches, unfused ops give the same bits, in f32, f16 and
  bf16;
- without the config fields that a case is about, the logits are others.

"""

TAIL = """
Every linear module may have its own width, group and scale type, or be float. Projections may be stacked in one tensor
(`qkv_proj`, `gate_up_proj`) or apart, in any model type; heads may be tied or not, `head_dim` other than
`hidden_size / num_attention_heads` where the model type allows it.

**Rope kinds.** `default`, `linear`, `llama3`, `yarn` (with `deepseek_yarn`, `telechat3-yarn`), `dynamic`, `longrope`
(with `su`). [forward.md](forward.md) has the formulas. As in mlx-lm, `longrope` takes the long factors at every length.
`dynamic` changes its base with the length of each call, so that what a cache holds would depend on how a prompt was cut;
up to `max_position_embeddings` it is the default, and there the context ends. `rope_parameters` of newer configs is read
for every model type.

**Windows.** `layer_types` with `sliding_attention` runs for the model types that have it in mlx-lm. Elsewhere mlx-lm
ignores a `sliding_window` that other programs apply (mistral, phi3; qwen2, qwen3, smollm3 with `use_sliding_window`). Up
to the window both agree, so the context ends there, with a warning.

**Tied minicpm.** mlx-lm divides the head's input by `hidden_size / dim_model_base` only where the head is not tied; so
does qmlp.

## What is refused

Status 2 and one line, before anything is loaded:

"""

END = """
Config fields that are missing, null or contradict each other are refused in the same way: the line names the field, what
it is and what it must be (`tests/io/architecture_test.cc`).

## Adding a model type

1. A row in `src/io/architecture.cc`: what the model type fixes and which fields it reads. The forward knows no names; it
   reads `ModelConfig` (`include/qmlp/checkpoint.h`).
2. Only if it does something new: a field of `ModelConfig`, its use in `src/model/session.cc`, its line in
   `cli/model_features.cc`, and a case in `tests/model/synthetic.cc` for the reference in double.
3. Cases in `tests/python/architectures.py`, then `tests/python/models_page.py`.
"""


def rounded_up(error):
    """The first of 1, 2, 5 times a power of ten above twice the error."""
    for exponent in range(-9, 0):
        for digit in (1, 2, 5):
            bound = float(f"{digit}e{exponent}")
            if bound > 2 * error:
                return bound
    return 1.0


def joined(values):
    return ", ".join(dict.fromkeys(value for value in values if value)) or "none"


def biases(config):
    parts = [("attention_bias", "q k v"), ("attention_output_bias", "o"),
             ("mlp_bias", "gate up down")]
    return " ".join(name for field, name in parts if config[field])


def bias_cell(configs):
    """The most that a config asks for, and whether one asks for none."""
    found = sorted({biases(config) for config in configs}, key=len)
    most = found[-1] or "none"
    return most if found[0] or most == "none" else most + ", or none"


def rope(config):
    name = config["rope"]
    if config["rotary_dim"] != config["head_dim"]:
        name += " partial"
    if config["rope_traditional"]:
        name += " traditional"
    return name


def layers(config):
    return joined(["without rope" if config["layers_without_rope"] else "",
                   "with a window" if config["layers_with_window"] else ""])


def multipliers(config):
    return joined([field.removesuffix("_scale").replace("_", " ")
                   for field in ("embedding_scale", "attention_scale", "residual_scale",
                                 "head_input_scale", "logits_scale")
                   if config[field] != (0 if field == "attention_scale" else 1)])


def row(model_type, results):
    configs = [result.config for result in results]
    error = rounded_up(max(result.error for result in results))
    cells = [
        f"`{model_type}`",
        "stacked" if any(result.stacked for result in results) else "apart",
        bias_cell(configs),
        "q k" if any(c["qk_norm"] for c in configs) else "none",
        joined(sorted(rope(c) for c in configs)),
        joined(sorted({layers(c) for c in configs} - {"none"})),
        joined(sorted({multipliers(c) for c in configs} - {"none"}, key=len)[-1:]),
        joined(["tied" if any(c["tie_word_embeddings"] for c in configs) else "",
                "own" if any(not c["tie_word_embeddings"] for c in configs) else ""]),
        str(len(results)),
        f"{error:.0e}",
    ]
    return "| " + " | ".join(cells) + " |"


def render(measured, refusals, prefill, decode):
    """measured: {model_type: [result]}, refusals: [(what, line)]."""
    titles = ("model type", "projections", "linear biases", "norms", "rope", "layers",
              "multipliers", "head", "cases", "difference")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += [row(model_type, results) for model_type, results in measured.items()]
    table = ["| what | the line |", "|---|---|"]
    table += [f"| {what} | `{line}` |" for what, line in refusals]
    return (HEAD.format(prefill=prefill, decode=decode) + "\n".join(lines) + "\n" + TAIL
            + "\n".join(table) + "\n" + END)


# A difference depends on the machine's MLX in its last digits: a page is stale when its text
# differs otherwise, or when it promises less than is measured.
FIGURE = re.compile(r"\b\d+e-\d+(?= \|$)", re.MULTILINE)


def staleness(page, fresh):
    if FIGURE.sub("#", page) != FIGURE.sub("#", fresh):
        return "its text differs from what the tests say"
    for promised, measured in zip(FIGURE.findall(page), FIGURE.findall(fresh)):
        # `fresh` rounds up to twice what was measured, so this is no nearer than that.
        if float(measured) > 2.5 * float(promised):
            return f"it promises {promised}, the tests measure up to {measured}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--gguf", required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    import support
    import test_architectures

    support.setup(pathlib.Path(args.build).resolve(), pathlib.Path(args.gguf).resolve())
    PAGE.write_text(test_architectures.page())


if __name__ == "__main__":
    main()
