"""What every public function says of arguments of wrong types: one line, with the argument's name, what
was found and what is needed."""
import itertools
import unittest

import mlx.core as mx
import mlx.nn as nn
import numpy

import support

qmlp = None


def setUpModule():
    global qmlp
    qmlp = support.package()
    import qmlp.mlx


class Broken:
    """A class of the caller's that cannot even be shown."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Lines:
    """Shown in two lines, for a terminal."""

    def __repr__(self):
        return "one\rtwo"


class Messages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        mx.random.seed(5)
        cls.x = mx.zeros((2, 64))
        cls.tensor = qmlp.mlx.quantize(mx.random.normal((32, 64)))
        cls.linear = qmlp.mlx.pack(cls.tensor)
        cls.gate_up = qmlp.mlx.pack(cls.tensor, cls.tensor)
        cls.down = qmlp.mlx.pack(qmlp.mlx.quantize(mx.random.normal((64, 32)), group_size=32))
        cls.array = numpy.zeros((2, 64), numpy.float32)
        w = numpy.random.default_rng(5).standard_normal((32, 64), numpy.float32)
        cls.host_tensor = qmlp.quantize(w)
        cls.host_linear = qmlp.pack(cls.host_tensor)
        cls.host_gate_up = qmlp.pack(cls.host_tensor, cls.host_tensor)
        cls.host_down = qmlp.pack(numpy.ascontiguousarray(w.T))
        cls.model = nn.Linear(2, 2)

    def refusal(self, call, *args, **named):
        """The message of a call that has to be refused."""
        with self.assertRaises((TypeError, ValueError)) as caught:
            result = call(*args, **named)
            mx.eval(result)
        return str(caught.exception)


class EveryArgument(Messages):
    def calls(self):
        """(call, its arguments by position, by name): all of them right."""
        native = qmlp.mlx
        problem = qmlp.LinearProblem(N=32, K=64)
        return (
            (native.quantize, {"w": self.x}, {"bits": 4, "group_size": 64}),
            (native.dequantize, {"weight": self.tensor}, {"dtype": "f32"}),
            (native.pack, {"gate": self.tensor, "up": self.tensor},
             {"activation": "f32", "segments": 0}),
            (native.quantized_linear, {"x": self.x, "weight": self.linear},
             {"linear_bias": None, "residual": None, "stream": None}),
            (native.fused_swiglu, {"x": self.x, "gate_up": self.gate_up},
             {"gate_bias": None, "up_bias": None, "stream": None}),
            (native.fused_mlp, {"x": self.x, "gate_up": self.gate_up, "down": self.down},
             {"gate_bias": None, "up_bias": None, "down_bias": None, "residual": None,
              "stream": None}),
            (native.unpack, {"weight": self.linear}, {"stream": None}),
            (native.patch, {"model": self.model}, {"activation": None, "segments": 0}),
            (native.unpatch, {"model": self.model}, {}),
            (self.gate_up.part, {"index": 0}, {}),
            (qmlp.quantize, {"w": self.array}, {"bits": 4, "group_size": 64, "scale_dtype": None}),
            (qmlp.dequantize, {"weight": self.host_tensor}, {"dtype": None}),
            (qmlp.QuantizedTensor, dict(zip(("codes", "scales", "biases"), self.host_tensor)),
             {"bits": 4, "group_size": 64}),
            (qmlp.pack, {"gate": self.host_tensor, "up": self.host_tensor},
             {"device": None, "activation": None, "precision": "match", "accumulation": None,
              "segments": 0, "force_kernel": None, "force_isa": None}),
            (qmlp.quantized_linear, {"x": self.array, "weight": self.host_linear},
             {"linear_bias": None, "residual": None, "out": None}),
            (qmlp.fused_swiglu, {"x": self.array, "gate": self.host_gate_up},
             {"gate_bias": None, "up_bias": None, "gate_tap": None, "out": None}),
            (qmlp.fused_mlp, {"x": self.array, "gate_up": self.host_gate_up, "down": self.host_down},
             {"gate_bias": None, "up_bias": None, "down_bias": None, "residual": None, "out": None}),
            (self.host_gate_up.part, {"index": 0}, {}),
            (self.host_linear.decode_row, {"row": 0}, {}),
            (self.host_linear.unpack, {"index": 0}, {"like": None}),
            (qmlp.supports, {"problem": problem, "device": "cpu"}, {}),
            (qmlp.explain, {"problem": problem, "device": "cpu"}, {}),
            (qmlp.Plan, {"problem": problem}, {"device": "cpu", "force_kernel": None,
                                               "force_isa": None}),
            (qmlp.Plan(problem).kernel_name, {"M": 1}, {}),
            (qmlp.Plan(problem).workspace_bytes, {"M": 1}, {}),
            (qmlp.QuantSpec.dense, {"dtype": "f32"}, {}),
            (qmlp.set_num_threads, {"count": 0}, {}),
            (lambda **named: qmlp.supports(qmlp.LinearProblem(**named)), {},
             {"N": 32, "K": 64, "activation": "bf16", "M_max": 1, "accumulation": None,
              "segments": 0}),
            (lambda **named: qmlp.supports(qmlp.SwigluProblem(**named)), {},
             {"hidden": 64, "intermediate": 32, "activation": "bf16", "precision": "match",
              "M_max": 1, "accumulation": None, "segments": 0}),
        )

    def test_wrong_values(self):
        # Not one of them is right anywhere, save None where it is the default.
        wrong = (None, "gpu 7", b"x", 1.5, 2**80, 10**5000, complex(1), [[1.0]], {}, object(), Broken(),
                 Broken, Lines(), "\ud800", ..., mx.zeros((3, 5, 2)), numpy.zeros((3, 5, 2)), numpy.zeros((40, 40), "O"),
                 "long " * 1000)
        optional = ("up", "linear_bias", "residual", "gate_bias", "up_bias", "down_bias", "stream",
                    "activation", "scale_dtype", "dtype", "device", "accumulation", "force_kernel",
                    "force_isa", "out", "gate_tap", "like")
        for call, positional, named in self.calls():
            what = getattr(call, "__name__", str(call))
            call(*positional.values(), **named)
            for name, value in itertools.product((*positional, *named), wrong):
                if value is None and name in optional or name == "like" and value is not None:
                    continue  # which takes any array
                args = [value if key == name else right for key, right in positional.items()]
                options = {key: value if key == name else right for key, right in named.items()}
                with self.subTest(call=what, argument=name, value=type(value).__name__):
                    message = self.refusal(call, *args, **options)
                    self.assertTrue(message.isprintable(), message)
                    self.assertLess(len(message), 250)
                    # Of the right type but a wrong value: the library's words.
                    if not isinstance(value, (str, mx.array)):
                        self.assertIn(name, message)
                    self.assertNotIn("incompatible function arguments", message)

    def test_wrong_counts(self):
        for call in (self.gate_up.part, lambda *a, **n: self.gate_up.part(*a, **n)):
            for args, named in (((), {}), ((0, 1), {}), ((), {"part": 0}), ((0,), {"index": 0})):
                self.assertEqual(self.refusal(call, *args, **named),
                                 "part: takes one argument, index")
        self.assertEqual(self.gate_up.part(index=1).N, 32)
        self.assertEqual(self.refusal(self.gate_up.part, 2), "part: index is 2, needs 0 to 1")


class Words(Messages):
    def test_mlx(self):
        call, x = qmlp.mlx.quantized_linear, self.x
        for args, named, want in (
                ((self.array, self.linear), {},
                 "quantized_linear: x is a numpy.ndarray, needs an mx.array"),
                ((x, self.linear), {"stream": "cpu"},
                 "quantized_linear: stream is a str, needs an mx.Stream or mx.Device, or None"),
                ((x, None), {}, "quantized_linear: weight is None, needs a qmlp.mlx.PackedWeight: "
                                "qmlp.mlx.pack"),
                ((x, self.host_linear), {},
                 "quantized_linear: weight is a qmlp.PackedWeight, needs a qmlp.mlx.PackedWeight: "
                 "qmlp.mlx.pack"),
                ((x, self.linear), {"linear_bias": 1.0},
                 "quantized_linear: linear_bias is a float, needs an mx.array or None")):
            self.assertEqual(self.refusal(call, *args, **named), want)
        self.assertEqual(self.refusal(qmlp.mlx.pack, self.tensor, "up"),
                         "up is a str, needs a qmlp.mlx.QuantizedTensor or an mx.array")
        self.assertEqual(self.refusal(qmlp.mlx.pack, "gate", self.tensor),
                         "gate is a str, needs a qmlp.mlx.QuantizedTensor or an mx.array")
        self.assertEqual(self.refusal(qmlp.mlx.pack, self.host_tensor),
                         "weight: its codes are a numpy.ndarray, needs an mx.array")
        self.assertEqual(self.refusal(qmlp.mlx.fused_swiglu, x, self.linear),
                         "fused_swiglu: gate_up holds 1 arrays, needs 2")
        self.assertEqual(self.refusal(qmlp.mlx.fused_mlp, x, self.gate_up, self.gate_up),
                         "fused_mlp: down holds 2 arrays, needs 1")
        with self.assertRaisesRegex(RuntimeError, "^quantized_linear: this mlx has no CUDA backend"):
            call(x, self.linear, stream=mx.gpu)
        for wrong in (None, "model", {}, [self.model]):
            told = self.refusal(qmlp.mlx.patch, wrong)
            self.assertIn("needs an mlx.nn.Module", told)
            self.assertEqual(self.refusal(qmlp.mlx.unpatch, wrong), told)

    def test_arrays(self):
        self.assertEqual(self.refusal(qmlp.pack, self.host_tensor, "up"),
                         "up is a str, needs a qmlp.QuantizedTensor or an array: NumPy, torch, CuPy, "
                         "DLPack or a buffer")
        self.assertEqual(self.refusal(qmlp.quantized_linear, self.array, self.linear),
                         "quantized_linear: weight is a qmlp.mlx.PackedWeight, needs a "
                         "qmlp.PackedWeight or a qmlp.QuantizedTensor")
        self.assertEqual(self.refusal(qmlp.fused_mlp, self.array, "gate", self.host_down),
                         "fused_mlp: gate_up is a str, needs a qmlp.PackedWeight or a "
                         "qmlp.QuantizedTensor")
        self.assertEqual(self.refusal(qmlp.fused_mlp, self.array, self.host_gate_up, 5),
                         "fused_mlp: down is an int, needs a qmlp.PackedWeight: qmlp.pack(down)")
        self.assertEqual(self.refusal(qmlp.quantized_linear, self.array, self.host_linear, residual=7),
                         "residual is an int, needs an array: NumPy, torch, CuPy, DLPack or a buffer")
        self.assertEqual(self.refusal(qmlp.pack, self.host_tensor, device=3),
                         "device is an int, needs a str or a torch.device")

    def test_patched_modules(self):
        module = nn.QuantizedLinear(64, 32)
        with qmlp.mlx.patch(module):
            self.assertEqual(self.refusal(module, self.array),
                             "QuantizedLinear: x is a numpy.ndarray, needs an mx.array")
        norm = nn.RMSNorm(64)
        with qmlp.mlx.patch(norm):
            self.assertEqual(self.refusal(norm, self.array),
                             "RMSNorm: x is a numpy.ndarray, needs an mx.array")


class Shapes(Messages):
    """Of biases and residuals, in every type, also where MLX adds what has a wider one."""

    def test_residuals(self):
        x = mx.zeros((3, 2, 64))
        for op, call, N in (
                ("quantized_linear", lambda **n: qmlp.mlx.quantized_linear(x, self.linear, **n), 32),
                ("fused_mlp", lambda **n: qmlp.mlx.fused_mlp(x, self.gate_up, self.down, **n), 64)):
            for shape, dtype in itertools.product(
                    ((2, N - 1), (3, 3, N), (2, 1, N), (5, 3, 2, N), (1, 3, 2, N), (3, 2, 2 * N)),
                    (mx.float32, mx.float16)):
                with self.subTest(op=op, shape=shape, dtype=dtype):
                    self.assertEqual(
                        self.refusal(call, residual=mx.zeros(shape, dtype)),
                        f"{op}: residual is {list(shape)}, needs [3, 2, {N}]")
            want = call()
            for shape in ((3, 2, N), (N,), (2, N), (1, 2, N), (3, 1, 1), (), (1,)):
                given = mx.random.normal(shape)
                got = call(residual=given)
                self.assertEqual(got.shape, (3, 2, N))
                self.assertTrue(mx.array_equal(got, given + want).item())

    def test_biases(self):
        half = self.x.astype(mx.bfloat16)
        w = mx.random.normal((32, 64)).astype(mx.bfloat16)
        tensor = qmlp.mlx.quantize(w)
        linear, gate_up = qmlp.mlx.pack(tensor), qmlp.mlx.pack(tensor, tensor)
        down = qmlp.mlx.pack(mx.contiguous(w.T))
        calls = {
            "quantized_linear": (lambda **n: qmlp.mlx.quantized_linear(half, linear, **n),
                                 {"linear_bias": 32}),
            "fused_swiglu": (lambda **n: qmlp.mlx.fused_swiglu(half, gate_up, **n),
                             {"gate_bias": 32, "up_bias": 32}),
            "fused_mlp": (lambda **n: qmlp.mlx.fused_mlp(half, gate_up, down, **n),
                          {"gate_bias": 32, "up_bias": 32, "down_bias": 64}),
        }
        for op, (call, biases) in calls.items():
            for (name, N), dtype in itertools.product(biases.items(), (mx.bfloat16, mx.float32)):
                for shape in ((), (1,), (1, N), (2, N), (N + 1,)):
                    with self.subTest(op=op, bias=name, shape=shape, dtype=dtype):
                        self.assertEqual(self.refusal(call, **{name: mx.zeros(shape, dtype)}),
                                         f"{op}: {name} is {list(shape)}, needs [{N}]")
                mx.eval(call(**{name: mx.zeros((N,), dtype)}))


if __name__ == "__main__":
    unittest.main()
