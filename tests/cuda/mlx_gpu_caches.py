#!/usr/bin/env python3
"""Checks of qmlp.mlx on a GPU: whose memory is written, and how long it is held: mlx_gpu_caches.py [NAME...]

Needs what mlx_gpu.py needs, and a C compiler for `half_recorded`. Patched layers write new keys and
values into memory that arrays of the same cache share: these checks look for somebody who could notice.
Prints a line for each check and ends with status 1 when one failed.
"""

import concurrent.futures
import copy
import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as caches

import qmlp.mlx
from qmlp.mlx import _layers as layers

from mlx_checks import (check, llama, logits_of, main, need, random_weight, random_x, same)

VOCABULARY = 2048


def model(dtype=mx.bfloat16):
    made = llama(512, 3, 1536, 8, 2, VOCABULARY, False, seed=5, dtype=dtype)
    qmlp.mlx.patch(made)
    return made


def some_tokens(count, seed, rows=1):
    return mx.random.randint(0, VOCABULARY, (rows, count), key=mx.random.key(seed))


def steps(m, tokens, kv, counts, evaluate=True):
    out, at = [], 0
    for count in counts:
        out.append(m(tokens[:, at:at + count], cache=kv))
        if evaluate:
            mx.eval(out[-1])
        at += count
    return mx.concatenate(out, axis=1)


def filled(m, tokens, count, evaluated=True):
    kv = caches.make_prompt_cache(m)
    out = m(tokens[:, :count], cache=kv)
    if evaluated:
        mx.eval(out, [c.state for c in kv])
    return kv


def plainly(m, *runs):
    """Each (tokens, counts) through a cache of its own from the start: what others must equal."""
    got = []
    for tokens, counts in runs:
        got.append(steps(m, tokens, caches.make_prompt_cache(m), counts))
    mx.eval(got)
    return got


# ---- caches ----


@check
def written_in_place():
    """While tokens come one by one, a layer's keys stay where they are; a grown cache moves once."""
    m = model()
    tokens = some_tokens(300, 1)
    kv = filled(m, tokens, 200)
    mx.eval(m(tokens[:, 200:201], cache=kv))
    mx.synchronize()
    held = mx.get_active_memory()
    for i in range(201, 256):
        mx.async_eval(m(tokens[:, i:i + 1], cache=kv))  # never waited for
    mx.synchronize()
    # 55 rooms for each layer's keys would be 3 * 2 * 128 KiB a token.
    need(mx.get_active_memory() - held < 2 << 20, f"{held} bytes, then {mx.get_active_memory()}")
    mx.eval(m(tokens[:, 256:257], cache=kv))
    need(kv[0].keys.shape == (1, 2, 257, 64), str(kv[0].keys.shape))
    return "256 positions, then more"


@check
def what_others_hold_stays():
    """Keys and values of every step, and views of them, taken evaluated and not, while the cache goes on
    in place, is trimmed, written by MLX's own ops, and given up."""
    m = model()
    tokens = some_tokens(60, 2)
    (want,) = plainly(m, (tokens, (20,) + (1,) * 30))
    final = caches.make_prompt_cache(m)
    mx.eval(steps(m, tokens, final, (20,) + (1,) * 30))
    truth = [(mx.contiguous(c.keys) + 0, mx.contiguous(c.values) + 0) for c in final]
    mx.eval(truth)
    views = (lambda a: a, lambda a: a[:], lambda a: a[..., 3:, :], lambda a: a.reshape(-1, 64),
             lambda a: mx.contiguous(a), lambda a: a.view(mx.uint16), lambda a: mx.swapaxes(a, 1, 2))
    for evaluated in (False, True):
        kv, held = caches.make_prompt_cache(m), []
        out = []
        for n, (at, count) in enumerate([(0, 20)] + [(20 + i, 1) for i in range(30)]):
            out.append(m(tokens[:, at:at + count], cache=kv))
            if evaluated:
                mx.async_eval(out[-1])
            for i, c in enumerate(kv):
                view = views[(n + i) % len(views)]
                for part, a in enumerate((c.keys, c.values)):
                    held.append((view(a), view, i, part, at + count))
                    if evaluated:
                        mx.async_eval(held[-1][0])
        need(same(mx.concatenate(out, axis=1), want), f"logits, evaluated {evaluated}")
        caches.trim_prompt_cache(kv, 12)
        mx.async_eval(m(tokens[:, 50:60], cache=kv))
        kv[0].keys *= 2
        kv[1].keys[..., 30:, :] = 0
        mx.eval(m(tokens[:, 50:53], cache=kv))
        del kv
        mx.eval([mx.full((1, 2, 256, 64), float("nan"), mx.bfloat16) for _ in range(40)])
        for a, view, i, part, end in held:
            need(same(mx.contiguous(a), mx.contiguous(view(truth[i][part][..., :end, :]))),
                 f"layer {i}, part {part}, after {end} positions, evaluated {evaluated}")
    return f"{2 * len(held)} arrays"


@check
def read_by_the_host():
    """Earlier keys, read by the host while the step after them is still to run: MLX moves their memory."""
    m = model(mx.float16)
    tokens = some_tokens(40, 9)
    (want,) = plainly(m, (tokens, (20,) + (1,) * 8))
    kv = filled(m, tokens, 20)
    load = random_x((4096, 4096), mx.float16, 1)
    out = []
    for i in range(20, 28):
        held = [(c.keys, c.values) for c in kv] if i % 2 else []
        work = load
        for _ in range(40):
            work = load @ work
        mx.async_eval(work)
        out.append(m(tokens[:, i:i + 1], cache=kv))
        mx.async_eval(out[-1])
        for pair in held:
            for a in pair:
                need(np.isfinite(np.array(a)).all(), f"keys or values after {i} positions")
    need(same(mx.concatenate(out, axis=1), want[:, 20:]), "logits")
    return "8 steps"


@check
def forks():
    """Many caches with a common past, in any order, from several threads; each must be as if it were
    alone."""
    m = model()
    past = some_tokens(30, 3)
    ways = [some_tokens(12, 10 + i) for i in range(6)]
    mx.eval(ways)
    counts = (30, 1, 1, 3, 1, 5, 1)
    want = plainly(m, *((mx.concatenate([past, way], axis=1), counts) for way in ways))
    for evaluated in (False, True):
        kv = filled(m, past, 30, evaluated)
        forked = [copy.deepcopy(kv) for _ in ways]
        del kv
        got = [[] for _ in ways]
        at = 0
        for n, count in enumerate(counts[1:]):
            order = range(len(ways)) if n % 2 else reversed(range(len(ways)))
            for i in order:
                got[i].append(m(ways[i][:, at:at + count], cache=forked[i]))
                if evaluated and (n + i) % 3:
                    mx.async_eval(got[i][-1])
            at += count
        for i, parts in enumerate(got):
            need(same(mx.concatenate(parts, axis=1), want[i][:, 30:]), f"fork {i}, evaluated {evaluated}")
    kv = filled(m, past, 30)
    mx.synchronize()

    def go_on(i):
        """On a stream of this thread's own."""
        stream = mx.new_stream(mx.default_device())
        with mx.stream(stream):
            own = copy.deepcopy(kv)
            out = steps(m, ways[i], own, counts[1:])
            mx.eval(out)
        return out

    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        for i, out in enumerate(pool.map(go_on, range(len(ways)))):
            need(same(out, want[i][:, 30:]), f"thread {i}")
    return f"{len(ways)} forks"


@check
def not_what_it_was():
    """Caches whose arrays were replaced by others of another size, type or layout."""
    m = model()
    tokens = some_tokens(40, 4)
    counts = (20, 1, 1, 3)
    (want,) = plainly(m, (tokens, counts))

    def copied(a):
        return mx.contiguous(a) + 0

    changes = {
        "negated twice": lambda a: -(-a),
        "other memory": copied,
        "by positions first": lambda a: mx.swapaxes(mx.contiguous(mx.swapaxes(copied(a), 1, 2)), 1, 2),
        "by features first": lambda a: mx.swapaxes(mx.contiguous(mx.swapaxes(copied(a), 2, 3)), 2, 3),
        "behind something": lambda a: mx.concatenate([copied(a), copied(a)], axis=1)[:, 2:],
        "at an odd address": lambda a: mx.concatenate([mx.zeros((3,), a.dtype), a.flatten()])[3:].reshape(a.shape),
        "longer": lambda a: mx.pad(a, [(0, 0), (0, 0), (0, 7), (0, 0)], constant_values=float("nan")),
        "longer by a step": lambda a: mx.concatenate([a, mx.full((1, 2, 236, 64), 7, a.dtype)], axis=2),
        "saved and loaded": None,
    }
    for name, change in changes.items():
        for evaluated in (False, True):
            kv = filled(m, tokens, 20)
            if change is None:
                with tempfile.TemporaryDirectory() as folder:
                    path = str(pathlib.Path(folder) / "cache.safetensors")
                    caches.save_prompt_cache(path, kv)
                    kv = caches.load_prompt_cache(path)
            else:
                for c in kv:
                    c.keys, c.values = change(c.keys), change(c.values)
                    if evaluated:
                        mx.eval(c.keys, c.values)
            got = steps(m, tokens[:, 20:25], kv, counts[1:], evaluated)
            need(same(got, want[:, 20:]), f"{name}, evaluated {evaluated}")
    return ", ".join(changes)


@check
def inside_compiled_functions():
    """Steps with a cache inside mx.compile, and inside a function whose gradient is taken."""
    m = model()
    tokens = some_tokens(30, 5)
    (want,) = plainly(m, (tokens, (20, 1, 1, 1)))
    kv = filled(m, tokens, 20)
    m.freeze()

    def loss(scale):
        return (m(tokens[:, 20:21], cache=kv) * scale).sum()

    value, gradient = mx.value_and_grad(loss)(mx.array(1.0, mx.bfloat16))
    mx.eval(value, gradient)
    out = m(tokens[:, 21:22], cache=kv)
    compiled = mx.compile(lambda x: m(x, cache=copy.deepcopy(kv)))
    need(same(out, want[:, 21:22]), "after a gradient")
    twice = [compiled(tokens[:, 22:23]) for _ in range(2)]
    mx.eval(twice)
    plain = m(tokens[:, 22:23], cache=kv)
    need(same(plain, want[:, 22:23]), "after a compiled step")
    close = mx.abs(twice[1].astype(mx.float32) - plain.astype(mx.float32)).max()
    need(float(close) < 0.1, f"compiled: logits differ by {float(close)}")
    return "a gradient, a compiled step"


@check
def copies_go_their_own_ways():
    """Two caches that share their past, each continued with other tokens, whichever runs first."""
    m = model()
    one, two = some_tokens(40, 2), some_tokens(40, 3)
    both = mx.concatenate([one[:, :20], two[:, 20:]], axis=1)
    counts = (20, 3, 1, 1, 3)
    want = plainly(m, (one, counts), (both, counts))
    runs = 0
    for copier in (copy.deepcopy, lambda kv: [copy.copy(c) for c in kv]):
        for evaluated in (False, True):
            for first in (0, 1):
                for lazily in (False, True):
                    kv = filled(m, one, 20, evaluated)
                    pair = [(kv, one), (copier(kv), both)]
                    got = {}
                    for index in (first, 1 - first):
                        held, tokens = pair[index]
                        got[index] = steps(m, tokens[:, 20:28], held, counts[1:], not lazily)
                    # The one built last is evaluated first.
                    for index in (1 - first, first):
                        need(same(got[index], want[index][:, 20:28]),
                             f"{copier}, evaluated {evaluated}, first {first}, lazily {lazily}, {index}")
                        runs += 1
    return f"{runs} continuations"


@check
def trimmed_caches():
    m = model()
    one, two = some_tokens(40, 4), some_tokens(40, 5)
    apart = filled(m, one, 20)
    want = [mx.contiguous(a) for c in apart for a in c.state[:2]]
    mx.eval(want)
    caches.trim_prompt_cache(apart, 9)
    for c in apart:
        c.state = (*(mx.contiguous(a) for a in c.state[:2]), c.offset)
    continued = steps(m, two[:, 11:20], apart, (4, 1, 4))
    for evaluated in (False, True):
        kv = filled(m, one, 20, evaluated)
        held = [a for c in kv for a in c.state[:2]]
        if evaluated:
            mx.eval(held)
        need(caches.trim_prompt_cache(kv, 9) == 9, "trim")
        got = steps(m, two[:, 11:20], kv, (4, 1, 4), evaluated)
        need(same(got, continued), f"evaluated {evaluated}")
        for a, b in zip(held, want):
            need(same(mx.contiguous(a), b), f"keys that somebody held have changed, evaluated {evaluated}")
    # Back and forth, as speculative decoding does.
    kv = filled(m, one, 20)
    for _ in range(12):
        mx.eval(m(two[:, 20:24], cache=kv))
        caches.trim_prompt_cache(kv, 4)
    got = steps(m, one[:, 20:26], kv, (1, 1, 4))
    need(same(got, steps(m, one[:, 20:26], filled(m, one, 20), (1, 1, 4))), "after 12 drafts")
    return "held keys keep their values; 12 drafts"


@check
def states_set_back_and_saved():
    m = model()
    one = some_tokens(40, 6)
    (want,) = plainly(m, (one, (12, 2, 4)))
    kv = filled(m, one, 12)
    states = [c.state for c in kv]
    copies = [a + 0 for state in states for a in state[:2]]
    mx.eval(copies)
    mx.eval(m(some_tokens(4, 7), cache=kv), m(some_tokens(1, 8), cache=kv))
    for held, copied in zip([a for state in states for a in state[:2]], copies):
        need(same(held, copied), "a state that somebody held has changed")
    for c, state in zip(kv, states):
        c.state = state
    need(same(steps(m, one[:, 12:18], kv, (2, 4)), want[:, 12:18]), "set back")
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "cache.safetensors")
        caches.save_prompt_cache(path, filled(m, one, 12))
        again = caches.load_prompt_cache(path)
        need(same(steps(m, one[:, 12:18], again, (2, 4)), want[:, 12:18]), "saved and loaded")
    # Reading keys on the CPU moves them out of the device's memory.
    kv = filled(m, one, 12)
    need(len(bytes(memoryview(kv[0].keys.view(mx.uint8)))) == kv[0].keys.nbytes, "read")
    need(same(steps(m, one[:, 12:18], kv, (2, 4)), want[:, 12:18]), "read on the CPU")
    return "set back, saved, read on the CPU"


@check
def other_code_in_between():
    """Steps of mlx-lm's own code, which writes the cache by MLX's ops, between fused ones."""
    m = model()
    one = some_tokens(300, 8)
    counts = (240,) + (1,) * 30
    (want,) = plainly(m, (one, counts))
    kv = filled(m, one, 240)
    out, fork = [], None
    for i, at in enumerate(range(240, 270)):
        run = (lambda *_: None) if i % 3 == 1 else layers._run
        with mock.patch.object(layers, "_run", run):
            out.append(m(one[:, at:at + 1], cache=kv))
        if i == 10:
            fork = copy.deepcopy(kv)
    got = mx.concatenate(out, axis=1)
    need(same(got, want[:, 240:]), "fused and own code in turn")
    need(same(steps(m, one[:, 251:270], fork, (1,) * 19), want[:, 251:]), "a copy made on the way")
    return "30 tokens, a copy"


@check
def batched_growth():
    """Sequences of a batch, past the end of a room, as when they start anew."""
    m = model()
    tokens = some_tokens(600, 9, rows=3)
    counts = (250,) + (1,) * 12 + (300, 30)
    kv = caches.make_prompt_cache(m)
    lazily = steps(m, tokens, kv, counts, evaluate=False)
    (want,) = plainly(m, (tokens, counts))
    need(same(lazily, want), "one graph of 15 passes")
    need(kv[0].keys.shape == (3, 2, 592, 64), str(kv[0].keys.shape))
    return "3 sequences, 592 positions"


# ---- memory of ops ----


@check
def memory_is_held():
    """What an op on a busy stream reads is not given to another stream before it has run."""
    dtype = mx.bfloat16
    gate, up = (random_weight(1536, 512, 4, 64, dtype, s) for s in (1, 2))
    down = random_weight(512, 1536, 4, 64, dtype, 3)
    whole, packed_down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)
    busy, other = mx.new_stream(mx.gpu), mx.new_stream(mx.gpu)
    big = mx.random.normal((8192, 8192), key=mx.random.key(1)).astype(dtype)
    base = random_x((64, 1024), dtype, 4)
    mx.eval(big, base)

    def inputs():
        x = base[:, ::2] * 1  # a strided view of it is copied inside the op
        residual = base[:, :512] + 1
        bias = base[0, :512] * 2
        mx.eval(x, residual, bias)
        mx.synchronize()
        return mx.swapaxes(mx.contiguous(mx.swapaxes(x, 0, 1)), 0, 1), residual, bias

    def op(stream):
        x, residual, bias = inputs()
        y = qmlp.mlx.fused_mlp(x, whole, packed_down, down_bias=bias, residual=residual, stream=stream)
        return qmlp.mlx.quantized_linear(y, qmlp.mlx.pack(random_weight(512, 512, 4, 64, dtype, 7)),
                                         stream=stream)

    want = op(mx.default_stream(mx.gpu))
    mx.eval(want)
    for turn in range(6):
        slow = big
        for _ in range(8):
            slow = mx.matmul(slow, big, stream=busy)
        got = op(busy)
        mx.async_eval(slow, got)
        del slow
        junk = []
        for count in (64 * 512, 64 * 1536, 512, 64 * 1024, 1 << 20):  # of every size that the op used
            for _ in range(24):
                junk.append(mx.full((count,), float("nan"), dtype, stream=other))
        mx.eval(junk)
        mx.eval(got)
        need(same(got, want), f"turn {turn}")
        del junk, got
    mx.synchronize()
    return "6 turns, 120 arrays each"


@check
def memory_is_given_back():
    """Nothing stays after ops, layers and caches are gone."""
    m = model()
    tokens = some_tokens(64, 3)

    def use():
        kv = filled(m, tokens, 40)
        for i in range(40, 64):
            mx.async_eval(m(tokens[:, i:i + 1], cache=kv))
        mx.synchronize()

    use()
    mx.clear_cache()
    held = mx.get_active_memory()
    for _ in range(5):
        use()
    mx.clear_cache()
    need(mx.get_active_memory() <= held + (64 << 10), f"{held}, then {mx.get_active_memory()}")
    return f"{held} bytes, then {mx.get_active_memory()}"


# The n-th kernel from now on is refused, as when the driver is out of memory.
SHIM = r"""
#include <dlfcn.h>
static int left = -1;
void refuse_kernel(int n) { left = n; }
int cuGraphAddKernelNode_v2(void* node, void* graph, const void* deps, unsigned long n, const void* p) {
  static int (*real)(void*, void*, const void*, unsigned long, const void*);
  if (!real) real = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGraphAddKernelNode_v2");
  if (left >= 0 && left-- == 0) return 2;
  return real(node, graph, deps, n, p);
}
"""


@check
def half_recorded():
    """An op that fails after some of its kernels were recorded: an exception, and nothing else breaks."""
    with tempfile.TemporaryDirectory() as folder:
        source, shim = pathlib.Path(folder) / "shim.c", pathlib.Path(folder) / "shim.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        done = subprocess.run([sys.executable, __file__, "half"], text=True, capture_output=True,
                              env={**os.environ, "LD_PRELOAD": str(shim), "QMLP_TEST_SHIM": str(shim)})
        need(done.returncode == 0, done.stdout[-500:] + done.stderr[-1500:])
        return done.stdout.strip().splitlines()[-1]


def half():
    import ctypes

    shim = ctypes.CDLL(os.environ["QMLP_TEST_SHIM"])
    dtype = mx.bfloat16
    down = random_weight(512, 1536, 4, 64, dtype, 3)
    x = random_x((5, 512), dtype, 1)
    mx.eval(x)

    def packed():
        gate, up = (random_weight(1536, 512, 4, 64, dtype, s) for s in (1, 2))
        return qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)

    want = qmlp.mlx.fused_mlp(x, *packed(), residual=x)
    mx.eval(want)
    m = model()
    tokens = some_tokens(20, 1)
    logits = logits_of(m, tokens, (18, 1, 1))
    mx.eval(logits)
    refused = 0

    def attempt(make, n):
        """Whether refusing the n-th kernel made the evaluation fail."""
        nonlocal refused
        y = make()
        shim.refuse_kernel(n)
        try:
            mx.eval(y)
            failed = False
        except RuntimeError as error:
            need("\n" not in str(error), str(error))
            failed = True
            refused += 1
        shim.refuse_kernel(-1)
        del y
        return failed

    for n in range(2):
        # Weights and arrays of their own, dropped at once; what was recorded is still to run.
        need(attempt(lambda: qmlp.mlx.fused_mlp(x * 1, *packed(), residual=x + 0), n), f"kernel {n}")
        mx.clear_cache()
        junk = [mx.full((5 * 1536,), float("nan"), dtype) for _ in range(32)]
        mx.eval(junk)
        need(same(qmlp.mlx.fused_mlp(x, *packed(), residual=x), want), f"after kernel {n}")
    mx.synchronize()
    held = mx.get_active_memory()
    for n in range(14):  # in a decoding step's first layers
        kv = filled(m, tokens, 18)
        attempt(lambda: m(tokens[:, 18:19], cache=kv), n)
        need(same(logits_of(m, tokens, (18, 1, 1)), logits), f"the model after kernel {n}")
    mx.synchronize()
    kv = None
    mx.clear_cache()
    need(mx.get_active_memory() < held + (8 << 20), f"{held} bytes, then {mx.get_active_memory()}")
    need(refused >= 12, f"{refused} refused")
    print(f"{refused} evaluations failed at a kernel of theirs")


if __name__ == "__main__":
    if sys.argv[1:2] == ["half"]:
        half()
    else:
        sys.exit(main(sys.argv[1:]))
