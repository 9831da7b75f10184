"""What the checks of qmlp.mlx on a GPU share: a list of checks by name, arrays, models, comparisons."""

import gc
import importlib
import sys
import time
import traceback

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np

import qmlp
import qmlp.mlx

CHECKS = {}
TYPES = {"bf16": (mx.bfloat16, ml_dtypes.bfloat16), "f16": (mx.float16, np.float16)}


def check(function):
    CHECKS[function.__name__] = function
    return function


def same(a, b):
    """Equal bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = {2: mx.uint16, 4: mx.uint32, 1: mx.uint8}[a.dtype.size]
    return bool(mx.array_equal(a.view(kind), b.view(kind)))


def need(condition, what):
    if not condition:
        raise AssertionError(what)


class NotRun(Exception):
    """A check that this machine cannot make, and why."""


def to_numpy(a):
    if a.dtype == mx.bfloat16:
        return np.array(a.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(a)


def to_mlx(a, dtype):
    if dtype == mx.bfloat16:
        return mx.array(a.view(np.uint16)).view(mx.bfloat16)
    return mx.array(a)


def random_x(shape, dtype, seed):
    x = mx.random.normal(shape, key=mx.random.key(seed))
    return (x * mx.where(mx.random.uniform(shape=shape, key=mx.random.key(seed + 1)) < 0.01, 50.0, 1.0)
            ).astype(dtype)


def random_weight(N, K, bits, group, dtype, seed):
    w = (mx.random.normal((N, K), key=mx.random.key(seed)) * 0.05).astype(dtype)
    codes, scales, biases = mx.quantize(w, group_size=group, bits=bits)
    mx.eval(codes, scales, biases)
    return qmlp.mlx.QuantizedTensor(codes, scales, biases, bits, group)


def on_host(weight):
    return qmlp.QuantizedTensor(np.array(weight.codes), to_numpy(weight.scales),
                                to_numpy(weight.biases), weight.bits, weight.group_size)


def llama(hidden, layers, intermediate, heads, kv_heads, vocab, tied, dtype=mx.bfloat16, seed=0, bits=4,
          module="llama", **config):
    kind = importlib.import_module(f"mlx_lm.models.{module}")
    mx.random.seed(seed)
    model = kind.Model(kind.ModelArgs.from_dict(dict(
        model_type=module, rms_norm_eps=1e-5, hidden_size=hidden, num_hidden_layers=layers,
        intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads,
        vocab_size=vocab, tie_word_embeddings=tied, rope_theta=1e4, max_position_embeddings=4096,
        **config)))
    model.set_dtype(dtype)
    nn.quantize(model, 64, bits)
    mx.eval(model.parameters())
    return model


def logits_of(model, tokens, cuts):
    """Logits of tokens fed in pieces through a prompt cache."""
    from mlx_lm.models.cache import make_prompt_cache

    cache, out, at = make_prompt_cache(model), [], 0
    for cut in cuts:
        out.append(model(tokens[:, at:at + cut], cache=cache))
        at += cut
    return mx.concatenate(out, axis=1).astype(mx.float32)


def compare_logits(reference, got):
    p = mx.softmax(reference, axis=-1)
    kl = mx.sum(p * (nn.log_softmax(reference, axis=-1) - nn.log_softmax(got, axis=-1)), axis=-1)
    same_token = mx.mean(mx.argmax(reference, -1) == mx.argmax(got, -1))
    return float(mx.mean(kl)), float(same_token), float(mx.abs(reference - got).max())


def main(names):
    failed = missed = 0
    for name in names or CHECKS:
        start = time.perf_counter()
        try:
            detail, word = CHECKS[name](), "ok"
        except NotRun as reason:
            detail, word = str(reason), "not run"
            missed += 1
        except Exception as error:  # noqa: BLE001  (reported, and the next check runs)
            detail, word = f"{type(error).__name__}: {error}", "FAILED"
            failed += 1
            if not isinstance(error, AssertionError):
                traceback.print_exc(file=sys.stdout)
        print(f"{word} {name} ({time.perf_counter() - start:.1f} s): {detail}", flush=True)
        gc.collect()
        mx.clear_cache()
    ran = len(names or CHECKS) - missed
    print(f"{failed} failed" if failed else f"all {ran} passed, {missed} not run" if missed else "all passed",
          flush=True)
    return 1 if failed else 0
