"""What the package does with arrays on a GPU, on a machine without one: a CuPy of NumPy arrays, and the
library's CUDA calls done by its CPU calls on the same addresses. The real thing is tests/torch."""
import contextlib
import ctypes
import sys
import types
import unittest
from unittest import mock

import numpy

import support

qmlp = None
calls = []  # (stream, ordinal, workspace address) of each call


def setUpModule():
    global qmlp
    qmlp = support.package()


class Device(contextlib.AbstractContextManager):
    def __init__(self, ordinal):
        self.id = ordinal

    def __exit__(self, *_):
        pass


class FakeArray:
    """As much of cupy.ndarray as the package asks for."""

    def __init__(self, array, ordinal=0, base=None):
        self.array, self.device, self.base = array, Device(ordinal), base
        self.data = types.SimpleNamespace(ptr=array.__array_interface__["data"][0])

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)
    strides = property(lambda self: self.array.strides)
    ndim = property(lambda self: self.array.ndim)
    size = property(lambda self: self.array.size)
    nbytes = property(lambda self: self.array.nbytes)

    def __getitem__(self, key):
        return FakeArray(self.array[key], self.device.id, self)

    def reshape(self, *shape):
        made = self.array.reshape(*shape)
        return FakeArray(made, self.device.id,
                         self if numpy.shares_memory(made, self.array) else None)


class OnDevice:
    """An array of some other library, in a GPU's memory as DLPack has it."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **options):
        raise AssertionError("only a library that knows streams may ask")


def fake_cupy():
    module = types.ModuleType("cupy")
    module.ndarray = FakeArray
    module.empty = lambda shape, dtype: FakeArray(numpy.empty(shape, dtype))
    module.ascontiguousarray = lambda x: FakeArray(numpy.ascontiguousarray(x.array), x.device.id)
    module.asnumpy = lambda x: x.array
    module.asarray = FakeArray
    module.from_dlpack = lambda x: FakeArray(x.array)
    stream = types.SimpleNamespace(ptr=77, synchronize=lambda: None)
    module.cuda = types.SimpleNamespace(get_current_stream=lambda ordinal: stream)
    return module


def at(address, rows, columns, stride):
    """The f16 matrix at an address."""
    if address == 0:
        return numpy.empty((rows, columns), numpy.float16) if rows == 0 else None
    count = (rows - 1) * stride + columns
    flat = numpy.frombuffer((ctypes.c_uint16 * count).from_address(address), numpy.float16)
    return numpy.lib.stride_tricks.as_strided(flat, (rows, columns), (2 * stride, 2))


def row_at(address, columns):
    return None if address == 0 else at(address, 1, columns, columns)[0]


def linear(plan, weight, ordinal, stream, dtype, M, N, K, x, x_stride, out, out_stride, bias, residual,
           residual_stride, workspace, workspace_bytes):
    calls.append((stream, ordinal, workspace, workspace_bytes))
    if M != 0:
        qmlp._native.quantized_linear(
            plan, weight, dtype, at(x, M, K, x_stride), at(out, M, N, out_stride), row_at(bias, N),
            at(residual, M, N, residual_stride))


def swiglu(plan, weight, ordinal, stream, dtype, M, N, K, x, x_stride, out, out_stride, gate, up, tap,
           tap_stride, workspace, workspace_bytes):
    calls.append((stream, ordinal, workspace, workspace_bytes))
    qmlp._native.fused_swiglu(
        plan, weight, dtype, at(x, M, K, x_stride), at(out, M, N, out_stride), row_at(gate, N),
        row_at(up, N), at(tap, M, N, tap_stride))


def mlp(swiglu_plan, gate_up, down_plan, down, ordinal, stream, dtype, M, N, K, x, x_stride, out,
        out_stride, gate, up, down_bias, residual, residual_stride, workspace, workspace_bytes):
    calls.append((stream, ordinal, workspace, workspace_bytes))
    qmlp._native.fused_mlp(
        swiglu_plan, gate_up, down_plan, down, dtype, 96, at(x, M, K, x_stride),
        at(out, M, N, out_stride), row_at(gate, 96), row_at(up, 96), row_at(down_bias, N),
        at(residual, M, N, residual_stride))


def normal(seed, *shape):
    return numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32).astype("f2")


def weight(seed, N, K, **options):
    return qmlp.quantize(normal(seed, N, K), **options)


def moved(packed):
    """A CPU's packed weight that says it is on cuda:0."""
    packed._device, packed._ordinal = (1, 0), 0
    return packed


class Calls(unittest.TestCase):
    def setUp(self):
        calls.clear()
        for context in (
                mock.patch.dict(sys.modules, cupy=fake_cupy()),
                mock.patch.object(qmlp._arrays, "_cupy", None),
                mock.patch.multiple(qmlp._native, cuda_linear=linear, cuda_swiglu=swiglu,
                                    cuda_mlp=mlp)):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)
        gate, up, down = weight(1, 96, 128), weight(2, 96, 128, bits=8), weight(3, 40, 96, group_size=32)
        self.cpu = [qmlp.pack(gate), qmlp.pack(gate, up), qmlp.pack(down)]
        self.gpu = [moved(qmlp.pack(gate)), moved(qmlp.pack(gate, up)), moved(qmlp.pack(down))]

    def assertSame(self, got, want):
        self.assertIsInstance(got, FakeArray)
        numpy.testing.assert_array_equal(got.array, want)

    def test_layouts_reach_the_library_as_they_are(self):
        base = normal(4, 6, 4, 256)
        given = FakeArray(base)
        views = (lambda t: t[..., :128], lambda t: t[::2, :, 128:], lambda t: t[..., ::2],
                 lambda t: t[0, 0, :128], lambda t: t[:0, :, :128], lambda t: t[:, 1:2, 1:129],
                 lambda t: t[::-1, 0, :128], lambda t: t[:1, :1, :128], lambda t: t[0, ::2, 128:])
        for i, view in enumerate(views):
            with self.subTest(view=i):
                self.assertSame(qmlp.quantized_linear(view(given), self.gpu[0]),
                                qmlp.quantized_linear(view(base), self.cpu[0]))
        self.assertEqual({(stream, ordinal) for stream, ordinal, _, _ in calls}, {(77, 0)})
        self.assertTrue(all((at != 0) == (size != 0) for _, _, at, size in calls))
        room = numpy.full((5, 200), 7, numpy.float16)
        out = FakeArray(room)[:, 1:97]
        self.assertIs(qmlp.quantized_linear(given[:5, 0, :128], self.gpu[0], out=out), out)
        self.assertSame(out, qmlp.quantized_linear(base[:5, 0, :128], self.cpu[0]))
        self.assertTrue((room[:, :1] == 7).all() and (room[:, 97:] == 7).all())

    def test_every_argument(self):
        x, residual = normal(5, 2, 3, 128), normal(6, 3, 2, 40).transpose(1, 0, 2)
        wide, gate_bias, up_bias, down_bias = normal(7, 2, 3, 96), *(normal(i, n) for i, n in (
            (8, 96), (9, 192), (10, 40)))
        up_bias = up_bias[::2]
        F = FakeArray
        self.assertSame(
            qmlp.quantized_linear(F(x), self.gpu[0], linear_bias=F(up_bias), residual=F(wide)),
            qmlp.quantized_linear(x, self.cpu[0], linear_bias=up_bias, residual=wide))
        tap, tap_cpu = F(numpy.zeros((2, 3, 96), "f2")), numpy.zeros((2, 3, 96), "f2")
        self.assertSame(
            qmlp.fused_swiglu(F(x), self.gpu[1], gate_bias=F(gate_bias), up_bias=F(up_bias),
                              gate_tap=tap),
            qmlp.fused_swiglu(x, self.cpu[1], gate_bias=gate_bias, up_bias=up_bias, gate_tap=tap_cpu))
        self.assertSame(tap, tap_cpu)
        self.assertSame(
            qmlp.fused_mlp(F(x), self.gpu[1], self.gpu[2], gate_bias=F(gate_bias),
                           up_bias=F(up_bias), down_bias=F(down_bias), residual=F(residual)),
            qmlp.fused_mlp(x, self.cpu[1], self.cpu[2], gate_bias=gate_bias, up_bias=up_bias,
                           down_bias=down_bias, residual=residual))

    def test_other_libraries_come_through_the_one_that_is_here(self):
        x = normal(4, 3, 128)
        self.assertSame(qmlp.quantized_linear(OnDevice(x), self.gpu[0]),
                        qmlp.quantized_linear(x, self.cpu[0]))
        del sys.modules["cupy"]
        with mock.patch.dict(sys.modules, cupy=None, torch=None):
            with self.assertRaisesRegex(TypeError, "OnDevice on a GPU: needs torch or CuPy"):
                qmlp.quantized_linear(OnDevice(x), self.gpu[0])

    def test_refusals(self):
        x, out = normal(4, 3, 128), numpy.zeros((3, 96), "f2")
        F, call = FakeArray, qmlp.quantized_linear
        gate = weight(1, 96, 128)
        there = qmlp.QuantizedTensor(*map(F, gate))
        for run, kind, text in (
                (lambda: call(x, self.gpu[0]), ValueError,
                 "x is on cpu, the weight on cuda:0: need one device"),
                (lambda: call(F(x), self.cpu[0]), ValueError,
                 "x is on cuda:0, the weight on cpu: need one device"),
                (lambda: call(F(x, 1), self.gpu[0]), ValueError, "x is on cuda:1"),
                (lambda: call(F(x), self.gpu[0], residual=F(out, 1)), ValueError,
                 "residual is on cuda:1, x on cuda:0: need one device"),
                (lambda: call(F(x), self.gpu[0], residual=out), TypeError, "give one library's"),
                (lambda: call(F(x), self.gpu[0], out=F(out.T.copy().T)), ValueError,
                 "out has strides that make no matrix"),
                (lambda: call(OnDevice(x), self.gpu[0], out=OnDevice(out)), ValueError,
                 "out is read-only"),
                (lambda: qmlp.fused_swiglu(F(x), self.gpu[1], gate_tap=F(out.T.copy().T)),
                 ValueError, "gate_tap has strides that make no matrix"),
                (lambda: qmlp.fused_mlp(F(x), self.gpu[1], self.cpu[2]), ValueError,
                 "down is on cpu, gate and up on cuda:0: need one device"),
                (lambda: qmlp.pack(there, gate), ValueError,
                 "gate is on cuda:0, up on cpu: need one device"),
                (lambda: qmlp.pack(qmlp.QuantizedTensor(F(gate.codes), F(gate.scales, 1),
                                                        F(gate.biases))), ValueError,
                 "codes, scales and biases are on cuda:0 and cuda:1, need one device"),
                (lambda: qmlp.pack(there, device="cpu"), ValueError,
                 "weight is on cuda:0, packing it for cpu needs it there or on the cpu"),
                (lambda: qmlp.pack(gate, device="gpu"), ValueError, "device is 'gpu'"),
                (lambda: qmlp.pack(gate, device="cuda:x"), ValueError, "device is 'cuda:x'"),
        ):
            with self.subTest(text=text):
                with self.assertRaises(kind) as caught:
                    run()
                self.assertIn(text, str(caught.exception))
                self.assertNotIn("\n", str(caught.exception))

    def test_quantizing_there(self):
        w = normal(1, 8, 128)
        here, there = qmlp.quantize(w), qmlp.quantize(FakeArray(w))
        for a, b in zip(here, there):
            self.assertSame(b, a)
        self.assertSame(qmlp.dequantize(there), qmlp.dequantize(here))
        back = self.gpu[1].unpack(1, like=there.codes)
        for a, b in zip(weight(2, 96, 128, bits=8), back):
            self.assertSame(b, a)


class WithoutCuda(unittest.TestCase):
    def test_a_build_or_machine_without_cuda_answers(self):
        problem = qmlp.LinearProblem(N=64, K=128)
        answer = qmlp.supports(problem, "cuda")
        if answer:
            self.skipTest("not run: this machine has CUDA")
        self.assertEqual((answer.reason, answer.field), ("no_device", "device"))
        # A Python user builds with pip, as docs/python.md says.
        pip = "pip install . -C cmake.define.QMLP_CUDA=ON"
        self.assertIn(pip, (support.DATA.parents[1] / "docs" / "python.md").read_text())
        self.assertIn(pip if "build" in str(answer) else "NVIDIA", str(answer))
        for run in (lambda: qmlp.pack(weight(1, 4, 64), device="cuda"),
                    lambda: qmlp.explain(problem, "cuda:0"),
                    lambda: qmlp.Plan(problem, device="cuda")):
            with self.assertRaises(qmlp.DeviceError) as caught:
                run()
            self.assertEqual(str(caught.exception), str(answer))
        with self.assertRaises(ValueError):
            qmlp.supports(problem, "cuda:x")

    def test_unpack(self):
        gate, up = weight(1, 96, 128, bits=3, group_size=32), weight(2, 96, 128)
        packed = qmlp.pack(gate, up)
        for index, tensor in enumerate((gate, up)):
            back = packed.unpack(index)
            self.assertEqual((back.bits, back.group_size), (tensor.bits, tensor.group_size))
            for a, b in zip(back, tensor):
                numpy.testing.assert_array_equal(a, b)
        with self.assertRaisesRegex(ValueError, "index is 2, the weight has 2 parts"):
            packed.unpack(2)
        with self.assertRaisesRegex(qmlp.UnsupportedError, "the weight is dense"):
            qmlp.pack(normal(1, 4, 64)).unpack()


if __name__ == "__main__":
    unittest.main()
