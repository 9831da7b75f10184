"""qmlp.torch and torch tensors in qmlp. Run by tools/check_torch.sh, which has torch; not by ./test."""
import copy
import gc
import pickle
import sys
import threading
import unittest
import warnings
from unittest import mock

import numpy
import torch

from torch.autograd import forward_ad

import qmlp
import qmlp.torch
from qmlp import _torch_calls, _torch_ops

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def same(a, b):
    wide = torch.int32 if a.dtype == torch.float32 else torch.int16
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(wide), b.view(wide))


def unaligned(x):
    """The same values one byte past a multiple of their size."""
    made = torch.frombuffer(bytearray(x.nbytes + 1), dtype=x.dtype, count=x.numel(), offset=1)
    return made.view(x.shape).copy_(x)


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        torch._dynamo.reset()

    def refuses(self, call, kind, text):
        with self.assertRaises(kind) as caught:
            call()
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def weights(self, name, hidden=128, intermediate=96):
        dtype = TYPES[name]
        gate, up = (qmlp.quantize(torch.randn(intermediate, hidden).to(dtype), bits=bits)
                    for bits in (4, 8))
        down = qmlp.quantize(torch.randn(hidden, intermediate).to(dtype), bits=6, group_size=32)
        return gate, up, down


class Torch(Case):
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
                (lambda: qmlp.quantized_linear(x.clone().requires_grad_(), packed,
                                               linear_bias=numpy.zeros(96, "f4")),
                 TypeError, "linear_bias is a numpy.ndarray"),
                (lambda: qmlp.quantized_linear(x, packed, out=unaligned(torch.zeros(3, 96))),
                 ValueError, "out has elements"),
                (lambda: qmlp.pack(gate, device=torch.device("meta")), ValueError, "'meta'"),
                (lambda: qmlp.quantized_linear(x.to("meta"), packed), TypeError, "meta"),
                (lambda: qmlp.torch.quantized_linear(x, gate), TypeError, "needs a qmlp.PackedWeight"),
        ):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(text, str(caught.exception))

    def test_devices_and_unaligned_tensors(self):
        gate, _, _ = self.weights("f32")
        x, bias = torch.randn(3, 128), torch.randn(96)
        want = qmlp.quantized_linear(x, qmlp.pack(gate), linear_bias=bias)
        for device in (torch.device("cpu"), torch.device("cpu", 0)):
            packed = qmlp.pack(gate, device=device)
            self.assertEqual(packed.device, "cpu")
            self.assertTrue(same(want, qmlp.quantized_linear(unaligned(x), packed,
                                                             linear_bias=unaligned(bias))))
        self.assertTrue(torch.equal(qmlp.quantize(unaligned(x)).codes.view(torch.int32),
                                    qmlp.quantize(x).codes.view(torch.int32)))

    def test_ops_are_registered_soundly(self):
        gate, up, down = self.weights("f32")
        both, one, packed_down = qmlp.pack(gate, up), qmlp.pack(gate), qmlp.pack(down)
        number = _torch_ops.number_of
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
        with self.assertRaisesRegex(TypeError, "needs a qmlp.PackedWeight where torch"):
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
        number = _torch_ops.number_of(packed)
        self.assertEqual(_torch_ops.number_of(packed), number)
        del packed
        gc.collect()
        with self.assertRaisesRegex(RuntimeError, "keep it alive"):
            torch.ops.qmlp.quantized_linear(torch.randn(3, 128), number, None, None)

    def test_module(self):
        gate, _, _ = self.weights("f32")
        layer = qmlp.torch.QuantizedLinear(qmlp.pack(gate))
        self.assertEqual(list(layer.parameters()), [])
        self.assertIn("4 bits, group 64", repr(layer))

    def test_modules_follow_their_weights(self):
        x = torch.ones(2, 64)
        weights = [qmlp.pack(torch.full((64, 64), float(v))) for v in (1, 2, 3)]
        layer = qmlp.torch.QuantizedLinear(weights[0])
        gate_ups = [qmlp.pack(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(2)]
        downs = [qmlp.pack(torch.randn(64, 32)) for _ in range(2)]
        mlp = qmlp.torch.FusedMLP(gate_ups[0], downs[0])
        linear, both = (torch.compile(m, fullgraph=True, backend="eager") for m in (layer, mlp))
        for weight in weights:
            layer.weight = weight
            self.assertTrue(torch.equal(linear(x), qmlp.quantized_linear(x, weight)))
        for gate_up in gate_ups:
            for down in downs:
                mlp.gate_up, mlp.down = gate_up, down
                self.assertTrue(torch.equal(both(x), qmlp.fused_mlp(x, gate_up, down)))

    def test_copies(self):
        gate, up, down = self.weights("f32")
        packed = qmlp.pack(gate)
        for kind in (copy.copy, copy.deepcopy):
            self.assertIs(kind(packed), packed)
        model = torch.nn.Sequential(
            qmlp.torch.FusedMLP(qmlp.pack(gate, up), qmlp.pack(down)),
            qmlp.torch.QuantizedLinear(packed, torch.randn(96)))
        x = torch.randn(3, 128)
        want, other = model(x), copy.deepcopy(model)
        self.assertIsNot(other[1].linear_bias, model[1].linear_bias)
        del model
        gc.collect()
        self.assertTrue(torch.equal(other(x), want))
        self.assertTrue(torch.equal(torch.compile(other, backend="eager")(x), want))
        self.refuses(lambda: pickle.dumps(packed), TypeError, "PackedWeight cannot be pickled")


NEG = torch._neg_view


class Reads(Case):
    """What a tensor says besides its memory."""

    def test_the_negative_bit(self):
        gate, up, down = self.weights("f32")
        one, both, packed_down = qmlp.pack(gate), qmlp.pack(gate, up), qmlp.pack(down)
        x, r, b = torch.randn(3, 128), torch.randn(3, 96), torch.randn(96)
        neg = lambda t: NEG(-t)  # t's values, the other sign in memory
        want = qmlp.quantized_linear(x, one, linear_bias=b, residual=r)
        for call in (qmlp.quantized_linear,
                     lambda x, w, linear_bias, residual: torch.ops.qmlp.quantized_linear(
                         x, w._number, linear_bias, residual)):
            self.assertTrue(torch.equal(call(neg(x), one, linear_bias=b, residual=r), want))
            self.assertTrue(torch.equal(call(x, one, linear_bias=neg(b), residual=neg(r)), want))
        self.assertTrue(torch.equal(
            qmlp.fused_swiglu(neg(x), both, gate_bias=neg(b), up_bias=neg(b)),
            qmlp.fused_swiglu(x, both, gate_bias=b, up_bias=b)))
        self.assertTrue(torch.equal(qmlp.fused_mlp(neg(x), both, packed_down, residual=neg(x)),
                                    qmlp.fused_mlp(x, both, packed_down, residual=x)))
        public = torch.complex(torch.zeros(3, 128), -x).conj().imag
        self.assertTrue(public.is_neg())
        self.assertTrue(torch.equal(qmlp.quantized_linear(public, one),
                                    qmlp.quantized_linear(x, one)))
        w = torch.randn(96, 128)
        parts = qmlp.QuantizedTensor(gate.codes, neg(gate.scales), neg(gate.biases))
        self.assertTrue(torch.equal(qmlp.dequantize(parts), qmlp.dequantize(gate)))
        for a, b_ in ((parts, gate), (neg(w), w), (qmlp.quantize(neg(w)), qmlp.quantize(w))):
            self.assertTrue(torch.equal(qmlp.quantized_linear(x, qmlp.pack(a)),
                                        qmlp.quantized_linear(x, qmlp.pack(b_))))
        for name, call in (
                ("out", lambda t: qmlp.quantized_linear(x, one, out=t)),
                ("out", lambda t: qmlp.fused_swiglu(x, both, out=t)),
                ("gate_tap", lambda t: qmlp.fused_swiglu(x, both, gate_tap=t))):
            self.refuses(lambda: call(NEG(torch.zeros(3, 96))), ValueError,
                         f"{name} has torch's negative bit set")
        self.refuses(lambda: qmlp.quantized_linear(x.to(torch.complex64).conj(), one), TypeError,
                     "complex64")

    def test_freed_memory(self):
        gate, up, down = self.weights("f32")
        one, both, packed_down = qmlp.pack(gate), qmlp.pack(gate, up), qmlp.pack(down)
        x = torch.randn(3, 128)

        def freed(*shape):
            t = torch.ones(shape)
            t.untyped_storage().resize_(0)
            return t

        linear, mlp = qmlp.quantized_linear, qmlp.fused_mlp
        for name, call in (
                ("x's", lambda: linear(freed(3, 128), one)),
                ("linear_bias's", lambda: linear(x, one, linear_bias=freed(96))),
                ("residual's", lambda: linear(x, one, residual=freed(3, 96))),
                ("out's", lambda: linear(x, one, out=freed(3, 96))),
                ("gate_bias's", lambda: qmlp.fused_swiglu(x, both, gate_bias=freed(96))),
                ("up_bias's", lambda: qmlp.fused_swiglu(x, both, up_bias=freed(96))),
                ("gate_tap's", lambda: qmlp.fused_swiglu(x, both, gate_tap=freed(3, 96))),
                ("down_bias's", lambda: mlp(x, both, packed_down, down_bias=freed(128))),
                ("weight", lambda: qmlp.pack(freed(4, 64))),
                ("w:", lambda: qmlp.quantize(freed(4, 64))),
                ("scales", lambda: qmlp.pack(qmlp.QuantizedTensor(gate.codes, freed(96, 2),
                                                                  gate.biases)))):
            with self.subTest(name):
                self.refuses(call, ValueError, "memory was freed")
                self.refuses(call, ValueError, name)
        self.assertEqual(linear(torch.empty(0, 128), one, residual=torch.empty(0, 96)).shape, (0, 96))

    def test_other_default_devices(self):
        w = torch.randn(8, 64)
        want = qmlp.quantize(w)
        with torch.device("meta"):
            got = qmlp.quantize(w)
            packed = qmlp.pack(got)
            y = qmlp.quantized_linear(w, packed)
            back = packed.unpack(like=w)
            wide = qmlp.dequantize(got, dtype="f16")
        for a, b in zip((*got, *back), (*want, *want)):
            self.assertEqual(a.device.type, "cpu")
            self.assertTrue(torch.equal(a, b))
        self.assertEqual((y.device.type, wide.device.type), ("cpu", "cpu"))

    def test_writes_are_told_to_autograd(self):
        gate, up, down = self.weights("f32")
        one, both, packed_down = qmlp.pack(gate), qmlp.pack(gate, up), qmlp.pack(down)
        x = torch.randn(3, 128)
        for shape, call in (
                ((3, 96), lambda t: qmlp.quantized_linear(x, one, out=t)),
                ((3, 96), lambda t: qmlp.fused_swiglu(x, both, out=t)),
                ((3, 96), lambda t: qmlp.fused_swiglu(x, both, gate_tap=t)),
                ((3, 128), lambda t: qmlp.fused_mlp(x, both, packed_down, out=t))):
            a, b = torch.ones(shape, requires_grad=True), torch.ones(shape)
            product = (a * b).sum()
            call(b)
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                product.backward()
        with torch.inference_mode():
            made = torch.empty(3, 96)
            qmlp.quantized_linear(x, one, out=made)
        self.assertTrue(torch.equal(qmlp.quantized_linear(x, one, out=made),
                                    qmlp.quantized_linear(x, one)))  # it has no version

    def test_the_short_path(self):
        """The CUDA path's own decisions, on a CPU weight that says it is where CPU tensors say they are:
        what it must leave to the general path, and the versions that it bumps."""
        made = []
        gate, up, down = self.weights("f32")
        one, both, packed_down = qmlp.pack(gate), qmlp.pack(gate, up), qmlp.pack(down)
        for weight in (one, both, packed_down):
            weight._ordinal = -1
        patch = mock.patch.multiple(
            _torch_calls, _raw_stream=lambda ordinal: 0, cuda_linear=lambda *a: made.append(a),
            cuda_swiglu=lambda *a: made.append(a), cuda_mlp=lambda *a: made.append(a))
        patch.start()
        self.addCleanup(patch.stop)
        x, r, b = torch.randn(3, 128), torch.randn(3, 96), torch.randn(96)
        freed = torch.randn(96)
        freed.untyped_storage().resize_(0)
        out, tap, wide = torch.empty(3, 96), torch.empty(3, 96), torch.empty(3, 128)
        linear = lambda x, b=None, r=None, out=None: _torch_calls.linear(x, one, b, r, out)
        self.assertIs(linear(x, b, r, out), out)
        self.assertIs(_torch_calls.swiglu(x, both, b, b, tap, out), out)
        self.assertIs(_torch_calls.mlp(x, both, packed_down, None, None, None, None, wide), wide)
        self.assertEqual((len(made), out._version, tap._version, wide._version), (3, 2, 1, 1))
        for args in ((NEG(x),), (x, NEG(b)), (x, b, NEG(r)), (x, b, r, NEG(out)), (x, freed)):
            self.assertIsNone(linear(*args))
        seen = []
        torch.func.vmap(lambda t: seen.append(_torch_calls.linear(t, one, None, None, None)) or t)(
            torch.randn(2, 3, 128))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(lambda t: seen.append(linear(t)) or t, (x,), check_trace=False)
        with forward_ad.dual_level():
            seen.append(linear(forward_ad.make_dual(x, x)))
        self.assertEqual((seen, len(made)), ([None] * 3, 3))


class Pairs(Case):
    """Ours and torch's, for derivatives."""

    def setUp(self):
        super().setUp()
        gate, up, down = self.weights("f32")
        g, u, d = (qmlp.dequantize(w) / 8 for w in (gate, up, down))
        one, both, packed_down = qmlp.pack(g), qmlp.pack(g, u), qmlp.pack(d)
        silu = torch.nn.functional.silu
        hidden = lambda x, b: silu(x @ g.T + b) * (x @ u.T)
        # (ours, torch's), of x and a bias
        self.pairs = (
            (lambda x, b: qmlp.quantized_linear(x, one, linear_bias=b), lambda x, b: x @ g.T + b),
            (lambda x, b: qmlp.fused_swiglu(x, both, gate_bias=b), hidden),
            (lambda x, b: qmlp.fused_mlp(x, both, packed_down, gate_bias=b, residual=x),
             lambda x, b: hidden(x, b) @ d.T + x))
        self.x, self.b = torch.randn(5, 3, 128), torch.randn(96)

    def assertClose(self, a, b):
        self.assertEqual(a.shape, b.shape)
        self.assertLess(((a - b).norm() / b.norm()).item(), 1e-5)


class Derivatives(Pairs):
    def test_second(self):
        for ours, theirs in self.pairs:
            def second(f):
                x = self.x.clone().requires_grad_()
                b = self.b.clone().requires_grad_()
                first = torch.autograd.grad(f(x, b).square().sum(), (x, b), create_graph=True)
                return torch.autograd.grad(sum(t.square().sum() for t in first), (x, b))

            for a, b in zip(second(ours), second(theirs)):
                self.assertClose(a, b)

    def test_the_graph_holds_the_weight(self):
        x = torch.ones(2, 64, requires_grad=True)
        y = qmlp.quantized_linear(x, qmlp.pack(torch.full((4, 64), 3.0)))
        z = qmlp.fused_mlp(x, qmlp.pack(torch.ones(4, 64), torch.ones(4, 64)),
                           qmlp.pack(torch.ones(8, 4)))
        gc.collect()
        y.sum().backward()
        self.assertTrue(torch.equal(x.grad, torch.full((2, 64), 12.0)))
        z.sum().backward()

    def test_threads(self):
        """First backward passes of one SwiGLU weight at once: its halves are made once."""
        errors = []

        def work(weight, barrier):
            y = qmlp.fused_swiglu(torch.randn(3, 128, requires_grad=True), weight).sum()
            barrier.wait()
            try:
                y.backward()
            except RuntimeError as error:
                errors.append(error)

        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-5)
        gate, up, _ = self.weights("f32")
        for _ in range(40):
            weight, barrier = qmlp.pack(gate, up), threading.Barrier(8)
            threads = [threading.Thread(target=work, args=(weight, barrier)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(errors, [])

    def test_forward_mode_is_refused(self):
        x, b = self.x, self.b
        text = "forward-mode AD"
        one = qmlp.pack(torch.randn(96, 128))
        with forward_ad.dual_level():
            dual, dual_bias = forward_ad.make_dual(x, x), forward_ad.make_dual(b, b)
            for call in (
                    *(lambda f=f: f(dual, b) for f, _ in self.pairs),
                    *(lambda f=f: f(x, dual_bias) for f, _ in self.pairs),
                    lambda: qmlp.torch.QuantizedLinear(one)(dual),
                    lambda: torch.ops.qmlp.quantized_linear(dual, one._number, None, None)):
                self.refuses(call, NotImplementedError, text)
            qmlp.quantized_linear(x, one)
        for f, _ in self.pairs:
            of_x = lambda t: f(t, b)
            for call in (lambda: torch.func.jvp(of_x, (x,), (x,)),
                         lambda: torch.func.jvp(torch.func.vmap(of_x), (x,), (x,)),
                         lambda: torch.func.jacfwd(of_x)(x),
                         lambda: torch.func.hessian(lambda t: of_x(t).sum())(x[0, 0])):
                self.refuses(call, NotImplementedError, text)


class Transforms(Pairs):
    """torch.func and torch.jit.trace."""

    def test_vmap(self):
        x, biases = self.x, torch.randn(5, 96)
        vmap = torch.func.vmap
        for ours, theirs in self.pairs:
            self.assertTrue(torch.equal(vmap(ours, (0, None))(x, self.b), ours(x, self.b)))
            self.assertTrue(torch.equal(vmap(ours, (1, None), 1)(x, self.b), ours(x, self.b)))
            self.assertTrue(torch.equal(vmap(vmap(ours, (0, None)), (0, None))(x, self.b),
                                        ours(x, self.b)))
            self.assertTrue(torch.equal(
                vmap(ours)(x, biases), torch.stack([ours(*each) for each in zip(x, biases)])))
            self.assertTrue(torch.equal(
                vmap(ours, (None, 0))(x[0], biases), torch.stack([ours(x[0], b) for b in biases])))
        one = qmlp.pack(torch.randn(96, 128))
        r = torch.randn(5, 3, 96)
        call = lambda x, r: qmlp.quantized_linear(x, one, residual=r)
        for dims, args in (((0, 0), (x, r)), ((0, None), (x, r[0])), ((None, 0), (x[0], r))):
            want = torch.stack([call(*(a if d is None else a[i] for a, d in zip(args, dims)))
                                for i in range(5)])
            self.assertTrue(torch.equal(vmap(call, dims)(*args), want))
        self.refuses(lambda: vmap(lambda t: qmlp.quantized_linear(t, one, out=torch.empty(3, 96)))(x),
                     ValueError, "out and gate_tap")

    def test_gradients(self):
        grad, vmap = torch.func.grad, torch.func.vmap
        for ours, theirs in self.pairs:
            def results(f):
                loss = lambda x, b: f(x, b).square().sum()
                whole = lambda x, b: vmap(f, (0, None))(x, b).square().sum()
                leaf = self.x.clone().requires_grad_()
                whole(leaf, self.b).backward()
                return (*grad(loss, (0, 1))(self.x, self.b), *grad(whole, (0, 1))(self.x, self.b),
                        *vmap(grad(loss, (0, 1)), (0, None))(self.x, self.b),
                        grad(lambda x: grad(loss)(x, self.b).square().sum())(self.x),
                        torch.func.jacrev(f)(self.x[0, 0], self.b), leaf.grad)

            for a, b in zip(results(ours), results(theirs)):
                self.assertClose(a, b)

    def test_functionalize(self):
        from torch.fx.experimental.proxy_tensor import make_fx

        for ours, _ in self.pairs:
            call = lambda x: ours(x, self.b)
            self.assertTrue(torch.equal(torch.func.functionalize(call)(self.x), call(self.x)))
            self.assertIn("ops.qmlp.", make_fx(torch.func.functionalize(call))(self.x).code)

    def test_compiled_vmap(self):
        for ours, _ in self.pairs:
            call = torch.func.vmap(lambda x: ours(x, self.b))
            self.assertTrue(same(torch.compile(call, fullgraph=True, backend="aot_eager")(self.x),
                                 call(self.x)))

    def test_jit_trace(self):
        weight = qmlp.pack(torch.randn(96, 128))
        for call in (*(lambda x, f=f: f(x, self.b) for f, _ in self.pairs),
                     qmlp.torch.QuantizedLinear(weight)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                traced = torch.jit.trace(call, (self.x,), check_trace=False)
            self.assertIn("qmlp::", str(traced.inlined_graph if hasattr(traced, "inlined_graph")
                                        else traced.graph))
            for x in (self.x, torch.randn(7, 128)):
                self.assertTrue(torch.equal(traced(x), call(x)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
