"""`qmlp convert` of floats is mx.quantize on the CPU, bit for bit: every width, group and type."""
import json
import unittest

import mlx.core as mx
import numpy

import support

SPECS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
HIDDEN, INTERMEDIATE, VOCAB, HEADS = 256, 384, 96, 4


def rows(random, N, K):
    """Ordinary weights, then rows that a quantizer gets wrong: zeros, constants, one sign, ties."""
    w = random.standard_normal((N, K)).astype(numpy.float32) * 0.05
    special = [
        numpy.zeros(K), numpy.full(K, 0.25), numpy.full(K, -3.0), numpy.abs(w[0]), -numpy.abs(w[1]),
        numpy.tile([1.0, -1.0], K // 2), numpy.arange(K) / 8.0, w[2] * 1e-9, w[3] * 1000.0,
        numpy.where(numpy.arange(K) == 5, 100.0, w[4]), numpy.round(w[5] * 64) / 64,
    ]
    for i, row in enumerate(special):
        w[-1 - i] = row
    return w


def write_model(folder, dtype):
    folder.mkdir(exist_ok=True)
    random = numpy.random.default_rng(7)
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
              "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
              "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
              "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    tensors = {"model.embed_tokens.weight": rows(random, VOCAB, HIDDEN),
               "lm_head.weight": rows(random, VOCAB, HIDDEN),
               "model.norm.weight": numpy.ones(HIDDEN, numpy.float32)}
    for layer in range(len(SPECS)):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = rows(random, *shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = numpy.ones(HIDDEN, numpy.float32)
    arrays = {name: mx.array(t).astype(dtype) for name, t in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": len(SPECS),
              "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
              "num_key_value_heads": HEADS, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
              "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


class Quantize(unittest.TestCase):
    def check(self, name, dtype):
        source, target = (support.scratch() / f"{kind}-{name}" for kind in ("float", "quantized"))
        floats = write_model(source, dtype)
        patterns = ["embed=4/32", "head=8/64"] + [f"model.layers.{i}.*={bits}/{group}"
                                                  for i, (bits, group) in enumerate(SPECS)]
        support.qmlp("convert", source, target, "--force", "--bits", ",".join(patterns))
        quantized = mx.load(str(target / "model.safetensors"))
        modules = 0
        for key, weight in floats.items():
            module = key.removesuffix(".weight")
            if "norm" in module:
                self.assertTrue(mx.array_equal(quantized[key], weight).item(), key)
                continue
            bits, group = support.spec(target, module)
            if module.startswith("model.layers."):
                self.assertEqual((bits, group), SPECS[int(module.split(".")[2])], module)
            expected = mx.quantize(weight, group_size=group, bits=bits)
            for part, tensor in zip(("weight", "scales", "biases"), expected):
                ours = quantized[f"{module}.{part}"]
                self.assertEqual(ours.dtype, tensor.dtype, f"{module}.{part}")
                same = mx.array_equal(ours.view(mx.uint8), tensor.view(mx.uint8)).item()
                self.assertTrue(same, f"{module}.{part} with {bits} bits, group {group}")
            modules += 1
        self.assertEqual(modules, 7 * len(SPECS) + 2)

    def test_f32(self):
        self.check("f32", mx.float32)

    def test_f16(self):
        self.check("f16", mx.float16)

    def test_bf16(self):
        self.check("bf16", mx.bfloat16)

    def test_requantized(self):
        """The mixed copy is mx.quantize of the source's weights, decoded in f32."""
        source = mx.load(str(support.model() / "model.safetensors"))
        mixed = mx.load(str(support.mixed_model() / "model.safetensors"))
        for name, bits in (("gate_proj", 4), ("up_proj", 8), ("down_proj", 6)):
            for layer in (0, 17):
                module = f"model.layers.{layer}.mlp.{name}"
                self.assertEqual(support.spec(support.mixed_model(), module)[0], bits)
                old_bits, old_group = support.spec(support.model(), module)
                _, group = support.spec(support.mixed_model(), module)
                parts = [source[f"{module}.{part}"] for part in ("weight", "scales", "biases")]
                wide = mx.dequantize(parts[0], parts[1].astype(mx.float32),
                                     parts[2].astype(mx.float32), group_size=old_group,
                                     bits=old_bits)
                if (bits, group) == (old_bits, old_group):
                    expected = parts  # nothing to change, so nothing is lost
                else:
                    expected = mx.quantize(wide, group_size=group, bits=bits)
                for part, tensor in zip(("weight", "scales", "biases"), expected):
                    ours = mixed[f"{module}.{part}"]
                    tensor = tensor if part == "weight" else tensor.astype(ours.dtype)
                    self.assertTrue(mx.array_equal(ours, tensor).item(), f"{module}.{part}")


if __name__ == "__main__":
    unittest.main()
