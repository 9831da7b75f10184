#!/usr/bin/env python3
"""Checks of qmlp.mlx on a GPU: mlx_gpu.py [NAME...]

Needs this package built with CUDA, mlx and mlx-cuda-13, mlx-lm, NumPy and ml_dtypes. Prints a line for
each check and ends with status 1 when one failed. Results are compared with the CPU's verifier of the
`tensor` contract, bit for bit, and with MLX's own ops. MLX compiles its kernels at their first use, for
tens of seconds each: `mlx_gpu.py warm BITS GROUP TYPE M` does that for one, in a process of its own.
"""

import pathlib
import sys
import tempfile
import threading
import traceback

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import qmlp
import qmlp.mlx
from qmlp.mlx._load import native

from mlx_checks import (TYPES, check, compare_logits, llama, logits_of, main, need, on_host, random_weight,
                        random_x, same, to_mlx, to_numpy)


def verified_linear(x, weight, activation, segments=0, **epilogue):
    packed = qmlp.pack(on_host(weight), accumulation="tensor", activation=activation,
                       segments=segments)
    epilogue = {name: to_numpy(value) for name, value in epilogue.items()}
    return to_mlx(qmlp.quantized_linear(to_numpy(x), packed, **epilogue), x.dtype)


def verified_swiglu(x, gate, up, activation):
    packed = qmlp.pack(on_host(gate), on_host(up), accumulation="tensor", activation=activation)
    return to_mlx(qmlp.fused_swiglu(to_numpy(x), packed), x.dtype)


def mlx_linear(x, weight):
    return mx.quantized_matmul(x, weight.codes, weight.scales, weight.biases, transpose=True,
                               group_size=weight.group_size, bits=weight.bits)


# ---- the ops ----


@check
def device():
    need(native.device() == "cuda:0", f"ops run on {native.device()}: {native.gpu_refusal()}")
    return f"mlx {mx.__version__}, qmlp {qmlp.__version__}"


@check
def linear_bits():
    """Every width, some groups, M on both sides of each kernel's range, against the CPU's verifier."""
    count = 0
    for index, (bits, group, name) in enumerate([(4, 64, "bf16"), (2, 32, "f16"), (3, 64, "bf16"),
                                                 (5, 128, "f16"), (6, 64, "bf16"), (8, 32, "f16"),
                                                 (4, 128, "f16"), (8, 128, "bf16")]):
        dtype = TYPES[name][0]
        weight = random_weight(200, 640, bits, group, dtype, 10 * index)
        packed = qmlp.mlx.pack(weight)
        for M in (1, 2, 7, 8, 16, 17, 33, 64, 100, 130):
            x = random_x((M, 640), dtype, 100 + M)
            got = qmlp.mlx.quantized_linear(x, packed)
            need(got.dtype == dtype, f"{bits} bits: type {got.dtype}")
            need(same(got, verified_linear(x, weight, name)), f"{bits} bits, group {group}, M {M}")
            count += got.size
    return f"{count} outputs"


@check
def linear_segments():
    """Long K: the plan's choice, which is not one segment, and each number asked for."""
    count = 0
    weight = random_weight(1024, 4096, 4, 64, mx.bfloat16, 4)
    for segments in (0, 1, 2, 4, 8):
        packed = qmlp.mlx.pack(weight, segments=segments)
        for M in (1, 8, 9, 40, 130):
            x = random_x((M, 4096), mx.bfloat16, 100 + M)
            got = qmlp.mlx.quantized_linear(x, packed)
            need(same(got, verified_linear(x, weight, "bf16", segments)), f"{segments} segments, M {M}")
            if segments == 1:
                default = qmlp.mlx.quantized_linear(x, qmlp.mlx.pack(weight))
                need(not same(got, default), f"M {M}: the plan's choice is one segment")
            count += got.size
    return f"{count} outputs"


@check
def linear_epilogues():
    dtype = mx.bfloat16
    weight = random_weight(192, 512, 4, 64, dtype, 5)
    packed = qmlp.mlx.pack(weight)
    for M in (1, 5, 40):
        x, residual = random_x((M, 512), dtype, M), random_x((M, 192), dtype, M + 50)
        bias = random_x((192,), dtype, 9)
        mx.eval(residual)
        got = qmlp.mlx.quantized_linear(x, packed, linear_bias=bias, residual=residual)
        need(same(got, verified_linear(x, weight, "bf16", linear_bias=bias, residual=residual)),
             f"M {M}")
        # A residual that nobody else needs gives its memory.
        donated = qmlp.mlx.quantized_linear(x, packed, linear_bias=bias, residual=residual + 0)
        need(same(donated, got), f"donated, M {M}")
    return "linear bias, residual, donation"


@check
def swiglu_and_mlp_bits():
    for name, (gate_bits, up_bits) in (("bf16", (4, 4)), ("f16", (4, 6)), ("bf16", (8, 3))):
        dtype = TYPES[name][0]
        gate = random_weight(384, 512, gate_bits, 64, dtype, 1)
        up = random_weight(384, 512, up_bits, 64, dtype, 2)
        down = random_weight(512, 384, 4, 64, dtype, 3)
        whole, packed_down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)
        for M in (1, 3, 8, 16, 40, 130):
            x = random_x((M, 512), dtype, 7 * M)
            hidden = qmlp.mlx.fused_swiglu(x, whole)
            need(same(hidden, verified_swiglu(x, gate, up, name)), f"swiglu {name}, M {M}")
            separate = qmlp.mlx.quantized_linear(hidden, packed_down)
            need(same(separate, verified_linear(hidden, down, name)), f"down {name}, M {M}")
            fused = qmlp.mlx.fused_mlp(x, whole, packed_down)
            need(same(fused, separate), f"fused mlp {name}, M {M}")
            residual = random_x((M, 512), dtype, 77)
            need(same(qmlp.mlx.fused_mlp(x, whole, packed_down, residual=residual),
                      qmlp.mlx.quantized_linear(hidden, packed_down, residual=residual)),
                 f"fused mlp with residual {name}, M {M}")
    return "three pairs of formats"


@check
def layouts():
    """Batches, strides, gaps, transposes, broadcasts, empty arrays."""
    dtype = mx.bfloat16
    weight = random_weight(128, 256, 4, 64, dtype, 3)
    packed = qmlp.mlx.pack(weight)

    def rows(x):
        return qmlp.mlx.quantized_linear(mx.contiguous(x.reshape(-1, 256)), packed).reshape(
            *x.shape[:-1], 128)

    base = random_x((6, 10, 256), dtype, 1)
    wide = random_x((6, 10, 512), dtype, 2)
    turned = random_x((256, 40), dtype, 3)
    mx.eval(base, wide, turned)
    for name, x in {
        "batch of one token": base[:, -1:, :], "last rows": base[:, 3:, :], "every other": base[::2],
        "half of wider rows": wide[..., :256], "other half": wide[..., 256:], "odd start": wide[..., 3:259],
        "transposed": turned.T, "swapped": base.transpose(1, 0, 2), "one row": base[0, 0],
        "broadcast": mx.broadcast_to(base[0, :1], (5, 256)), "reversed": base[0, ::-1],
        "every other column": wide[..., ::2],
    }.items():
        need(same(qmlp.mlx.quantized_linear(x, packed), rows(x)), name)
    for shape in ((0, 256), (2, 0, 256)):
        out = qmlp.mlx.quantized_linear(mx.zeros(shape, dtype), packed)
        mx.eval(out)
        need(out.shape == (*shape[:-1], 128), f"empty {out.shape}")
    return "12 layouts, empty"


@check
def chain_of_80():
    """80 ops deep without an evaluation between: each is placed after the one it needs."""
    dtype = mx.bfloat16
    gate, up = (random_weight(768, 256, 4, 64, dtype, s) for s in (1, 2))
    down = random_weight(256, 768, 4, 64, dtype, 3)
    whole, packed_down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)

    ones = mx.ones((256,), dtype)

    def step(x):
        return mx.fast.rms_norm(x + qmlp.mlx.fused_mlp(x, whole, packed_down), ones, 1e-5)

    for M in (1, 16, 200):
        x = random_x((M, 256), dtype, M) * 0.1
        chained, stepped = x, x
        for _ in range(80):
            chained = step(chained)
        mx.eval(chained)
        for _ in range(80):
            stepped = step(stepped)
            mx.eval(stepped)
        need(same(chained, stepped), f"M {M}")
        need(bool(mx.all(mx.isfinite(chained))), "not finite")
        compiled = mx.compile(lambda v: step(step(step(v))))
        y = x
        for _ in range(26):
            y = compiled(y)
        need(same(step(step(y)), chained), f"compiled, M {M}")
    flexible = mx.compile(step, shapeless=True)
    for M in (1, 3, 65):
        x = random_x((M, 256), dtype, 900 + M)
        need(same(flexible(x), step(x)), f"shapeless, M {M}")
    return "M 1, 16, 200; compiled; shapeless"


@check
def threads_and_streams():
    dtype = mx.bfloat16
    weight = random_weight(256, 256, 4, 64, dtype, 3)
    packed = qmlp.mlx.pack(weight)
    inputs = [random_x((M, 256), dtype, M) * 0.05 for M in (1, 5, 20, 70)]
    mx.eval(inputs)

    def run(x, stream=None):
        y = x
        for _ in range(30):
            y = qmlp.mlx.quantized_linear(y, packed, stream=stream)
        return y

    wanted = [np.array(run(x).view(mx.uint16)) for x in inputs]
    got, errors = {}, []

    def worker(index):
        try:
            for turn in range(3):
                at = (index + turn) % len(inputs)
                y = run(inputs[at])
                mx.eval(y)
                got[index, at] = np.array(y.view(mx.uint16))
        except Exception:  # noqa: BLE001  (shown below)
            errors.append(traceback.format_exc())

    workers = [threading.Thread(target=worker, args=(i,)) for i in range(6)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    need(not errors, errors[:1])
    need(len(got) == 18, len(got))
    for (_, at), y in got.items():
        need(np.array_equal(y, wanted[at]), f"thread's result, input {at}")
    streams = [mx.new_stream(mx.gpu) for _ in range(3)]
    outs = [run(inputs[i % 4], streams[i % 3]) for i in range(12)]
    mx.eval(outs)
    for i, y in enumerate(outs):
        need(np.array_equal(np.array(y.view(mx.uint16)), wanted[i % 4]), f"stream's result {i}")
    # A weight that nobody holds any more is still there when its op runs.
    for i in range(20):
        y = qmlp.mlx.quantized_linear(inputs[i % 4], qmlp.mlx.pack(weight))
        mx.async_eval(y)
        need(same(y, qmlp.mlx.quantized_linear(inputs[i % 4], packed)), "weight freed early")
    cpu = qmlp.mlx.quantized_linear(inputs[1], qmlp.mlx.pack(weight), stream=mx.cpu)
    need(bool(mx.allclose(cpu, mlx_float(inputs[1], weight), rtol=2e-2, atol=2e-2)), "CPU stream")
    return "6 threads, 3 streams, weights dropped, a CPU stream"


def mlx_float(x, weight):
    w = mx.dequantize(weight.codes, weight.scales, weight.biases, group_size=weight.group_size,
                      bits=weight.bits)
    return x @ w.T


@check
def unpack_and_parts():
    for name, bits in (("bf16", 4), ("f16", 5), ("bf16", 8)):
        dtype = TYPES[name][0]
        gate, up = (random_weight(160, 320, bits, 32, dtype, s) for s in (1, 2))
        packed = qmlp.mlx.pack(gate)
        for mine, source in zip(qmlp.mlx.unpack(packed), gate):
            need(same(mine, source), f"{name}, {bits} bits")
        whole = qmlp.mlx.pack(gate, up)
        x = random_x((9, 320), dtype, 4)
        for index, source in enumerate((gate, up)):
            half = whole.part(index)
            for mine, theirs in zip(qmlp.mlx.unpack(half), source):
                need(same(mine, theirs), f"part {index}")
            need(same(qmlp.mlx.quantized_linear(x, half),
                      qmlp.mlx.quantized_linear(x, qmlp.mlx.pack(source))), f"part {index} as linear")
        mx.set_default_device(mx.cpu)
        try:
            elsewhere = qmlp.mlx.pack(gate)
        finally:
            mx.set_default_device(mx.gpu)
        for mine, source in zip(qmlp.mlx.unpack(elsewhere), gate):
            need(same(mine, source), f"{name}, {bits} bits, packed on the CPU")
    return "three formats, both halves, a weight on the CPU"


@check
def gradients():
    dtype = mx.bfloat16
    weight = random_weight(192, 256, 4, 64, dtype, 3)
    gate, up = (random_weight(384, 256, 4, 64, dtype, s) for s in (4, 5))
    down = random_weight(256, 384, 4, 64, dtype, 6)
    packed = qmlp.mlx.pack(weight)
    whole, packed_down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)
    x = random_x((20, 256), dtype, 1) * 0.1

    def close(a, b, what):
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        error = float(mx.linalg.norm(a - b) / mx.linalg.norm(b))
        need(error < 4e-2, f"{what}: {error}")

    wide = x.astype(mx.float32)

    def wide_linear(v, w):
        return v @ mx.dequantize(w.codes, w.scales.astype(mx.float32), w.biases.astype(mx.float32),
                                 group_size=w.group_size, bits=w.bits).T

    close(mx.grad(lambda v: qmlp.mlx.quantized_linear(v, packed).astype(mx.float32).sum())(x),
          mx.grad(lambda v: wide_linear(v, weight).sum())(wide), "linear")

    def mlp(v):
        g, u = wide_linear(v, gate), wide_linear(v, up)
        return wide_linear(g * mx.sigmoid(g) * u, down)

    close(mx.grad(lambda v: qmlp.mlx.fused_mlp(v, whole, packed_down).astype(mx.float32).square().sum())(x),
          mx.grad(lambda v: mlp(v).square().sum())(wide), "mlp")
    return "linear, mlp"


@check
def mixed_types():
    """f32 activations on a GPU are MLX's part, and still give what MLX gives."""
    weight = random_weight(128, 256, 4, 64, mx.bfloat16, 3)
    packed = qmlp.mlx.pack(weight)
    x = random_x((1, 256), mx.float32, 1)
    got, wanted = qmlp.mlx.quantized_linear(x, packed), mlx_linear(x, weight)
    need(got.dtype == mx.float32 and bool(mx.allclose(got, wanted, rtol=1e-3, atol=1e-3)), "f32 x")
    y = qmlp.mlx.quantized_linear(x.astype(mx.bfloat16), packed)
    need(y.dtype == mx.bfloat16, "packed for bf16 still")
    return "f32 x"


@check
def f32_models():
    """f32 rows, and a model set to f32, run on MLX's code in patched layers."""
    model = llama(512, 2, 1536, 8, 2, 2048, True, seed=3)
    tokens = mx.random.randint(0, 2048, (1, 40), key=mx.random.key(1))
    x = random_x((1, 5, 512), mx.float32, 2)
    layer = model.model.layers[0]
    own_rows = [layer.mlp(x), layer.self_attn.q_proj(x)]
    mx.eval(own_rows)
    qmlp.mlx.patch(model)
    before = logits_of(model, tokens, (33, 1, 6))
    for own, got in zip(own_rows, [layer.mlp(x), layer.self_attn.q_proj(x)]):
        error = float(mx.abs(own - got).max() / mx.abs(own).max())
        need(got.dtype == mx.float32 and error < 1e-2, f"f32 rows: {got.dtype}, off by {error}")
    need(same(logits_of(model, tokens, (33, 1, 6)), before), "bf16 rows after f32 ones")
    model.set_dtype(mx.float32)
    got = logits_of(model, tokens, (33, 1, 6))
    mx.eval(got)
    fresh = llama(512, 2, 1536, 8, 2, 2048, True, seed=3)
    fresh.set_dtype(mx.float32)
    wanted = logits_of(fresh, tokens, (33, 1, 6))
    error = float(mx.abs(got - wanted).max() / mx.abs(wanted).max())
    need(error < 1e-5, f"set_dtype(f32): logits off by {error}")
    model.set_dtype(mx.bfloat16)
    need(same(logits_of(model, tokens, (33, 1, 6)), before), "back to bf16")
    return f"rows, set_dtype: within {error:.1e} of MLX's own f32"


MLX_CASES = [(4, 64, "bf16", 256), (4, 64, "bf16", 9), (8, 64, "bf16", 9), (4, 32, "f16", 9)]


@check
def equal_to_mlx():
    """MLX's own quantized_matmul at M >= 8, bit for bit."""
    count = 0
    for bits, group, name, most in MLX_CASES:
        dtype = TYPES[name][0]
        for N, K in ((1024, 2048), (4096, 4096)):
            weight = random_weight(N, K, bits, group, dtype, 11)
            packed = qmlp.mlx.pack(weight, segments=1)
            for M in (8, 9, 16) if most < 17 else (65, 200, 256):
                x = random_x((M, K), dtype, M)
                a, b = qmlp.mlx.quantized_linear(x, packed), mlx_linear(x, weight)
                need(same(a, b), f"{bits} bits, group {group}, {name}, {M} x {N} x {K}: "
                                 f"{int(mx.sum(a != b))} outputs differ")
                count += a.size
    return f"{count} outputs"


# ---- models ----


def flat_bits(tree):
    from mlx.utils import tree_flatten

    return {name: np.array(value.view(mx.uint16 if value.dtype.size == 2 else mx.uint32))
            for name, value in tree_flatten(tree)}


@check
def small_models():
    """Patched against unpatched, tied and untied, with a prompt cache; then everything else a user does."""
    details = []
    for tied in (True, False):
        model = llama(512, 4, 1536, 8, 2, 2048, tied)
        tokens = mx.random.randint(0, 2048, (1, 56), key=mx.random.key(1))
        cuts = (40, 1, 1, 9, 1, 1, 1, 1, 1)
        before = flat_bits(model.parameters())
        reference = logits_of(model, tokens, cuts)
        mx.eval(reference)
        report = qmlp.mlx.patch(model)
        need(report.device == native.device(), str(report))
        need(sum(what == "fused MLP" for _, what in report.replaced) == 4, str(report))
        patched = logits_of(model, tokens, cuts)
        kl, agree, most = compare_logits(reference, patched)
        need(kl < 5e-3 and agree > 0.8, f"tied {tied}: KL {kl}, same token {agree}, {most}")
        # A row's bits do not depend on how the prompt was cut.
        need(bool(mx.array_equal(patched[:, :40], logits_of(model, tokens, (40,)))), "prefill again")
        mx.eval(patched)
        after = flat_bits(model.parameters())
        need(before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before),
             "parameters() of the patched model")
        with tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder) / "weights.safetensors")
            model.save_weights(path)
            model.load_weights(path)
            need(bool(mx.array_equal(logits_of(model, tokens, cuts), patched)), "saved and loaded")
        qmlp.mlx.unpatch(model)
        need(bool(mx.array_equal(logits_of(model, tokens, cuts), reference)), "unpatch")
        restored = flat_bits(model.parameters())
        need(all(np.array_equal(before[n], restored[n]) for n in before), "unpatch: parameters")
        with qmlp.mlx.patch(model):
            need(bool(mx.array_equal(logits_of(model, tokens, cuts), patched)), "patched again")
        need(bool(mx.array_equal(logits_of(model, tokens, cuts), reference)), "context manager")
        details.append(f"{'tied' if tied else 'untied'}: KL {kl:.1e}, same token {agree:.3f}")
        del model
    return "; ".join(details)


@check
def whole_layers():
    """Fused layers give the bits of their single ops: prompts, steps, growth of the cache, batches."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    for dtype, config in ((mx.bfloat16, {}), (mx.float16, {"head_dim": 128}),
                          (mx.bfloat16, {"rope_scaling": scaling}),
                          (mx.float16, {"rope_traditional": True}),
                          (mx.bfloat16, {"module": "qwen3", "head_dim": 64}),
                          (mx.bfloat16, {"attention_bias": True, "mlp_bias": True})):
        model = llama(512, 3, 1536, 8, 2, 2048, False, seed=7, dtype=dtype, **config)
        model.update(tree_map_biases(model))
        for batch in (1, 3):
            # The cache grows at a multiple of its step: elsewhere mlx-lm's own is of another length
            # then, for which MLX's attention has another kernel.
            tokens = mx.random.randint(0, 2048, (batch, 313), key=mx.random.key(2))
            cuts = (40, 1, 1, 9, 1, 200, 1, 3, 1, 55, 1)
            qmlp.mlx.patch(model, small_ops=False)
            apart = logits_of(model, tokens, cuts)
            alone = model(tokens[:, :7])
            mx.eval(apart, alone)
            report = qmlp.mlx.patch(model)
            need(sum(what == "whole layer" for _, what in report.replaced) == 3, str(report))
            whole = logits_of(model, tokens, cuts)
            off = [i for i in range(tokens.shape[1]) if not mx.array_equal(whole[:, i], apart[:, i])]
            need(not off, f"{config}, batch {batch}: other bits at {off[:8]} of {len(off)} positions, by "
                          f"{float(mx.abs(whole - apart).max())}")
            need(bool(mx.array_equal(model(tokens[:, :7]), alone)), f"{config}: without a cache")
            qmlp.mlx.unpatch(model)
        del model
    out = qmlp.mlx.quantized_linear(mx.ones((1, 64), mx.bfloat16), qmlp.mlx.pack(
        random_weight(64, 64, 4, 64, mx.bfloat16, 1)))
    mx.eval(out)
    need(native.buffer_device(out) == 0, f"outputs lie on device {native.buffer_device(out)}")
    return ("plain, heads of 128, llama3 rope, neighbouring pairs, norms of q and k, biases; batches of 1 "
            "and 3; outputs in device memory")


def tree_map_biases(model):
    """Linear biases are zeros in a new model; others here."""
    from mlx.utils import tree_flatten, tree_unflatten

    return tree_unflatten([(name, random_x(value.shape, value.dtype, len(name)) * 0.01)
                           for name, value in tree_flatten(model.parameters())
                           if name.endswith(".bias")])


@check
def batches():
    """A batch of 8 gives each sequence what it gets alone, bit for bit."""
    model = llama(512, 3, 1536, 8, 2, 2048, False, seed=2)
    qmlp.mlx.patch(model)
    tokens = mx.random.randint(0, 2048, (8, 12), key=mx.random.key(3))
    x = random_x((8, 1, 512), mx.bfloat16, 3)
    layer = model.model.layers[1]
    together = layer.mlp(x)
    for i in range(8):
        need(same(together[i:i + 1], layer.mlp(x[i:i + 1])), f"MLP, sequence {i}")
        need(same(layer.self_attn.q_proj(x)[i:i + 1], layer.self_attn.q_proj(x[i:i + 1])),
             f"q_proj, sequence {i}")
    cuts = (9, 1, 1, 1)
    whole = logits_of(model, tokens, cuts)
    worst = 0.0
    for i in range(8):
        alone = logits_of(model, tokens[i:i + 1], cuts)
        worst = max(worst, float(mx.abs(whole[i:i + 1] - alone).max() / mx.abs(alone).max()))
    need(worst < 0.05, f"logits of a batch are off by {worst}")  # MLX's attention depends on it
    return f"linear layers equal to the bit, logits within {worst:.1e} of the largest"


@check
def one_billion():
    """A 1B-shaped model: logits, agreement, memory, generation by mlx-lm."""
    model = llama(2048, 16, 8192, 32, 8, 32000, False, seed=4)
    tokens = mx.random.randint(0, 32000, (1, 96), key=mx.random.key(5))
    cuts = (72,) + (1,) * 24
    reference = logits_of(model, tokens, cuts)
    mx.eval(reference)
    mx.clear_cache()
    held = mx.get_active_memory()
    report = qmlp.mlx.patch(model)
    packed = sum(m._qmlp.weight.nbytes for _, m in model.named_modules() if hasattr(m, "_qmlp"))
    whole = sum(m._qmlp_gate_up[0].nbytes for _, m in model.named_modules() if hasattr(m, "_qmlp_gate_up"))
    left, cached = mx.get_active_memory(), mx.get_cache_memory()
    need(left + packed + whole < held * 1.05, f"{held} bytes before, {left} + {packed} + {whole} after")
    need(cached < held * 0.05, f"{cached} bytes in MLX's cache")
    got = logits_of(model, tokens, cuts)
    kl, agree, most = compare_logits(reference, got)
    need(kl < 1e-2 and agree > 0.8, f"KL {kl}, same token {agree}, {most}")
    from mlx_lm.generate import generate_step

    greedy = [int(token) for token, _ in generate_step(tokens[0, :20], model, max_tokens=24)]
    again = [int(token) for token, _ in generate_step(tokens[0, :20], model, max_tokens=24)]
    need(len(greedy) == 24 and greedy == again, "generate_step is not repeatable")
    return (f"KL {kl:.1e}, same token {agree:.3f}, {len(report.replaced)} replaced, "
            f"{held / 2**20:.0f} MiB before, {(left + packed + whole) / 2**20:.0f} after")


@check
def lora():
    """LoRA steps around patched layers move the adapters as around the dequantized layers."""
    import mlx.optimizers as optim
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import dequantize_model

    tokens = mx.random.randint(0, 512, (2, 17), key=mx.random.key(8))
    losses = []
    for patched in (False, True):
        model = llama(256, 2, 512, 4, 2, 512, False, seed=6)
        if patched:
            qmlp.mlx.patch(model)
        else:
            dequantize_model(model)
        model.freeze()
        mx.random.seed(1)
        linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
        optimizer = optim.SGD(learning_rate=0.05)

        def loss(m):
            return nn.losses.cross_entropy(m(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:]).mean()

        step = nn.value_and_grad(model, loss)
        series = []
        for _ in range(5):
            value, gradient = step(model)
            optimizer.update(model, gradient)
            mx.eval(model.trainable_parameters(), value)
            series.append(float(value))
        losses.append(series)
    need(max(abs(a - b) for a, b in zip(*losses)) < 0.03, losses)
    need(losses[1][-1] < losses[1][0], losses)
    return f"{losses[1][0]:.3f} to {losses[1][-1]:.3f}, dequantized {losses[0][-1]:.3f}"


def warm(bits, group, name, M):
    dtype = TYPES[name][0]
    weight = random_weight(1024, 2048, bits, group, dtype, 1)
    mx.eval(mlx_linear(random_x((M, 2048), dtype, 1), weight))


if __name__ == "__main__":
    if sys.argv[1:2] == ["warm"]:
        warm(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        sys.exit(main(sys.argv[1:]))
