"""Whole layers as one op (qmlp.mlx.patch on CPUs): the same bits however the tokens arrive, and caches
that behave as mlx-lm's own, whoever else holds them."""
import copy
import unittest
from unittest import mock

import mlx.core as mx
import numpy
from mlx_lm.models import cache as caches
from mlx_lm.models import granite, minicpm, qwen2, qwen3

import support
import test_mlx_patch
from test_mlx_patch import logits, some_tokens, tiny

qmlp = None
layers = None

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
# name: (changes to the tiny model, what the report says of a layer)
MODELS = {
    "llama": ({}, "whole layer"),
    "untied, biases": ({"tied": False, "attention_bias": True, "mlp_bias": True}, "whole layer"),
    "traditional rope": ({"rope_traditional": True}, "whole layer"),
    "llama3 rope": ({"rope_scaling": LLAMA3}, "whole layer"),
    "linear rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "whole layer"),
    "odd heads": ({"head_dim": 48}, "whole layer"),
    "qwen2": ({"module": qwen2, "model_type": "qwen2"}, "whole layer"),
    "qwen3": ({"module": qwen3, "model_type": "qwen3"}, "whole layer"),
    "granite": ({"module": granite, "model_type": "granite", "logits_scaling": 2.0,
                 "attention_multiplier": 0.2, "embedding_multiplier": 3.0,
                 "residual_multiplier": 0.5, "attention_bias": False, "mlp_bias": False},
                "attention"),
    "minicpm": ({"module": minicpm, "tied": False, "model_type": "minicpm", "dim_model_base": 64,
                 "scale_depth": 1.4, "scale_emb": 2.0}, "attention"),
}


def setUpModule():
    global qmlp, layers
    test_mlx_patch.setUpModule()
    qmlp = support.package()
    import qmlp.mlx._layers as imported

    layers = imported


def patched(dtype=mx.float32, **changes):
    model = tiny(dtype, **changes)
    for module in model.modules():  # biases that matter
        if "scales" in module and "bias" in module:
            module.bias = (mx.random.normal(module.bias.shape) * 0.1).astype(dtype)
    report = qmlp.mlx.patch(model)
    return model, report


def own_code(layer, *args):
    """In the place of _run: no call is for the op."""
    return None


def bits(array):
    return numpy.array(array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16))


class LayerTest(unittest.TestCase):
    def assertSame(self, a, b):
        self.assertTrue(numpy.array_equal(numpy.array(a), numpy.array(b)))

    def steps(self, model, tokens, counts, kv, evaluate=True):
        """Logits of `tokens`, cut into passes of `counts`."""
        at, out = 0, []
        for count in counts:
            out.append(logits(model, tokens[:, at:at + count], kv))
            if evaluate:
                mx.eval(out[-1])
            at += count
        self.assertEqual(at, tokens.shape[1])
        return mx.concatenate(out, axis=1)


class Bits(LayerTest):
    def test_any_cut_of_the_tokens(self):
        for name, (changes, what) in MODELS.items():
            for dtype in (mx.float32, mx.float16, mx.bfloat16):
                with self.subTest(name, dtype=dtype):
                    model, report = patched(dtype, **changes)
                    self.assertEqual(sum(entry == what for _, entry in report.replaced), 3)
                    tokens = some_tokens(model, 23, rows=2)
                    whole = logits(model, tokens)  # no cache
                    kv = caches.make_prompt_cache(model)
                    self.assertSame(logits(model, tokens, kv), whole)
                    for counts in ((1,) * 23, (7, 1, 1, 9, 5)):
                        for evaluate in (True, False):
                            kv = caches.make_prompt_cache(model)
                            self.assertSame(self.steps(model, tokens, counts, kv, evaluate), whole)
                            self.assertIsNotNone(kv[0]._qmlp_rows)
                    self.assertSame(logits(model, tokens[1:]), whole[1:])

    def test_threads(self):
        model, _ = patched()
        tokens = some_tokens(model, 200)
        before = qmlp.num_threads()
        results = []
        for threads in (1, 2, 5):
            qmlp.set_num_threads(threads)
            kv = caches.make_prompt_cache(model)
            results.append(self.steps(model, tokens, (190,) + (1,) * 10, kv))
        qmlp.set_num_threads(before)
        self.assertSame(results[1], results[0])
        self.assertSame(results[2], results[0])

    def test_near_the_parts(self):
        """The layer's own code on the patched parts: MLX's attention between them."""
        for name, (changes, _) in MODELS.items():
            with self.subTest(name):
                model, _ = patched(**changes)
                tokens = some_tokens(model, 19, rows=2)
                kv = caches.make_prompt_cache(model)
                got = self.steps(model, tokens, (12, 1, 1, 5), kv)
                with mock.patch.object(layers, "_run", own_code):
                    other = caches.make_prompt_cache(model)
                    want = self.steps(model, tokens, (12, 1, 1, 5), other)
                    self.assertFalse(hasattr(other[0], "_qmlp_rows"))
                worst = mx.max(mx.abs(got - want)).item() / mx.max(mx.abs(want)).item()
                self.assertLess(worst, 2e-6)
                # The keys come from the same sums and roundings, where the rotation is ours too.
                mine, theirs = kv[0].state, other[0].state
                self.assertEqual(mine[2], theirs[2])
                for a, b in zip(mine[:2], theirs[:2]):
                    self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
                    if name == "llama3 rope":
                        self.assertTrue(mx.allclose(a, b, atol=1e-5).item())
                    else:
                        self.assertTrue(numpy.array_equal(bits(a), bits(b)))


class Caches(LayerTest):
    def setUp(self):
        self.model, _ = patched()
        self.tokens = some_tokens(self.model, 30)
        self.whole = logits(self.model, self.tokens)
        self.other = (self.tokens + 7) % 320

    def fresh(self, count=12):
        kv = caches.make_prompt_cache(self.model)
        logits(self.model, self.tokens[:, :count], kv)
        return kv

    def expected(self, *parts):
        return logits(self.model, mx.concatenate(parts, axis=1))

    def test_trim(self):
        for evaluate in (True, False):
            kv = self.fresh(20)
            if evaluate:
                mx.eval([c.state for c in kv])
            self.assertEqual(caches.trim_prompt_cache(kv, 9), 9)
            got = self.steps(self.model, self.other[:, 11:20], (4, 1, 4), kv, evaluate)
            self.assertSame(got, self.expected(self.tokens[:, :11], self.other[:, 11:20])[:, 11:])

    def test_copies_go_their_own_ways(self):
        for copier in (copy.deepcopy, lambda kv: [copy.copy(c) for c in kv]):
            for evaluated in (False, True):
                for first in (0, 1):
                    kv = self.fresh()
                    if evaluated:
                        mx.eval([c.state for c in kv])
                    # One goes back a little first, over what the other still needs.
                    pair = [(kv, self.other, 8), (copier(kv), self.tokens, 12)]
                    caches.trim_prompt_cache(kv, 4)
                    got = {}
                    # Graphs of both are built before any is evaluated.
                    for index in (first, 1 - first):
                        held, tokens, at = pair[index]
                        got[index] = self.steps(self.model, tokens[:, at:at + 8], (3, 1, 1, 3),
                                                held, evaluate=False)
                    for index in (0, 1):
                        _, tokens, at = pair[index]
                        want = self.expected(self.tokens[:, :at], tokens[:, at:at + 8])[:, at:]
                        self.assertSame(got[index], want)

    def test_old_arrays_keep_their_values(self):
        """keys and values that somebody holds do not change when the cache moves on."""
        reference = self.fresh()
        want = [numpy.array(a) for c in reference for a in c.state[:2]]
        kv = self.fresh()
        held = [a for c in kv for a in c.state[:2]]  # not evaluated
        caches.trim_prompt_cache(kv, 6)
        mx.eval(logits(self.model, self.other[:, 6:14], kv))
        for a, b in zip(held, want):
            self.assertTrue(numpy.array_equal(numpy.array(a), b))
        kv = self.fresh()
        views = [a[:, :, 2:9] for c in kv for a in c.state[:2]]
        caches.trim_prompt_cache(kv, 9)
        mx.eval(logits(self.model, self.other[:, 3:14], kv))
        for a, b in zip(views, want):
            self.assertTrue(numpy.array_equal(numpy.array(a), b[:, :, 2:9]))

    def test_setting_the_state_back(self):
        kv = self.fresh()
        states = [c.state for c in kv]
        mx.eval(logits(self.model, self.other[:, 12:16], kv))
        for c, state in zip(kv, states):
            c.state = state
        got = self.steps(self.model, self.tokens[:, 12:18], (2, 4), kv)
        self.assertSame(got, self.whole[:, 12:18])

    def test_discarded_passes_are_still_made(self):
        """mlx-lm drops a prompt's logits and evaluates the cache, or nothing at all."""
        kv = caches.make_prompt_cache(self.model)
        self.model(self.tokens[:, :7], cache=kv)
        self.model(self.tokens[:, 7:12], cache=kv)
        mx.eval([c.state for c in kv])
        self.model(self.tokens[:, 12:13], cache=kv)
        self.assertSame(logits(self.model, self.tokens[:, 13:15], kv), self.whole[:, 13:15])

    def test_own_code_in_between(self):
        kv = self.fresh()
        out = []
        for at in range(12, 24):
            with mock.patch.object(layers, "_run", own_code if at % 3 == 0 else layers._run):
                out.append(logits(self.model, self.tokens[:, at:at + 1], kv))
        got = mx.concatenate(out, axis=1)
        worst = mx.max(mx.abs(got - self.whole[:, 12:24])).item()
        self.assertLess(worst, 1e-5 * mx.max(mx.abs(self.whole)).item())

    def test_growth(self):
        tokens = some_tokens(self.model, 600)
        want = logits(self.model, tokens)
        kv = caches.make_prompt_cache(self.model)
        got = self.steps(self.model, tokens, (250,) + (1,) * 20 + (300, 30), kv)
        self.assertSame(got, want)
        self.assertEqual(kv[0].keys.shape, (1, 2, 768, 32))
        self.assertEqual(kv[0].nbytes, 2 * 2 * 768 * 32 * 4)

    def test_saved_and_loaded(self):
        kv = self.fresh()
        path = str(support.scratch() / "layers.safetensors")
        caches.save_prompt_cache(path, kv)
        again = caches.load_prompt_cache(path)
        got = self.steps(self.model, self.tokens[:, 12:20], (1, 1, 6), again)
        self.assertSame(got, self.whole[:, 12:20])

    def test_other_caches(self):
        """Rotating, quantized and batched caches run on the layer's own code."""
        rotating = [caches.RotatingKVCache(max_size=64) for _ in self.model.layers]
        got = self.steps(self.model, self.tokens, (20,) + (1,) * 10, rotating)
        worst = mx.max(mx.abs(got - self.whole)).item()
        self.assertLess(worst, 1e-5 * mx.max(mx.abs(self.whole)).item())
        quantized = [c.to_quantized(group_size=32, bits=8) for c in self.fresh()]
        got = self.steps(self.model, self.tokens[:, 12:16], (1, 3), quantized)
        worst = mx.max(mx.abs(got - self.whole[:, 12:16])).item()
        self.assertLess(worst, 0.02 * mx.max(mx.abs(self.whole)).item())

    def test_masks_of_ones_own(self):
        tokens = self.tokens[:, :9]
        x = self.model.model.embed_tokens(tokens)
        block = self.model.layers[0]
        see_all = mx.zeros((9, 9))
        self.assertFalse(mx.allclose(block(x, see_all, None), block(x, "causal", None)).item())
        with mock.patch.object(layers, "_run", own_code):
            want = block(x, see_all, None)
        self.assertSame(block(x, see_all, None), want)


class Changes(LayerTest):
    def setUp(self):
        self.model, _ = patched()
        self.tokens = some_tokens(self.model)
        self.before = logits(self.model, self.tokens)

    def test_norm_weights_are_noticed(self):
        norm = self.model.layers[1].input_layernorm
        old = norm.weight
        norm.weight = old * 1.5
        after = logits(self.model, self.tokens)
        self.assertFalse(mx.allclose(after, self.before).item())
        with mock.patch.object(layers, "_run", own_code):
            self.assertTrue(mx.allclose(logits(self.model, self.tokens), after,
                                        atol=1e-4).item())
        norm.weight = old
        self.assertSame(logits(self.model, self.tokens), self.before)

    def test_gradients_go_through_the_parts(self):
        def loss(weight, model):
            model.layers[0].post_attention_layernorm.weight = weight
            return logits(model, self.tokens).square().mean()

        plain = tiny()
        gradients = []
        for model in (plain, self.model):
            weight = model.layers[0].post_attention_layernorm.weight
            gradients.append(mx.grad(lambda w: loss(w, model))(weight))
            model.layers[0].post_attention_layernorm.weight = weight
        self.assertGreater(mx.max(mx.abs(gradients[0])).item(), 0)
        self.assertTrue(mx.allclose(gradients[0], gradients[1], rtol=1e-3, atol=1e-5).item())
        self.assertSame(logits(self.model, self.tokens), self.before)

    def test_a_part_of_another_kind(self):
        """A layer that cannot be one op says so, and its attention may still be one."""
        model = tiny()
        report = None
        with mock.patch.object(qmlp.mlx._patch, "_is_llama_mlp", lambda kind: False):
            report = qmlp.mlx.patch(model)
        kinds = {}
        for path, what in report.replaced:
            kinds.setdefault(what, []).append(path)
        self.assertEqual(kinds["attention"],
                         [f"model.layers.{i}.self_attn" for i in range(3)])
        self.assertNotIn("whole layer", kinds)
        self.assertTrue(mx.allclose(logits(model, self.tokens), self.before, atol=1e-4).item())

    def test_every_llama_family_layer_of_mlx_lm(self):
        import importlib

        for name in ("llama", "qwen2", "qwen3", "phi3", "seed_oss", "mimo"):
            module = importlib.import_module(f"mlx_lm.models.{name}")
            self.assertTrue(layers.is_llama_block(module.TransformerBlock), name)
        for name in ("llama", "qwen2", "qwen3", "granite", "minicpm", "seed_oss", "mimo"):
            module = importlib.import_module(f"mlx_lm.models.{name}")
            self.assertIsNotNone(layers.attention_form(module.Attention), name)
        from mlx_lm.models import gemma2, olmo2

        self.assertFalse(layers.is_llama_block(gemma2.TransformerBlock))
        self.assertFalse(layers.is_llama_block(olmo2.TransformerBlock))
        self.assertIsNone(layers.attention_form(olmo2.Attention))


if __name__ == "__main__":
    unittest.main()
