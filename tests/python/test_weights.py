"""The weights that our kernels multiply with, against exact arithmetic and against MLX."""
import unittest

import mlx.core as mx
import numpy

import support

MODULES = ["model.embed_tokens"] + [
    f"model.layers.{layer}.{name}"
    for layer in (0, 14, 29)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
]


def kernel_weights(folder, module, name, dtype):
    out = support.scratch() / "weights.bin"
    support.run(support.program("tests/python/dump_weights"), folder, module, name, out)
    flat = numpy.fromfile(out, dtype)
    out.unlink()
    return flat


class DecodedWeights(unittest.TestCase):
    def check(self, folder, module, tensors):
        bits, group = support.spec(folder, module)
        codes = tensors[module + ".weight"]
        scales = tensors[module + ".scales"]
        biases = tensors[module + ".biases"]
        N, K = codes.shape[0], scales.shape[1] * group
        # MLX in f32: the product of a 16-bit scale and a code is exact, so the sum rounds once.
        wide = numpy.array(mx.dequantize(codes, scales.astype(mx.float32),
                                         biases.astype(mx.float32), group_size=group, bits=bits))
        unit = mx.ones_like(scales).astype(mx.float32)
        zero = mx.zeros_like(scales).astype(mx.float32)
        integers = numpy.array(mx.dequantize(codes, unit, zero, group_size=group, bits=bits))
        repeat = [numpy.array(t.astype(mx.float32)).astype(numpy.float64).repeat(group, 1)
                  for t in (scales, biases)]
        exact = repeat[0] * integers + repeat[1]  # 19 and 11 bits over 40 binades: exact in 53
        expected = {
            "f32": (exact.astype(numpy.float32), numpy.float32, wide),
            "f16": (exact.astype(numpy.float16), numpy.float16, wide.astype(numpy.float16)),
            "bf16": (support.bf16_patterns(exact), numpy.uint16, support.bf16_patterns(wide)),
        }
        for name, (once, dtype, from_mlx) in expected.items():
            ours = kernel_weights(folder, module, name, dtype).reshape(K, N).T
            self.assertEqual(int((ours != once).sum()), 0, f"{module} {name}: exact rounding")
            # Rounding MLX's f32 weight again can only differ where f32 had rounded to a tie.
            twice = from_mlx != once
            self.assertTrue(numpy.all(wide.astype(numpy.float64)[twice] != exact[twice]),
                            f"{module} {name}: MLX differs where its f32 weight is exact")
            if name == "f32":
                self.assertEqual(int(twice.sum()), 0, f"{module}: mx.dequantize in f32")

    def test_converted_model(self):
        tensors = mx.load(str(support.model() / "model.safetensors"))
        for module in MODULES:
            with self.subTest(module):
                self.check(support.model(), module, tensors)

    def test_mixed_model(self):
        tensors = mx.load(str(support.mixed_model() / "model.safetensors"))
        for module in MODULES[5:8]:
            with self.subTest(module):
                self.check(support.mixed_model(), module, tensors)


if __name__ == "__main__":
    unittest.main()
