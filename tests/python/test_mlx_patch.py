"""qmlp.mlx.patch: mlx-lm models give the same text, and everything else about them still works."""
import copy
import json
import threading
import unittest
import unittest.mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy
from mlx.utils import tree_flatten
from mlx_lm.models import cache, llama, qwen2_moe, qwen3
from mlx_lm.tuner.utils import linear_to_lora_layers

import support

GOLDENS = json.loads((support.DATA / "smollm2" / "greedy.json").read_text())
qmlp = None


def setUpModule():
    global qmlp
    qmlp = support.package()
    import qmlp.mlx


def tiny(dtype=mx.float32, tied=True, layers=3, quantize=True, module=llama, **changes):
    """A random model with gate, up and down at different widths."""
    mx.random.seed(11)
    arguments = dict(
        model_type="llama", hidden_size=128, num_hidden_layers=layers, intermediate_size=192,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=320,
        head_dim=32, rope_theta=10000.0, tie_word_embeddings=tied, max_position_embeddings=512)
    arguments.update(changes)
    model = module.Model(module.ModelArgs.from_dict(arguments))
    model.set_dtype(dtype)
    widths = {"gate_proj": (4, 32), "up_proj": (8, 64), "down_proj": (6, 64), "v_proj": (3, 32)}

    def choose(path, layer):
        if not hasattr(layer, "to_quantized"):
            return False
        bits, group = widths.get(path.rpartition(".")[2], (5, 64))
        return {"bits": bits, "group_size": group}

    if quantize:
        nn.quantize(model, class_predicate=choose)
    mx.eval(model.parameters())
    return model


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def some_tokens(model, count=17, rows=1):
    mx.random.seed(5)
    return mx.random.randint(0, 320, (rows, count))


def logits(model, tokens, kv=None):
    return model(tokens, cache=kv).astype(mx.float32)


class PatchTest(unittest.TestCase):
    def assertSameArrays(self, a, b):
        self.assertEqual(sorted(a), sorted(b))
        for name in a:
            self.assertEqual((a[name].dtype, a[name].shape), (b[name].dtype, b[name].shape), name)
            self.assertTrue(mx.array_equal(a[name].view(mx.uint8), b[name].view(mx.uint8)).item(),
                            name)

    def assertClose(self, got, want, relative):
        worst = mx.max(mx.abs(got - want)).item() / mx.max(mx.abs(want)).item()
        self.assertLess(worst, relative)


class Report(PatchTest):
    def test_what_was_replaced(self):
        report = qmlp.mlx.patch(tiny())
        kinds = {}
        for path, what in report.replaced:
            kinds.setdefault(what, []).append(path)
        self.assertEqual({what: len(paths) for what, paths in kinds.items()},
                         {"fused MLP": 3, "linear layer": 12, "embedding and head": 1, "RMSNorm": 7,
                          "RoPE": 3, "whole layer": 3})
        self.assertEqual(report.left, [])
        self.assertIn("replaced: 3 x fused MLP (model.layers.0.mlp ... model.layers.2.mlp)",
                      str(report))

    def test_untied(self):
        model = tiny(tied=False)
        report = qmlp.mlx.patch(model)
        self.assertIn(("lm_head", "linear layer"), report.replaced)
        self.assertEqual(report.left,
                         [("model.embed_tokens", "embedding that is only looked up")])

    def test_what_is_left(self):
        model = tiny(quantize=False)
        nn.quantize(model, group_size=32, bits=4, mode="mxfp4", class_predicate=lambda path, layer:
                    path.endswith("q_proj"))
        nn.quantize(model, class_predicate=lambda path, layer: path.endswith("gate_proj"))
        report = qmlp.mlx.patch(model)
        left = dict(report.left)
        self.assertEqual(left["model.layers.0.self_attn.q_proj"], "quantization mode mxfp4")
        self.assertEqual(left["model.layers.0.self_attn.k_proj"],
                         "linear layer that is not quantized")
        self.assertEqual(left["model.layers.0.mlp"], "MLP not fused: up_proj is Linear")
        self.assertEqual([what for path, what in report.replaced if path.endswith("proj")],
                         ["linear layer"] * 3)
        model = tiny()
        only = qmlp.mlx.patch(model, small_ops=False)
        self.assertEqual({what for _, what in only.replaced},
                         {"fused MLP", "linear layer", "embedding and head"})

    def test_experts_are_left_alone(self):
        model = tiny(
            module=qwen2_moe, model_type="qwen2_moe", num_experts_per_tok=2, num_experts=4,
            moe_intermediate_size=64, shared_expert_intermediate_size=128, tied=False)
        tokens = some_tokens(model)
        want = logits(model, tokens)
        report = qmlp.mlx.patch(model)
        experts = [path for path, what in report.left if what == "experts (QuantizedSwitchLinear)"]
        self.assertEqual(len(experts), 9)
        self.assertIn(("model.layers.0.mlp.shared_expert", "fused MLP"), report.replaced)
        self.assertClose(logits(model, tokens), want, 1e-4)

    def test_another_mlp_is_not_fused(self):
        class Scaled(llama.MLP):
            def __call__(self, x):
                return 0.5 * super().__call__(x)

        model = tiny()
        for layer in model.layers:
            layer.mlp.__class__ = Scaled
        tokens = some_tokens(model)
        want = logits(model, tokens)
        report = qmlp.mlx.patch(model)
        self.assertIn(("model.layers.0.mlp",
                       "MLP that is not down(silu(gate) * up): its layers alone"), report.left)
        self.assertEqual(sum(what == "linear layer" for _, what in report.replaced), 21)
        self.assertClose(logits(model, tokens), want, 1e-4)

    def test_every_llama_family_mlp_of_mlx_lm(self):
        from qmlp.mlx._patch import _is_llama_mlp

        import importlib

        for name in ("llama", "qwen2", "qwen3", "smollm3", "minicpm", "granite", "ministral3",
                     "mistral3", "seed_oss", "ernie4_5", "mimo", "olmo2", "olmo3", "cohere",
                     "exaone4", "stablelm"):
            module = importlib.import_module(f"mlx_lm.models.{name}")
            kinds = [value for key, value in vars(module).items()
                     if key.endswith("MLP") and isinstance(value, type)]
            for kind in kinds:
                self.assertTrue(_is_llama_mlp(kind), f"{name}.{kind.__name__}")
        from mlx_lm.models import gemma2, phi3

        self.assertFalse(_is_llama_mlp(gemma2.MLP))
        self.assertFalse(_is_llama_mlp(phi3.MLP))

    def test_not_a_model(self):
        with self.assertRaises(TypeError) as caught:
            qmlp.mlx.patch("model")
        self.assertIn("needs an mlx.nn.Module", str(caught.exception))


class Numbers(PatchTest):
    def test_f32_logits(self):
        for changes in ({}, {"tied": False}, {"mlp_bias": True, "attention_bias": True},
                        {"module": qwen3, "model_type": "qwen3"}):
            model = tiny(**changes)
            for module in model.modules():  # biases that matter
                if isinstance(module, nn.QuantizedLinear) and "bias" in module:
                    module.bias = mx.random.normal(module.bias.shape) * 0.1
            tokens = some_tokens(model, rows=2)
            want = logits(model, tokens)
            qmlp.mlx.patch(model)
            got = logits(model, tokens)
            self.assertClose(got, want, 1e-4)
            # a row's bits do not depend on the others
            alone = logits(model, tokens[1:])
            self.assertClose(alone, want[1:], 1e-4)
            # decoding token by token
            kv = cache.make_prompt_cache(model)
            steps = [logits(model, tokens[:, i:i + 1], kv) for i in range(5)]
            self.assertClose(mx.concatenate(steps, axis=1), want[:, :5], 1e-4)

    def test_half_types_are_nearer_than_mlx(self):
        # MLX's CPU code sums in the type itself; against f32 of the same weights ours must be nearer.
        for dtype in (mx.float16, mx.bfloat16):
            model = tiny(dtype)
            wide = copy.deepcopy(model)
            wide.set_dtype(mx.float32)
            tokens = some_tokens(model)
            exact = logits(wide, tokens)
            theirs = mx.mean(mx.abs(logits(model, tokens) - exact)).item()
            report = qmlp.mlx.patch(model)
            self.assertEqual(report.activation, {mx.float16: "f16", mx.bfloat16: "bf16"}[dtype])
            self.assertEqual(model(tokens).dtype, dtype)
            ours = mx.mean(mx.abs(logits(model, tokens) - exact)).item()
            self.assertLess(ours, theirs)

    def test_f32_on_a_gpu_is_mlx_s_part(self):
        from qmlp.mlx import _modules

        model = tiny(mx.bfloat16)
        qmlp.mlx.patch(model)
        linear = model.layers[0].self_attn.o_proj
        self.assertIsNotNone(linear._qmlp_weight())
        model.set_dtype(mx.float32)
        with unittest.mock.patch.object(_modules.native, "device", return_value="cuda:0"):
            self.assertIsNone(linear._qmlp_weight())
        self.assertIsNotNone(linear._qmlp_weight())

    def test_mixed_scales_follow_promotion(self):
        model = tiny(mx.bfloat16)
        for layer in model.layers:
            for name in ("scales", "biases"):
                layer.mlp.down_proj[name] = layer.mlp.down_proj[name].astype(mx.float16)
        tokens = some_tokens(model)
        want = model(tokens)
        qmlp.mlx.patch(model)
        got = model(tokens)
        self.assertEqual(got.dtype, want.dtype)
        self.assertEqual(got.dtype, mx.float32)


class AfterPatching(PatchTest):
    def setUp(self):
        self.model = tiny()
        self.tokens = some_tokens(self.model)
        self.original = {name: mx.array(array) for name, array in parameters(self.model).items()}
        mx.eval(self.original)
        self.want = logits(self.model, self.tokens)
        mx.eval(self.want)
        self.report = qmlp.mlx.patch(self.model)

    def test_parameters_and_saving(self):
        self.assertSameArrays(parameters(self.model), self.original)
        folder = support.scratch() / "patched-save"
        folder.mkdir(exist_ok=True)
        mlx_lm.utils.save_model(folder, self.model)
        saved = mx.load(str(folder / "model.safetensors"))
        self.assertSameArrays(saved, self.original)

    def test_memory_is_one_copy(self):
        mx.eval(self.model.parameters())  # everything back, beside the packed form
        unpacked = mx.get_active_memory()
        qmlp.mlx.patch(self.model)  # hands out fresh lazy arrays
        freed = unpacked - mx.get_active_memory()
        quantized = sum(array.nbytes for name, array in self.original.items()
                        if name.rpartition(".")[2] in ("scales", "biases")
                        or array.dtype == mx.uint32)
        self.assertGreaterEqual(freed, quantized)
        held = {id(module._qmlp.weight): module._qmlp.weight.nbytes
                for module in self.model.modules() if hasattr(module, "_qmlp")}
        held.update({id(module._qmlp_gate_up[0]): module._qmlp_gate_up[0].nbytes
                     for module in self.model.modules() if hasattr(module, "_qmlp_gate_up")})
        self.assertLess(sum(held.values()), 1.1 * quantized)
        self.assertGreaterEqual(sum(held.values()), quantized)

    def test_unpatch(self):
        patched = logits(self.model, self.tokens)
        # each of the 3 layers: the block, its attention and its MLP
        self.assertEqual(qmlp.mlx.unpatch(self.model), 9 + 21 + 1 + 7 + 3)
        self.assertEqual({type(module).__module__.partition(".")[0]
                          for module in self.model.modules()}, {"mlx", "mlx_lm"})
        self.assertSameArrays(parameters(self.model), self.original)
        self.assertTrue(mx.array_equal(logits(self.model, self.tokens), self.want).item())
        self.assertEqual(qmlp.mlx.unpatch(self.model), 0)
        qmlp.mlx.patch(self.model)
        self.assertTrue(mx.array_equal(logits(self.model, self.tokens), patched).item())

    def test_context_manager(self):
        model = tiny()
        with qmlp.mlx.patch(model) as report:
            self.assertEqual(len(report.replaced), 16 + 7 + 3 + 3)
            self.assertClose(logits(model, self.tokens), self.want, 1e-4)
        self.assertIs(type(model.layers[0].mlp), llama.MLP)
        self.assertTrue(mx.array_equal(logits(model, self.tokens), self.want).item())

    def test_new_weights_are_noticed(self):
        other = tiny(layers=3)
        for module in other.modules():
            if isinstance(module, nn.QuantizedLinear):
                module.scales = module.scales * 1.25
        want = logits(other, self.tokens)
        self.model.update(other.parameters())
        self.assertClose(logits(self.model, self.tokens), want, 1e-4)
        self.assertFalse(mx.allclose(want, self.want).item())

    def test_a_type_change_is_noticed(self):
        self.model.set_dtype(mx.float16)
        self.assertEqual(self.model(self.tokens).dtype, mx.float16)
        self.assertClose(logits(self.model, self.tokens), self.want, 0.05)

    def test_deep_copy(self):
        copied = copy.deepcopy(self.model)
        self.assertTrue(mx.array_equal(logits(copied, self.tokens),
                                       logits(self.model, self.tokens)).item())

    def test_compiled_model(self):
        for compiled in (mx.compile(lambda t: self.model(t)),
                         mx.compile(lambda t: self.model(t), inputs=self.model.state)):
            for count in (17, 3):
                tokens = self.tokens[:, :count]
                self.assertClose(compiled(tokens).astype(mx.float32),
                                 logits(self.model, tokens), 1e-4)

    def test_lora_training(self):
        """Adapters around patched layers train as around MLX's own."""
        plain = tiny()
        losses = []
        for model in (plain, self.model):
            model.freeze()
            mx.random.seed(3)
            linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": [
                "self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"]})
            self.assertEqual(len(tree_flatten(model.trainable_parameters())), 16)
            optimizer = mlx_optimizer()
            state = [model.state, optimizer.state]

            def loss(m, tokens):
                out = m(tokens[:, :-1]).astype(mx.float32)
                return nn.losses.cross_entropy(out, tokens[:, 1:]).mean()

            value_and_grad = nn.value_and_grad(model, loss)

            def step(tokens):
                value, gradients = value_and_grad(model, tokens)
                optimizer.update(model, gradients)
                return value

            compiled = mx.compile(step, inputs=state, outputs=state)
            values = []
            for number in range(4):
                values.append((compiled if number > 1 else step)(self.tokens).item())
                mx.eval(state)
            losses.append(values)
        numpy.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
        self.assertLess(losses[1][-1], losses[1][0])
        kinds = [type(layer.mlp.up_proj).__module__ for layer in self.model.layers]
        self.assertEqual(kinds, ["qmlp.mlx._modules"] * 3)
        fused = self.model.layers[2].self_attn.q_proj.fuse()
        self.assertIsInstance(fused, nn.QuantizedLinear)
        # the layer that has no adapters still runs fused
        qmlp.reset_dispatch_counts()
        mx.eval(self.model(self.tokens))
        self.assertEqual(sum(count for name, count in qmlp.dispatch_counts().items()
                             if name.startswith("swiglu")), 1)

    def test_trained_scales_are_mlx_own_part(self):
        layer = self.model.layers[0].self_attn.q_proj
        layer.unfreeze(keys=["scales", "biases"], recurse=False)
        x = mx.random.normal((4, 128))
        gradient = nn.value_and_grad(layer, lambda v: layer(v).square().sum())(x)[1]
        self.assertGreater(mx.max(mx.abs(gradient["scales"])).item(), 0)

    def test_prompt_cache_and_batches(self):
        kv = cache.make_prompt_cache(self.model)
        first = logits(self.model, self.tokens[:, :9], kv)
        folder = support.scratch() / "prompt.safetensors"
        cache.save_prompt_cache(str(folder), kv)
        again = cache.load_prompt_cache(str(folder))
        rest = logits(self.model, self.tokens[:, 9:], again)
        self.assertClose(mx.concatenate([first, rest], axis=1), self.want, 1e-4)


def mlx_optimizer():
    import mlx.optimizers as optimizers

    return optimizers.Adam(learning_rate=1e-2)


class Changes(PatchTest):
    """What happens to a patched model afterwards is seen, and what was one op stays one."""

    def setUp(self):
        self.model = tiny()
        self.tokens = some_tokens(self.model)
        qmlp.mlx.patch(self.model)
        logits(self.model, self.tokens)

    def assertAsFresh(self, change):
        """The model, changed, has the bits of a model that was changed first and patched then."""
        fresh = tiny()
        change(fresh)
        want_mlx = logits(fresh, self.tokens)
        qmlp.mlx.patch(fresh)
        change(self.model)
        got = logits(self.model, self.tokens)
        self.assertTrue(mx.array_equal(got, logits(fresh, self.tokens)).item())
        self.assertClose(got, want_mlx, 1e-4)

    def whole_layers(self):
        return [layer._qmlp_op() is not None for layer in self.model.layers]

    def scaled(self, factor):
        def change(model):
            other = tiny()
            for module in other.modules():
                if isinstance(module, nn.QuantizedLinear):
                    module.scales = module.scales * factor
            mx.eval(other.parameters())
            model.update(other.parameters())
        return change

    def test_replaced_weights_are_packed_as_one_again(self):
        self.assertAsFresh(self.scaled(1.25))
        self.assertEqual(self.whole_layers(), [True] * 3)
        for layer in self.model.layers:
            self.assertIsNotNone(layer.mlp._qmlp_weights())
        weights = [layer.mlp._qmlp_gate_up for layer in self.model.layers]
        logits(self.model, self.tokens)
        self.assertEqual([id(layer.mlp._qmlp_gate_up) for layer in self.model.layers],
                         [id(held) for held in weights])  # packed once

    def test_replaced_weights_do_not_leave_old_ones_behind(self):
        self.scaled(1.25)(self.model)
        logits(self.model, self.tokens)
        qmlp.mlx.patch(self.model)
        held = {id(module._qmlp.weight): module._qmlp.weight.nbytes
                for module in self.model.modules() if hasattr(module, "_qmlp")}
        held.update({id(module._qmlp_gate_up[0]): module._qmlp_gate_up[0].nbytes
                     for module in self.model.modules() if hasattr(module, "_qmlp_gate_up")})
        unpatched = tiny()
        quantized = sum(array.nbytes for name, array in parameters(unpatched).items()
                        if name.rpartition(".")[2] in ("scales", "biases")
                        or array.dtype == mx.uint32)
        self.assertLess(sum(held.values()), 1.1 * quantized)

    def test_patching_again_keeps_new_weights(self):
        def change(model):
            self.scaled(1.25)(model)
            if model is self.model:
                qmlp.mlx.patch(model)  # before any call has seen them
        self.assertAsFresh(change)

    def test_a_linear_bias_that_comes_later(self):
        for name in ("q_proj", "down_proj", "gate_proj"):
            def change(model, name=name):
                layer = model.layers[1]
                projection = layer.mlp[name] if name in layer.mlp else layer.self_attn[name]
                N = projection.scales.shape[0]
                projection.bias = mx.arange(N, dtype=mx.float32) / N
            with self.subTest(name):
                self.setUp()
                before = logits(self.model, self.tokens)
                self.assertAsFresh(change)
                self.assertFalse(mx.allclose(before, logits(self.model, self.tokens)).item())

    def test_numbers_that_are_set_later(self):
        changes = {
            "attention's scale": lambda layer: setattr(layer.self_attn, "scale", 0.3),
            "eps": lambda layer: setattr(layer.input_layernorm, "eps", 0.5),
            "rope's base": lambda layer: setattr(layer.self_attn.rope, "base", 77.0),
            "rope's scale": lambda layer: setattr(layer.self_attn.rope, "scale", 0.25),
            "rope's kind": lambda layer: setattr(layer.self_attn.rope, "traditional", True),
        }
        for name, set_one in changes.items():
            with self.subTest(name):
                self.setUp()
                before = logits(self.model, self.tokens)
                self.assertAsFresh(lambda model, set_one=set_one: set_one(model.layers[0]))
                self.assertFalse(mx.allclose(before, logits(self.model, self.tokens)).item())

    def test_a_class_that_is_changed_or_wrapped_is_not_fused(self):
        import functools

        def doubled(call):
            @functools.wraps(call)
            def inner(self, *arguments, **named):
                return 2.0 * call(self, *arguments, **named)
            return inner

        def other_mlp(self, x):
            return 0.5 * self.down_proj(self.gate_proj(x) * self.up_proj(x))

        for kind, call in ((llama.TransformerBlock, doubled(llama.TransformerBlock.__call__)),
                           (llama.Attention, doubled(llama.Attention.__call__)),
                           (llama.MLP, doubled(llama.MLP.__call__)), (llama.MLP, other_mlp)):
            with self.subTest(f"{kind.__name__}: {call.__name__}"):
                model = tiny()
                own = logits(model, self.tokens)
                qmlp.mlx.unpatch(self.model)
                with unittest.mock.patch.object(kind, "__call__", call):
                    want = logits(model, self.tokens)
                    qmlp.mlx.patch(model)
                    self.assertClose(logits(model, self.tokens), want, 1e-4)
                    qmlp.mlx.unpatch(model)
                self.assertFalse(mx.allclose(own, want).item())

    def test_other_options(self):
        report = qmlp.mlx.patch(self.model, small_ops=False)
        kinds = {type(module).__name__ for module in self.model.modules()
                 if type(module).__module__.startswith("qmlp.")}
        self.assertEqual(kinds, {"QuantizedLinear", "QuantizedEmbedding"})
        self.assertEqual(sum(what == "fused MLP" for _, what in report.replaced), 3)
        self.assertFalse(any(isinstance(layer, qmlp.mlx._layers.FusedBlock)
                             for layer in self.model.layers))
        before = logits(self.model, self.tokens)
        qmlp.mlx.patch(self.model, small_ops=False, segments=4)  # of a GPU's sums: packs again
        self.assertTrue(mx.array_equal(logits(self.model, self.tokens), before).item())
        for asked in (3, -1, 16, None, "4", 1.0, 4.0):
            with self.assertRaisesRegex(ValueError, "segments is .*, needs 0, 1, 2, 4 or 8"):
                qmlp.mlx.patch(self.model, segments=asked)
            with self.assertRaisesRegex(ValueError, "segments is .*, needs 0, 1, 2, 4 or 8"):
                qmlp.mlx.pack(mx.zeros((8, 64)), segments=asked)
        fresh = tiny()
        qmlp.mlx.patch(fresh, small_ops=False)
        self.assertTrue(mx.array_equal(logits(self.model, self.tokens),
                                       logits(fresh, self.tokens)).item())
        report = qmlp.mlx.patch(self.model)
        self.assertEqual(sum(what == "whole layer" for _, what in report.replaced), 3)
        self.assertEqual(qmlp.mlx.patch(self.model, activation="bf16").activation, "bf16")
        self.model.set_dtype(mx.bfloat16)
        fresh = tiny()
        fresh.set_dtype(mx.bfloat16)
        qmlp.mlx.patch(fresh)
        self.assertTrue(mx.array_equal(logits(self.model, self.tokens),
                                       logits(fresh, self.tokens)).item())
        self.assertEqual(self.whole_layers(), [True] * 3)

    def test_the_inner_of_two_contexts_changes_nothing(self):
        with qmlp.mlx.patch(self.model):
            pass
        self.assertEqual(self.whole_layers(), [True] * 3)
        model = tiny()
        with qmlp.mlx.patch(model):
            with qmlp.mlx.patch(model):
                pass
            self.assertIsInstance(model.layers[0].mlp, llama.MLP)
            self.assertIsNot(type(model.layers[0].mlp), llama.MLP)
        self.assertIs(type(model.layers[0].mlp), llama.MLP)

    def test_patched_in_a_thread_that_has_ended(self):
        for last in ("unpatch", "patch"):
            model = tiny()
            original = parameters(model)
            thread = threading.Thread(target=qmlp.mlx.patch, args=(model,))
            thread.start()
            thread.join()
            getattr(qmlp.mlx, last)(model)
            self.assertSameArrays(parameters(model), original)


class SmolLM2(PatchTest):
    """The real model at f32 against mlx-lm's own tokens (tests/data/smollm2)."""

    @classmethod
    def setUpClass(cls):
        cls.model, cls.tokenizer = mlx_lm.load(str(support.model()))
        cls.model.set_dtype(mx.float32)
        mx.eval(cls.model.parameters())
        cls.report = qmlp.mlx.patch(cls.model)

    def test_report(self):
        self.assertEqual(len(self.report.replaced), 30 + 120 + 1 + 61 + 30 + 30)
        self.assertEqual(self.report.left, [])

    def test_teacher_forced(self):
        compared = 0
        for golden in GOLDENS:
            ids = golden["prompt_ids"] + golden["greedy_ids"][:-1]
            got = numpy.array(self.model(mx.array(ids)[None])[0])
            for position, (top_ids, top) in enumerate(zip(golden["top8_ids"],
                                                          golden["top8_logits"])):
                worst = abs(got[position][top_ids] - top).max()
                self.assertLess(worst, 5e-3)
                if top[0] - top[1] > support.GAP:
                    compared += 1
                    self.assertEqual(int(got[position].argmax()), top_ids[0])
        self.assertGreater(compared, 350)

    def test_free_running(self):
        for golden in GOLDENS[:3]:
            start = len(golden["prompt_ids"]) - 1
            tokens = [response.token for response in mlx_lm.stream_generate(
                self.model, self.tokenizer, golden["prompt_ids"],
                max_tokens=min(24, len(golden["greedy_ids"])))]
            for n, token in enumerate(tokens):
                best, second = golden["top8_logits"][start + n][:2]
                if best - second <= support.GAP and token != golden["greedy_ids"][n]:
                    break
                self.assertEqual(token, golden["greedy_ids"][n])

    def test_speculative_and_batch(self):
        golden = GOLDENS[0]
        text = lambda responses: [response.token for response in responses]
        want = text(mlx_lm.stream_generate(self.model, self.tokenizer, golden["prompt_ids"],
                                           max_tokens=8))
        drafted = text(mlx_lm.stream_generate(
            self.model, self.tokenizer, golden["prompt_ids"], max_tokens=8,
            draft_model=self.model, num_draft_tokens=3))
        self.assertEqual(drafted, want)
        answers = mlx_lm.batch_generate(
            self.model, self.tokenizer, [golden["prompt_ids"], GOLDENS[1]["prompt_ids"]],
            max_tokens=8, verbose=False)
        self.assertIn("Paris", answers.texts[0])
        alone = mlx_lm.generate(self.model, self.tokenizer, GOLDENS[1]["prompt_ids"], max_tokens=8)
        self.assertEqual(answers.texts[1], alone)

    def test_unpatch_and_patch_again(self):
        ids = mx.array(GOLDENS[0]["prompt_ids"])[None]
        patched = self.model(ids)
        mx.eval(patched)
        qmlp.mlx.unpatch(self.model)
        own = self.model(ids[:, :4])
        mx.eval(own)
        qmlp.mlx.patch(self.model)
        self.assertTrue(mx.array_equal(self.model(ids), patched).item())
        self.assertClose(self.model(ids[:, :4]), own, 1e-5)


if __name__ == "__main__":
    unittest.main()
