"""Storage types of GGUF files against the `gguf` package's decoding and MLX's quantizer."""
import unittest

import gguf
import mlx.core as mx
import numpy
from gguf import GGMLQuantizationType as Type

import gguf_files
import support
from gguf_files import AFFINE, HALVES, REQUANTIZED, VOCAB
from test_gguf_models import CASES, base, convert, make

# Scales as files have them, and those at the ends of what f16 holds: subnormals, zeros, the largest.
USUAL = [2.0 ** -9, -2.0 ** -8, 0.0031, 0.0127, -0.0411, 0.00077]
EDGES = USUAL + [0.0, -0.0, 2.0 ** -24, -3 * 2.0 ** -24, 2.0 ** -14, 65504.0, -65504.0, 1023 * 2.0 ** -24]

HIDDEN = 256  # a row of each type's blocks


def model_of(qtype, scales, seed):
    """A llama model whose matrices are random blocks: its config, weights and stored blocks."""
    config = base(model_type="llama", hidden_size=HIDDEN, intermediate_size=512, head_dim=64,
                  num_hidden_layers=1)
    _, weights = make(config)
    rng = numpy.random.default_rng(seed)
    types = {name: (qtype, gguf_files.random_blocks(rng, qtype, *weight.shape, scales))
             for name, weight in weights.items() if weight.ndim == 2}
    return config, weights, types


def expected_weight(config, name, qtype, data):
    """The matrix as the `gguf` package decodes it, in Hugging Face's order of rows."""
    decoded = gguf.quants.dequantize(data, qtype)
    heads = gguf_files.stored_heads("llama", config, name)
    return gguf_files.halves(decoded, heads) if heads else decoded


class Types(unittest.TestCase):
    def test_decoding_is_exact(self):
        """Every type's decoding to f32 has the bits of the `gguf` package's."""
        for n, qtype in enumerate(HALVES):
            rng = numpy.random.default_rng(n)
            data = gguf_files.random_blocks(rng, qtype, 64, 512, EDGES)
            raw, out = support.scratch() / "blocks", support.scratch() / "values"
            data.tofile(raw)
            support.run(support.program("tests/python/dump_ggml"), int(qtype), 512, raw, out)
            actual = support.read(out, numpy.float32, 64, 512)
            expected = gguf.quants.dequantize(data, qtype)
            self.assertTrue(numpy.array_equal(actual, expected), qtype.name)
        print(f"{len(HALVES)} types, {64 * 512} values each")

    def test_affine_types_are_exact_with_f32_scales(self):
        """Q4_K and Q5_K are affine groups of 32, too: their scales are products of two numbers."""
        for n, (qtype, bits) in enumerate(AFFINE.items()):
            config, weights, types = model_of(qtype, EDGES, n)
            folder, report = convert(f"types-{qtype.name}", "llama", config, weights,
                                     "--scale-dtype", "f32", types=types)
            self.assertTrue(report["lossless"], qtype.name)
            converted = mx.load(str(folder / "model.safetensors"))
            for name, (_, data) in types.items():
                module = name.removesuffix(".weight")
                self.assertEqual(support.spec(folder, module), (bits, 32))
                actual = mx.dequantize(converted[name], converted[module + ".scales"],
                                       converted[module + ".biases"], 32, bits)
                expected = expected_weight(config, name, qtype, data)
                self.assertTrue(numpy.array_equal(numpy.array(actual), expected), name)

    def test_k_scales_in_f16(self):
        """By default the scales of Q4_K and Q5_K are rounded to f16, once, and the codes kept."""
        for n, qtype in enumerate((Type.Q4_K, Type.Q5_K)):
            config, weights, types = model_of(qtype, USUAL, n)
            exact, _ = convert("types-exact", "llama", config, weights, "--scale-dtype", "f32",
                               types=types)
            folder, report = convert("types-f16", "llama", config, weights, types=types)
            self.assertFalse(report["lossless"])
            self.assertTrue(any("keep their codes" in note for note in report["notes"]))
            wide = mx.load(str(exact / "model.safetensors"))
            narrow = mx.load(str(folder / "model.safetensors"))
            for name in types:
                module = name.removesuffix(".weight")
                self.assertTrue(mx.array_equal(narrow[name], wide[name]), name)
                for part in (".scales", ".biases"):
                    self.assertEqual(narrow[module + part].dtype, mx.float16)
                    self.assertTrue(mx.array_equal(narrow[module + part],
                                                   wide[module + part].astype(mx.float16)), name)

    def test_scales_beyond_f16_stay_f32(self):
        for qtype in (Type.Q4_K, Type.Q5_K, Type.Q8_0):
            config, weights, types = model_of(qtype, USUAL, 3)
            name = "model.layers.0.mlp.up_proj.weight"
            block = types[name][1].reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1])
            block[5, :2] = numpy.array([65504.0], numpy.float16).view(numpy.uint8)
            folder, report = convert("types-large", "llama", config, weights, types=types)
            self.assertTrue(any("up_proj" in note and "f32" in note for note in report["notes"]))
            converted = mx.load(str(folder / "model.safetensors"))
            self.assertEqual(converted["model.layers.0.mlp.up_proj.scales"].dtype, mx.float32)
            self.assertEqual(converted["model.layers.0.mlp.gate_proj.scales"].dtype, mx.float16)
            bits, group = support.spec(folder, "model.layers.0.mlp.up_proj")
            actual = mx.dequantize(converted[name], converted["model.layers.0.mlp.up_proj.scales"],
                                   converted["model.layers.0.mlp.up_proj.biases"], group, bits)
            self.assertTrue(numpy.array_equal(numpy.array(actual),
                                              expected_weight(config, name, *types[name])))

    def check_requantized(self, folder, config, types, bits_of, dtype):
        converted = mx.load(str(folder / "model.safetensors"))
        for name, (qtype, data) in types.items():
            module = name.removesuffix(".weight")
            bits, group = support.spec(folder, module)
            self.assertEqual((bits, group), bits_of(qtype), name)
            expected = mx.quantize(mx.array(expected_weight(config, name, qtype, data)), group, bits)
            actual = [converted[name], converted[module + ".scales"], converted[module + ".biases"]]
            for have, want in zip(actual, expected, strict=True):
                want = want if want.dtype == mx.uint32 else want.astype(dtype)
                self.assertEqual(have.dtype, want.dtype)
                self.assertTrue(mx.array_equal(have, want), (qtype.name, name))

    def test_requantized_types(self):
        """The others are decoded and quantized as MLX would, at the next width up."""
        for n, qtype in enumerate(REQUANTIZED):
            config, weights, types = model_of(qtype, USUAL, n)
            folder, report = convert(f"types-{qtype.name}", "llama", config, weights, types=types)
            self.assertFalse(report["lossless"])
            self.check_requantized(folder, config, types, lambda t: (REQUANTIZED[t], 32), mx.float16)
            folder, _ = convert(f"types-{qtype.name}", "llama", config, weights, "--scale-dtype",
                                "f32", types=types)
            self.check_requantized(folder, config, types, lambda t: (REQUANTIZED[t], 32), mx.float32)

    def test_edge_scales_requantized(self):
        for n, qtype in enumerate(REQUANTIZED):
            config, weights, types = model_of(qtype, EDGES, 10 + n)
            folder, _ = convert(f"types-{qtype.name}", "llama", config, weights, "--scale-dtype",
                                "f32", types=types)
            self.check_requantized(folder, config, types, lambda t: (REQUANTIZED[t], 32), mx.float32)

    def test_bits_chosen_by_hand(self):
        for n, qtype in enumerate([*REQUANTIZED, Type.Q4_K, Type.Q5_K]):
            config, weights, types = model_of(qtype, USUAL, n)
            folder, _ = convert("types-bits", "llama", config, weights, "--bits", "*=6/64",
                                "--scale-dtype", "f32", types=types)
            self.check_requantized(folder, config, types, lambda t: (6, 64), mx.float32)

    def test_a_file_of_many_types(self):
        """As llama.cpp's quantizer leaves them: K-quants, and others where rows do not divide."""
        config = base(model_type="llama", hidden_size=256, intermediate_size=352, head_dim=64,
                      num_hidden_layers=1)
        _, weights = make(config)
        rng = numpy.random.default_rng(3)
        chosen = {"model.embed_tokens": Type.Q6_K, "q_proj": Type.Q4_K, "k_proj": Type.Q5_K,
                  "v_proj": Type.Q3_K, "o_proj": Type.Q2_K, "gate_proj": Type.IQ4_XS,
                  "up_proj": Type.IQ4_NL, "lm_head": Type.Q8_0}
        for down in (Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.Q4_0):
            types = {}
            for name, weight in weights.items():
                if weight.ndim == 2:
                    qtype = next((t for part, t in chosen.items() if part in name), down)
                    types[name] = (qtype, gguf_files.random_blocks(rng, qtype, *weight.shape, USUAL))
            folder, report = convert("types-many", "llama", config, weights, "--scale-dtype", "f32",
                                     types=types)
            self.assertFalse(report["lossless"])
            converted = mx.load(str(folder / "model.safetensors"))
            for name, (qtype, data) in types.items():
                module = name.removesuffix(".weight")
                bits, group = support.spec(folder, module)
                expected = mx.array(expected_weight(config, name, qtype, data))
                if qtype in REQUANTIZED:
                    expected = mx.dequantize(*mx.quantize(expected, group, bits), group, bits)
                actual = mx.dequantize(converted[name], converted[module + ".scales"],
                                       converted[module + ".biases"], group, bits)
                self.assertTrue(mx.array_equal(actual, expected), (qtype.name, name))
            # It runs: the logits are finite.
            row = support.qmlp_json("kl", folder, "--prompt-ids", "5,6,7", "--top-logits", VOCAB)
            self.assertTrue(all(logit is not None for logit in row["positions"][-1]["logits"]))

    def test_k_quants_of_stacked_modules(self):
        config = CASES["phi3"][1] | {"hidden_size": 256}
        _, weights = make(config)
        rng = numpy.random.default_rng(4)
        types = {}
        for n, (name, weight) in enumerate(weights.items()):
            if weight.ndim == 2 and weight.shape[1] % 256 == 0:
                qtype = (Type.Q4_K, Type.Q6_K)[n % 2]
                types[name] = (qtype, gguf_files.random_blocks(rng, qtype, *weight.shape, USUAL))
        folder, _ = convert("types-phi3", "phi3", config, weights, "--bits", "gate_up=4,qkv=5",
                            types=types)
        for name in types:
            if "gate_up" in name:
                self.assertEqual(support.spec(folder, name.removesuffix(".weight")), (4, 32))


if __name__ == "__main__":
    unittest.main()
