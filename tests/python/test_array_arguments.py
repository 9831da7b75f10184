"""Arguments of the array functions: every layout is read or refused by name, nothing is swallowed."""
import array
import ctypes
import types
import unittest

import ml_dtypes
import mlx.core as mx
import numpy

import support

BF16 = numpy.dtype(ml_dtypes.bfloat16)

qmlp = None


def setUpModule():
    global qmlp
    qmlp = support.package()


def normal(seed, *shape):
    return numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)


def field(values):
    """The same values as a field of records, whose strides are no multiple of an element's size."""
    records = numpy.zeros(values.shape, [("pad", "u1"), ("it", values.dtype)])
    records["it"] = values
    return records["it"]


def unaligned(values):
    """The same values one byte past a multiple of their size, contiguous."""
    room = bytearray(values.nbytes + 1)
    made = numpy.frombuffer(room, values.dtype, values.size, 1).reshape(values.shape)
    made[...] = values
    return made


class Cases(unittest.TestCase):
    def assertRefused(self, kind, text, call, *arguments, **named):
        with self.assertRaises(kind) as caught:
            call(*arguments, **named)
        message = str(caught.exception)
        self.assertIn(text, message)
        self.assertNotIn("\n", message)
        self.assertNotIn("incompatible function arguments", message)


class Layouts(Cases):
    def test_fields_and_unaligned_arrays_are_copied(self):
        for dtype in (numpy.dtype("f4"), numpy.dtype("f2"), BF16):
            tensor = qmlp.quantize(normal(1, 40, 64).astype(dtype))
            up = qmlp.quantize(normal(2, 40, 64).astype(dtype))
            x, bias = normal(3, 3, 64).astype(dtype), normal(4, 40).astype(dtype)
            residual = normal(5, 3, 40).astype(dtype)
            packed, both = qmlp.pack(tensor), qmlp.pack(tensor, up)
            linear = qmlp.quantized_linear(x, packed, linear_bias=bias, residual=residual)
            swiglu = qmlp.fused_swiglu(x, both, gate_bias=bias, up_bias=bias)
            for other in (field, unaligned):
                with self.subTest(type=dtype.name, layout=other.__name__):
                    self.assertFalse(other(x).flags.aligned)
                    numpy.testing.assert_array_equal(linear, qmlp.quantized_linear(
                        other(x), packed, linear_bias=other(bias), residual=other(residual)))
                    numpy.testing.assert_array_equal(swiglu, qmlp.fused_swiglu(
                        other(x), both, gate_bias=other(bias), up_bias=other(bias)))
                    parts = qmlp.QuantizedTensor(*map(other, tensor))
                    numpy.testing.assert_array_equal(
                        qmlp.dequantize(parts), qmlp.dequantize(tensor))
                    numpy.testing.assert_array_equal(
                        qmlp.quantized_linear(x, qmlp.pack(parts)), qmlp.quantized_linear(x, packed))
                    numpy.testing.assert_array_equal(
                        qmlp.quantize(other(normal(1, 40, 64).astype(dtype))).codes, tensor.codes)
                    numpy.testing.assert_array_equal(
                        qmlp.quantized_linear(x, qmlp.pack(other(x))),
                        qmlp.quantized_linear(x, qmlp.pack(x)))
                    self.assertRefused(ValueError, "out has elements", qmlp.quantized_linear, x, packed,
                                       out=other(linear))
                    self.assertRefused(ValueError, "gate_tap has elements", qmlp.fused_swiglu, x, both,
                                       gate_tap=other(linear))

    def test_outputs_are_named(self):
        w = qmlp.quantize(normal(1, 40, 64))
        both, x = qmlp.pack(w, w), normal(2, 3, 64)
        across = numpy.zeros((40, 3), numpy.float32).T
        self.assertRefused(ValueError, "gate_tap has strides", qmlp.fused_swiglu, x, both,
                           gate_tap=across)
        self.assertRefused(ValueError, "out has strides", qmlp.fused_swiglu, x, both, out=across)

    def test_overlaps(self):
        w, down = qmlp.quantize(normal(1, 64, 64)), qmlp.pack(qmlp.quantize(normal(2, 64, 64)))
        both, x, tap = qmlp.pack(w, w), normal(3, 3, 64), numpy.zeros((3, 64), numpy.float32)
        for name in ("gate_bias", "up_bias"):
            for row in range(3):
                self.assertRefused(ValueError, "gate_tap overlaps a linear bias", qmlp.fused_swiglu, x,
                                   both, gate_tap=tap, **{name: tap[row]})
        want, same = qmlp.fused_mlp(x, both, down), x.copy()
        self.assertIs(qmlp.fused_mlp(same, both, down, out=same), same)
        numpy.testing.assert_array_equal(same, want)

    def test_codes_in_a_buffer(self):
        tensor = qmlp.quantize(normal(1, 4, 64))
        words = array.array("I", tensor.codes.ravel().tolist())
        shaped = memoryview(words).cast("B").cast("I", (4, 8))
        numpy.testing.assert_array_equal(
            qmlp.dequantize(qmlp.QuantizedTensor(shaped, tensor.scales, tensor.biases)),
            qmlp.dequantize(tensor))
        signed = qmlp.QuantizedTensor(tensor.codes.view(numpy.int32), tensor.scales, tensor.biases)
        numpy.testing.assert_array_equal(qmlp.dequantize(signed), qmlp.dequantize(tensor))
        self.assertRefused(ValueError, "codes are [32]", qmlp.QuantizedTensor, words, tensor.scales,
                           tensor.biases)
        bytes_ = qmlp.QuantizedTensor(tensor.codes.astype(numpy.uint8), tensor.scales, tensor.biases)
        self.assertRefused(TypeError, "needs uint32 (or int32) words", qmlp.pack, bytes_)


class Arguments(Cases):
    def setUp(self):
        self.w, self.x = normal(1, 48, 64), normal(2, 3, 64)
        self.tensor = qmlp.quantize(self.w)

    def test_up_beside_a_packed_weight(self):
        both = qmlp.pack(self.tensor, self.tensor)
        for up in ("up", self.tensor, both):
            self.assertRefused(TypeError, "fused_swiglu: up is a ", qmlp.fused_swiglu, self.x, both, up)

    def test_pack(self):
        for bad in ("garbage", None, []):
            self.assertRefused(ValueError, "precision is ", qmlp.pack, self.tensor, precision=bad)
        self.assertRefused(ValueError, "precision is 'wide'", qmlp.pack, self.tensor, precision="wide")
        self.assertRefused(ValueError, "segments is -1", qmlp.pack, self.tensor, segments=-1)
        self.assertRefused(TypeError, "segments is 1.0", qmlp.pack, self.tensor, segments=1.0)
        self.assertRefused(ValueError, "force_isa is 'avx2\\x00'", qmlp.pack, self.tensor,
                           force_isa="avx2\0")
        self.assertRefused(TypeError, "force_kernel is an int", qmlp.pack, self.tensor, force_kernel=3)

    def test_devices(self):
        problem = qmlp.LinearProblem(N=4, K=64)
        for ask in (qmlp.supports, qmlp.explain, lambda p, d: qmlp.Plan(p, device=d)):
            for bad in ("", "cpu\0junk"):
                self.assertRefused(ValueError, f"device is {bad!r}", ask, problem, bad)
            self.assertRefused(TypeError, "device is an int", ask, problem, 0)
            self.assertRefused(TypeError, "problem is a str", ask, "x", "cpu")
        for bad in ("", "cpu\0junk", "cuda:", "cuda:-1", "tpu"):
            self.assertRefused(ValueError, f"device is {bad!r}", qmlp.pack, self.tensor, device=bad)
        self.assertRefused(TypeError, "device is an int", qmlp.pack, self.tensor, device=0)
        # As torch.device is, with and without a number.
        for index in (None, 0):
            like_torch = types.SimpleNamespace(type="cpu", index=index)
            self.assertEqual(qmlp.pack(self.tensor, device=like_torch).device, "cpu")
        self.assertRefused(ValueError, "'meta'", qmlp.pack, self.tensor,
                           device=type("Meta", (), {"type": "meta", "index": None,
                                                    "__str__": lambda self: "meta"})())

    def test_numbers(self):
        for value, kind in ((2**40, ValueError), (-2**80, ValueError), (4.0, TypeError),
                            ("4", TypeError), (None, TypeError)):
            for name in ("bits", "group_size"):
                self.assertRefused(kind, f"{name} is ", qmlp.quantize, self.w, **{name: value})
                self.assertRefused(kind, f"{name} is ", qmlp.QuantizedTensor, *self.tensor,
                                   **{name: value})
                self.assertRefused(kind, f"{name} is ", qmlp.supports, qmlp.LinearProblem(
                    N=4, K=64, weight=qmlp.QuantSpec(**{name: value})))
            for name in ("N", "K", "M_max", "segments"):
                if value != 2**40 or name == "segments":
                    self.assertRefused(kind, f"{name} is ", qmlp.supports, qmlp.LinearProblem(
                        **{"N": 4, "K": 64, name: value}))
            packed = qmlp.pack(self.tensor)
            self.assertRefused(kind, "index is ", packed.unpack, value)
            self.assertRefused(kind, "index is ", packed.part, value)
            self.assertRefused(kind, "row is ", packed.decode_row, value)
        number = numpy.int64(4)
        numpy.testing.assert_array_equal(qmlp.quantize(self.w, bits=number).codes, self.tensor.codes)

    def test_types(self):
        self.assertRefused(TypeError, "weight is a numpy.ndarray", qmlp.dequantize, self.w)
        gate_up = qmlp.pack(self.tensor, self.tensor)
        down = qmlp.pack(normal(3, 64, 48), activation="bf16")
        self.assertRefused(TypeError, "down is packed for bf16", qmlp.fused_mlp, self.x, gate_up, down)

    def test_quantize_refuses(self):
        for bad, value in (("nan", numpy.nan), ("inf", -numpy.inf)):
            w = self.w.copy()
            w[5, 3] = value
            self.assertRefused(ValueError, "row 5, group at column 0", qmlp.quantize, w)
        w = self.w.copy()
        w[2, :2] = 3e38, -3e38
        self.assertRefused(ValueError, "spans more than f32", qmlp.quantize, w)
        self.assertRefused(ValueError, "N", qmlp.quantize, self.w[:0])

    def test_unpack_where_codes_were_kept(self):
        kept = {(scales, activation) for scales in ("f32", "f16", "bf16")
                for activation in ("f32", "f16", "bf16")} - {("f32", "f16")}
        for scales, activation in kept:
            tensor = qmlp.quantize(self.w, scale_dtype=scales)
            got = qmlp.pack(tensor, activation=activation).unpack()
            numpy.testing.assert_array_equal(got.codes, tensor.codes)
        with self.assertRaises(qmlp.UnsupportedError):
            qmlp.pack(qmlp.quantize(self.w, scale_dtype="f32"), activation="f16").unpack()

    def test_immutable(self):
        packed = qmlp.pack(self.tensor)
        for thing, names in ((packed, ("N", "K", "plan", "specs", "activation", "is_swiglu")),
                             (packed.plan, ("problem", "device", "force_isa"))):
            for name in names:
                before = getattr(thing, name)
                self.assertRefused(AttributeError, name, setattr, thing, name, 7)
                self.assertRefused(AttributeError, name, delattr, thing, name)
                self.assertIs(getattr(thing, name), before)


class Traced(Cases):
    """Arrays that stand for others while MLX traces a function."""

    def test_an_array_function_refuses_what_mlx_traces(self):
        packed, constant = qmlp.pack(normal(1, 4, 64)), mx.array(normal(2, 3, 64))
        calls = (
            lambda v: mx.array(qmlp.quantized_linear(v, packed)),
            lambda v: mx.array(qmlp.quantized_linear(v * 2, packed)),
            lambda v: mx.array(qmlp.quantized_linear(constant, packed,
                                                     residual=(v[:, :4] + 1))),
            lambda v: mx.array(qmlp.dequantize(qmlp.quantize(v))),
        )
        with mx.stream(mx.cpu):
            for call in calls:
                for transform in (lambda f: mx.grad(lambda v: f(v).sum())(constant),
                                  lambda f: mx.jvp(f, [constant], [constant]),
                                  lambda f: mx.compile(f)(constant),
                                  lambda f: mx.vmap(f)(constant[None])):
                    self.assertRefused(TypeError, "qmlp.mlx", transform, call)
            # What is not traced is only data.
            got = mx.grad(lambda v: (v * mx.array(qmlp.quantized_linear(constant, packed))).sum())(
                mx.ones((3, 4)))
        numpy.testing.assert_array_equal(
            numpy.array(got), qmlp.quantized_linear(numpy.array(constant), packed))


class Dlpack(Cases):
    """Capsules that contradict what they are said to be."""

    def array(self, shape=(3, 64), code=2, bits=32, lanes=1, ndim=None, device=1):
        class Tensor(ctypes.Structure):
            _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32),
                        ("ordinal", ctypes.c_int32), ("ndim", ctypes.c_int32),
                        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                        ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                        ("deleter", ctypes.c_void_p)]

        room = ctypes.create_string_buffer(3 * 64 * 4)
        lengths = (ctypes.c_int64 * len(shape))(*shape)
        tensor = Tensor(ctypes.addressof(room), device, 0, len(shape) if ndim is None else ndim, code,
                        bits, lanes, ctypes.addressof(lengths), None, 0, None, None)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

        class Foreign:
            keeps = room, lengths, tensor
            dtype = "bfloat16" if code == 4 else "float32"

            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, **options):
                return new(ctypes.addressof(tensor), b"dltensor", None)

        made = Foreign()
        made.shape = shape
        return made

    def test_refusals(self):
        weights = {2: qmlp.pack(normal(1, 4, 64)), 4: qmlp.pack(normal(1, 4, 64), activation="bf16")}
        for code, bits in ((2, 32), (4, 16)):
            call = lambda **bad: qmlp.quantized_linear(
                self.array(code=code, **{"bits": bits, **bad}), weights[code])
            self.assertEqual(call().shape, (3, 4))
            for bad in ({"lanes": 2}, {"ndim": -1}, {"ndim": 1000}, {"shape": (-3, 64)},
                        {"shape": (2**62, 64)}, {"bits": 7}):
                with self.subTest(code=code, **bad):
                    self.assertRefused(TypeError, "cannot be read through DLPack", call, **bad)
        for device in (2, 8):
            self.assertRefused(TypeError, "not in the CPU's memory", qmlp.quantized_linear,
                               self.array(code=4, bits=16, device=device), weights[4])


if __name__ == "__main__":
    unittest.main()
