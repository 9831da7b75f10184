#!/usr/bin/env python3
"""Writes a Llama-type MLX checkpoint with random weights, for measuring and for proofs at sizes that no
test can download.

    tools/random_model.py FOLDER [--shape 135m|1b|8b] [--mixed] [--layers N] [--seed N]

Codes are uniform; scales and biases make each matrix keep the size of its input, so that logits are
of ordinary size and their best two well apart. --mixed gives every kind of matrix bits and a group
of its own. No tokenizer: prompts are token ids.
"""
import argparse
import json
import pathlib
import shutil

import numpy

# hidden, intermediate, layers, heads, KV heads, head_dim, vocabulary, tied head
SHAPES = {
    "135m": (576, 1536, 30, 9, 3, 64, 49152, True),
    "1b": (2048, 5632, 18, 32, 4, 64, 32000, False),
    "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
}
MIXED = {"q_proj": (5, 64), "k_proj": (6, 32), "v_proj": (8, 64), "o_proj": (4, 128),
         "gate_proj": (3, 64), "up_proj": (6, 128), "down_proj": (5, 32), "embed_tokens": (4, 64),
         "lm_head": (6, 64)}


def modules(shape):
    """(name, N, K, gain) of every quantized matrix."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, tied = shape
    yield "model.embed_tokens", vocab, hidden, 2.0
    for i in range(layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        yield f"{attention}.q_proj", heads * head_dim, hidden, 1.5
        yield f"{attention}.k_proj", kv_heads * head_dim, hidden, 1.5
        yield f"{attention}.v_proj", kv_heads * head_dim, hidden, 1.0
        yield f"{attention}.o_proj", hidden, heads * head_dim, 0.5
        yield f"{mlp}.gate_proj", intermediate, hidden, 1.0
        yield f"{mlp}.up_proj", intermediate, hidden, 1.0
        yield f"{mlp}.down_proj", hidden, intermediate, 0.7
    if not tied:
        yield "lm_head", vocab, hidden, 2.0


def norms(shape):
    for i in range(shape[2]):
        yield f"model.layers.{i}.input_layernorm"
        yield f"model.layers.{i}.post_attention_layernorm"
    yield "model.norm"


def write(folder, shape, spec_of, seed):
    """The weights as one safetensors file; tensors are made one by one as they are written."""
    random = numpy.random.default_rng(seed)

    def codes(N, K, bits):
        return numpy.frombuffer(random.bytes(N * K * bits // 8), numpy.uint32)

    tensors = []  # name, type, shape, function that makes the data
    for name, N, K, gain in modules(shape):
        bits, group = spec_of(name)
        # Uniform codes have a spread of 2^bits / sqrt(12). An embedding is looked up, not summed over.
        size = gain if name.endswith("embed_tokens") and not shape[7] else gain / K ** 0.5
        step = size * 12 ** 0.5 / 2 ** bits
        scales = (random.uniform(0.5, 1.5, (N, K // group)) * step).astype(numpy.float16)
        zero = random.uniform(0.45, 0.55, scales.shape) * (2 ** bits - 1)
        biases = (-scales.astype(numpy.float64) * zero).astype(numpy.float16)
        tensors.append((f"{name}.weight", "U32", (N, K * bits // 32),
                        lambda N=N, K=K, bits=bits: codes(N, K, bits)))
        tensors.append((f"{name}.scales", "F16", scales.shape, lambda a=scales: a))
        tensors.append((f"{name}.biases", "F16", scales.shape, lambda a=biases: a))
    for name in norms(shape):
        weight = random.uniform(0.9, 1.1, shape[0]).astype(numpy.float16)
        tensors.append((f"{name}.weight", "F16", weight.shape, lambda a=weight: a))
    header, offset = {"__metadata__": {"format": "mlx"}}, 0
    for name, kind, dims, _ in tensors:
        end = offset + int(numpy.prod(dims)) * (4 if kind == "U32" else 2)
        header[name] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for _, _, _, make in tensors:
            out.write(make().tobytes())
    return offset


def make(folder, name, mixed=False, layers=None, seed=7):
    """A checkpoint in `folder`, which is replaced; bytes of its tensors."""
    shape = SHAPES[name]
    if layers is not None:
        shape = (*shape[:2], layers, *shape[3:])
    hidden, intermediate, num_layers, heads, kv_heads, head_dim, vocab, tied = shape
    # The default of files converted by mlx-lm, for every module that has no entry of its own.
    default = (4, 32 if hidden % 64 != 0 or name == "135m" else 64)

    def spec_of(module):
        return MIXED[module.rpartition(".")[2]] if mixed else default

    quantization = {"bits": default[0], "group_size": default[1]}
    if mixed:
        for module, *_ in modules(shape):
            bits, group = spec_of(module)
            quantization[module] = {"bits": bits, "group_size": group}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": num_layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": tied, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float16", "quantization": quantization}
    folder = pathlib.Path(folder)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return write(folder, shape, spec_of, seed)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--shape", default="135m", choices=sorted(SHAPES))
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    size = make(args.folder, args.shape, args.mixed, args.layers, args.seed)
    print(f"{args.folder}: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
