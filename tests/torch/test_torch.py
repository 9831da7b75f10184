"""qmlp.torch and torch tensors in qmlp. Run by tools/check_torch.sh, which has torch; not by ./test."""
import gc
import unittest

import numpy
import torch

import qmlp
import qmlp.torch

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def same(a, b):
    wide = torch.int32 if a.dtype == torch.float32 else torch.int16
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(wide), b.view(wide))


class Torch(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        torch._dynamo.reset()

    def weights(self, name, hidden=128, intermediate=96):
        dtype = TYPES[name]
        gate, up = (qmlp.quantize(torch.randn(intermediate, hidden).to(dtype), bits=bits)
                    for bits in (4, 8))
        down = qmlp.quantize(torch.randn(hidden, intermediate).to(dtype), bits=6, group_size=32)
        return gate, up, down

    def test_arrays(self):
        for name, dtype in TYPES.items():
            gate, up, down = self.weights(name)
            self.assertEqual((gate.codes.dtype, gate.scales.dtype), (torch.uint32, dtype))
            self.assertEqual(qmlp.dequantize(gate).dtype, dtype)
            x = torch.randn(2, 5, 128).to(dtype)
            packed = qmlp.pack(gate)
            y = qmlp.quantized_linear(x, packed)
            self.assertIsInstance(y, torch.Tensor)
            # the bits of NumPy's call
            from_numpy = qmlp.quantized_linear(
                x.float().numpy().astype(packed.decode_row(0).dtype), packed)
            self.assertTrue(numpy.array_equal(from_numpy.astype(numpy.float32), y.float().numpy()))
            self.assertTrue(same(qmlp.quantized_linear(x.transpose(0, 1), packed),
                                 y.transpose(0, 1).contiguous()))
            out = torch.empty(2, 5, 96, dtype=dtype)
            self.assertIs(qmlp.quantized_linear(x, packed, out=out), out)
            self.assertTrue(same(out, y))
            both = qmlp.pack(gate, up)
            hidden = qmlp.fused_swiglu(x, both)
            packed_down = qmlp.pack(down)
            self.assertTrue(same(qmlp.fused_mlp(x, both, packed_down, residual=x),
                                 qmlp.quantized_linear(hidden, packed_down, residual=x)))
        int_codes = qmlp.QuantizedTensor(gate.codes.view(torch.int32), gate.scales, gate.biases)
        self.assertTrue(same(qmlp.quantized_linear(x, qmlp.pack(int_codes)), y))

    def test_refusals(self):
        gate, _, _ = self.weights("f32")
        packed = qmlp.pack(gate)
        x = torch.randn(3, 128)
        for call, kind, text in (
                (lambda: qmlp.quantized_linear(x.double(), packed), TypeError, "float64"),
                (lambda: qmlp.quantized_linear(x.half(), packed), TypeError, "x is f16"),
                (lambda: qmlp.quantized_linear(x, packed, residual=numpy.zeros((3, 96), "f4")),
                 TypeError, "give one library's"),
                (lambda: qmlp.quantized_linear(x.to("meta"), packed), TypeError, "meta"),
                (lambda: qmlp.torch.quantized_linear(x, gate), TypeError, "needs a PackedWeight"),
        ):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(text, str(caught.exception))

    def test_ops_are_registered_soundly(self):
        gate, up, down = self.weights("f32")
        both, one, packed_down = qmlp.pack(gate, up), qmlp.pack(gate), qmlp.pack(down)
        number = qmlp.torch._number
        x, bias = torch.randn(2, 5, 128), torch.randn(96)
        torch.library.opcheck(torch.ops.qmlp.quantized_linear.default,
                              (x, number(one), bias, torch.randn(2, 5, 96)))
        torch.library.opcheck(torch.ops.qmlp.fused_swiglu.default, (x, number(both), bias, None))
        torch.library.opcheck(torch.ops.qmlp.fused_mlp.default,
                              (x, number(both), number(packed_down), None, None, None, x))

    def test_compile(self):
        gate, up, down = self.weights("bf16")
        layers = torch.nn.ModuleList(
            [qmlp.torch.FusedMLP(qmlp.pack(gate, up), qmlp.pack(down)) for _ in range(3)])
        head = qmlp.torch.QuantizedLinear(qmlp.pack(gate), torch.randn(96, dtype=torch.bfloat16))

        def model(x):
            for layer in layers:
                x = layer(x, residual=x)
            return head(x)

        for dynamic in (False, True):
            compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
            for shape in ((2, 5, 128), (7, 128), (1, 128)):
                x = torch.randn(shape, dtype=torch.bfloat16)
                self.assertTrue(same(compiled(x), model(x)))

    def test_gradients(self):
        """Against autograd through the decoded weights: f32, so that only the order of sums differs."""
        gate, up, down = self.weights("f32")
        both, one, packed_down = qmlp.pack(gate, up), qmlp.pack(gate), qmlp.pack(down)
        g, u, d = (qmlp.dequantize(w) for w in (gate, up, down))
        silu = torch.nn.functional.silu

        def leaves():
            torch.manual_seed(2)
            return [torch.randn(shape).requires_grad_() for shape in
                    ((2, 5, 128), (96,), (96,), (128,), (2, 5, 96), (2, 5, 128))]

        def hidden(x, gate_bias, up_bias):
            return silu(x @ g.T + gate_bias) * (x @ u.T + up_bias)

        for ours, theirs in (
                (lambda x, b, _, d_, r, q: qmlp.quantized_linear(x, one, linear_bias=b, residual=r),
                 lambda x, b, _, d_, r, q: x @ g.T + b + r),
                (lambda x, b, c, d_, r, q: qmlp.fused_swiglu(x, both, gate_bias=b, up_bias=c),
                 lambda x, b, c, d_, r, q: hidden(x, b, c)),
                (lambda x, b, c, d_, r, q: qmlp.fused_mlp(
                    x, both, packed_down, gate_bias=b, up_bias=c, down_bias=d_, residual=q),
                 lambda x, b, c, d_, r, q: hidden(x, b, c) @ d.T + d_ + q)):
            for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True)):
                mine, right = leaves(), leaves()
                wrap(ours)(*mine).square().sum().backward()
                theirs(*right).square().sum().backward()
                for a, b in zip(mine, right):
                    self.assertEqual(a.grad is None, b.grad is None)
                    if b.grad is not None:
                        error = (a.grad - b.grad).norm() / b.grad.norm()
                        self.assertLess(error.item(), 1e-5)
        x = leaves()[0]
        with torch.no_grad():
            self.assertFalse(qmlp.quantized_linear(x, one).requires_grad)
        self.assertTrue(torch.equal(qmlp.quantized_linear(x, one), qmlp.quantized_linear(x.detach(), one)))
        for call, text in (
                (lambda: qmlp.quantized_linear(x, one, out=torch.empty(2, 5, 96)), "out and gate_tap"),
                (lambda: qmlp.fused_swiglu(x, both, gate_tap=torch.empty(2, 5, 96)),
                 "out and gate_tap"),
                (lambda: qmlp.quantized_linear(
                    x.detach(), one, out=torch.empty(2, 5, 96).requires_grad_()), "out and gate_tap"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                call()
        with self.assertRaisesRegex(TypeError, "needs a PackedWeight where torch"):
            qmlp.quantized_linear(x, gate)

    def test_other_modes(self):
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        gate, _, _ = self.weights("f32")
        one = qmlp.pack(gate)
        x = torch.randn(3, 128)
        with FakeTensorMode() as mode:
            y = qmlp.quantized_linear(mode.from_tensor(x), one)
            self.assertEqual((type(y).__name__, tuple(y.shape)), ("FakeTensor", (3, 96)))
        graph = make_fx(lambda t: qmlp.quantized_linear(t, one))(x)
        self.assertIn("qmlp.quantized_linear", graph.code)
        with self.assertRaisesRegex(RuntimeError, r"x is \[3, 64\], needs \[..., 128\]"):
            with FakeTensorMode() as mode:
                qmlp.quantized_linear(mode.from_tensor(x)[:, :64], one)

    def test_plain_functions_compile(self):
        gate, up, down = self.weights("bf16")
        both, packed_down = qmlp.pack(gate, up), qmlp.pack(down)

        def call(x):
            return qmlp.fused_mlp(x * 2, both, packed_down, residual=x) + 1

        x = torch.randn(3, 128).bfloat16()
        self.assertTrue(same(torch.compile(call, fullgraph=True)(x), call(x)))

    def test_unpack(self):
        gate, up, _ = self.weights("bf16")
        back = qmlp.pack(gate, up).unpack(1, like=gate.codes)
        for got, want in zip(back, up):
            self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
            self.assertTrue(torch.equal(got.view(torch.int16), want.view(torch.int16)))

    def test_a_lost_weight_is_said(self):
        gate, _, _ = self.weights("f32")
        packed = qmlp.pack(gate)
        number = qmlp.torch._number(packed)
        self.assertEqual(qmlp.torch._number(packed), number)
        del packed
        gc.collect()
        with self.assertRaisesRegex(RuntimeError, "keep it alive"):
            torch.ops.qmlp.quantized_linear(torch.randn(3, 128), number, None, None)

    def test_module(self):
        gate, _, _ = self.weights("f32")
        layer = qmlp.torch.QuantizedLinear(qmlp.pack(gate))
        self.assertEqual(list(layer.parameters()), [])
        self.assertIn("4 bits, group 64", repr(layer))


if __name__ == "__main__":
    unittest.main(verbosity=2)
