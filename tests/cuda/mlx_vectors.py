#!/usr/bin/env python3
"""What MLX computes on this machine's GPU: vectors for `gpu_check vectors`, and MLX's own times.

    mlx_vectors.py vectors BITS FOLDER      one file a type, all groups, several M
    mlx_vectors.py times SHAPE              lines of JSON: microseconds of silu(x Wg) * (x Wu)

Needs MLX with its CUDA backend (PyPI mlx and mlx-cuda-13)."""

import json
import pathlib
import sys
import time

import mlx.core as mx

SHAPES = {"SmolLM2": (576, 1536), "MiniCPM5": (1536, 4608), "Llama-8B": (4096, 14336),
          "Llama-70B": (8192, 28672)}


def silu_mul(gate, up):
    return gate * mx.sigmoid(gate) * up


def quantized(rows: int, cols: int, bits: int, group: int, dtype):
    return mx.quantize((mx.random.normal((rows, cols)) * 0.05).astype(dtype), group_size=group,
                       bits=bits)


def product(x, weight, bits: int, group: int):
    w, scales, biases = weight
    return mx.quantized_matmul(x, w, scales=scales, biases=biases, transpose=True,
                               group_size=group, bits=bits)


def write_vectors(bits: int, folder: pathlib.Path) -> None:
    for dtype, tag in ((mx.bfloat16, "bf16"), (mx.float16, "f16")):
        tensors = {}
        mx.random.seed(1000 + bits)
        for group in (32, 64, 128):
            for rows, N, K in ((8, 520, 1280), (33, 520, 1280), (200, 520, 1280),
                               (64, 4096, 4096)):
                x = mx.random.normal((rows, K)).astype(dtype)
                gate, up = quantized(N, K, bits, group, dtype), quantized(N, K, bits, group, dtype)
                y = product(x, gate, bits, group)
                prefix = f"{tag}_b{bits}_g{group}_m{rows}_k{K}"
                tensors |= {f"{prefix}.x": x, f"{prefix}.y": y,
                            f"{prefix}.hidden": silu_mul(y, product(x, up, bits, group))}
                for suffix, weight in (("", gate), ("_up", up)):
                    for name, value in zip(("w", "scales", "biases"), weight):
                        tensors[f"{prefix}.{name}{suffix}"] = value
                mx.eval(tensors)
        mx.save_safetensors(str(folder / f"qmm_{tag}_b{bits}.safetensors"), tensors)


def print_times(shape: str) -> None:
    K, N = SHAPES[shape]
    bits, group = 4, 64
    copies = max(2, int(1.9e8 / (2 * N * K * 0.5625)) + 1)
    weights = [[quantized(N, K, bits, group, mx.bfloat16) for _ in range(2)]
               for _ in range(min(copies, 64))]
    mx.eval(weights)
    compiled = mx.compile(silu_mul)
    for rows in (1, 8, 64, 256, 1024):
        x = mx.random.normal((rows, K)).astype(mx.bfloat16)

        def call(i: int):
            gate, up = weights[i % len(weights)]
            return compiled(product(x, gate, bits, group), product(x, up, bits, group))

        mx.eval([call(i) for i in range(3)])
        samples = []
        for _ in range(5):
            count = max(len(weights), 24)
            begin = time.perf_counter()
            mx.eval([call(i) for i in range(count)])
            samples.append((time.perf_counter() - begin) / count * 1e6)
        print(json.dumps({"shape": shape, "op": "swiglu", "peer": "mlx", "M": rows, "bits": bits,
                          "group": group, "us": round(sorted(samples)[2], 2)}), flush=True)


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "vectors":
        write_vectors(int(sys.argv[2]), pathlib.Path(sys.argv[3]))
    elif len(sys.argv) == 3 and sys.argv[1] == "times" and sys.argv[2] in SHAPES:
        print_times(sys.argv[2])
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
