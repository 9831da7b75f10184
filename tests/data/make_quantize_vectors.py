"""Writes quantize_mlx.safetensors: matrices and what MLX's CPU quantizer makes of them.

Needs the PyPI packages mlx and mlx-cpu (made with 0.32.4). For each case
`<kind>_<dtype>_b<bits>_g<group>`: .w (the input, dtype), .weight (packed U32), .scales and .biases.
"""
import pathlib

import mlx.core as mx
import numpy as np

N, K = 4, 128
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


def matrices():
    rng = np.random.default_rng(20)
    normal = rng.standard_normal((N, K))
    sparse = np.zeros((N, K))
    sparse[:, ::37] = normal[:, ::37]
    yield "normal", normal * 0.02
    yield "positive", np.abs(normal)
    yield "negative", -np.abs(normal)
    yield "zero", np.zeros((N, K))
    yield "negative_zero", np.full((N, K), -0.0)
    yield "constant", np.full((N, K), 0.37) * np.array([1, -1, 1000, -1e-3])[:, None]
    yield "tiny", normal * 1e-7
    yield "subnormal", normal * 1e-40
    yield "halves", rng.integers(-16, 17, (N, K)) / 2
    yield "signs", np.sign(normal)
    yield "sparse", sparse


out = {}
for bits in (2, 3, 4, 5, 6, 8):
    for index, (kind, values) in enumerate(matrices()):
        for offset, (name, dtype) in enumerate(DTYPES.items()):
            # Every bits with every kind and dtype; the groups take turns.
            group = (32, 64, 128)[(index + offset + bits) % 3]
            w = mx.array(values.astype(np.float32)).astype(dtype)
            weight, scales, biases = mx.quantize(w, group_size=group, bits=bits)
            case = f"{kind}_{name}_b{bits}_g{group}"
            out[case + ".w"] = w
            out[case + ".weight"] = weight
            out[case + ".scales"] = scales
            out[case + ".biases"] = biases
mx.save_safetensors(str(pathlib.Path(__file__).with_name("quantize_mlx.safetensors")), out)
