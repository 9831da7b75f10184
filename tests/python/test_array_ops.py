"""The qmlp package on arrays: results, types, strides, refusals, threads."""
import array
import ast
import asyncio
import graphlib
import itertools
import os
import sys
import threading
import time
import unittest

import ml_dtypes
import mlx.core as mx
import numpy

import support

BF16 = numpy.dtype(ml_dtypes.bfloat16)
TYPES = {"f32": numpy.dtype(numpy.float32), "f16": numpy.dtype(numpy.float16), "bf16": BF16}
UNIT = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
FORMATS = list(itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)))

qmlp = None


def setUpModule():
    global qmlp
    qmlp = support.package()


def rounded(values, name):
    """float64 values, each exact, rounded once to a type; as float64."""
    if name == "bf16":
        return support.bf16_patterns(values).view(BF16).astype(numpy.float64)
    return values.astype(TYPES[name]).astype(numpy.float64)


def exact_weight(tensor, name):
    """scale * code + bias in float64, which holds 8-bit codes times f16 or bf16 scales exactly."""
    codes = numpy.ascontiguousarray(tensor.codes).view(numpy.uint8)
    bits = numpy.unpackbits(codes, axis=-1, bitorder="little").reshape(tensor.N, tensor.K, tensor.bits)
    q = (bits.astype(numpy.int64) << numpy.arange(tensor.bits)).sum(-1).astype(numpy.float64)
    grow = lambda part: numpy.repeat(part.astype(numpy.float64), tensor.group_size, axis=1)
    return rounded(grow(tensor.scales) * q + grow(tensor.biases), name)


def normal(seed, *shape):
    return numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)


def bits_of(x):
    return x.view(numpy.uint16) if x.dtype.itemsize == 2 else x.view(numpy.uint32)


class Arrays(unittest.TestCase):
    def assertSameBits(self, a, b):
        self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
        numpy.testing.assert_array_equal(bits_of(a), bits_of(b))

    def assertWithin(self, y, x, w, name, terms):
        """|y - x w^T| <= u |x w^T| + K 2^-24 sum |x w|, docs/numerics.md section 5."""
        x, w, y = (v.astype(numpy.float64) for v in (x, w, y))
        ref = x @ w.T
        bound = UNIT[name] * abs(ref) + terms * 2.0**-24 * (abs(x) @ abs(w).T)
        self.assertTrue((abs(y - ref) <= bound).all(), (abs(y - ref) - bound).max())


class Formats(Arrays):
    def test_quantize_is_mlx(self):
        for seed, (bits, group) in enumerate(FORMATS):
            for name in TYPES:
                w = normal(seed, 3, 256).astype(TYPES[name])
                got = qmlp.quantize(w, bits=bits, group_size=group)
                given = mx.array(w.astype(numpy.float32)).astype(
                    {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[name])
                codes, scales, biases = mx.quantize(given, group_size=group, bits=bits,
                                                    stream=mx.cpu)
                with self.subTest(bits=bits, group=group, type=name):
                    numpy.testing.assert_array_equal(got.codes, numpy.array(codes))
                    for mine, theirs in ((got.scales, scales), (got.biases, biases)):
                        self.assertEqual(mine.dtype, TYPES[name])
                        numpy.testing.assert_array_equal(
                            mine.astype(numpy.float32), numpy.array(theirs.astype(mx.float32)))

    def test_dequantize_and_identity_give_the_exact_weight(self):
        for seed, (bits, group) in enumerate(FORMATS):
            for scales, name in (("f16", "f16"), ("bf16", "bf16"), ("f16", "bf16"), ("bf16", "f32")):
                tensor = qmlp.quantize(normal(seed, 37, 128), bits=bits, group_size=group,
                                       scale_dtype=scales)
                want = exact_weight(tensor, name)
                with self.subTest(bits=bits, group=group, scales=scales, type=name):
                    got = qmlp.dequantize(tensor, dtype=name)
                    self.assertEqual(got.dtype, TYPES[name])
                    numpy.testing.assert_array_equal(got.astype(numpy.float64), want)
                    packed = qmlp.pack(tensor, activation=name)
                    eye = numpy.eye(128).astype(TYPES[name])
                    y = qmlp.quantized_linear(eye, packed)
                    numpy.testing.assert_array_equal(y.astype(numpy.float64), want.T)
                    numpy.testing.assert_array_equal(
                        packed.decode_row(5).astype(numpy.float64), want[5])

    def test_leading_axes(self):
        w = normal(1, 2, 3, 8, 64)
        whole = qmlp.quantize(w)
        self.assertEqual(whole.shape, (2, 3, 8, 64))
        one = qmlp.quantize(w[1, 2])
        numpy.testing.assert_array_equal(whole.codes[1, 2], one.codes)
        self.assertSameBits(qmlp.dequantize(whole)[1, 2], qmlp.dequantize(one))
        with self.assertRaises(ValueError) as caught:
            qmlp.quantize(w[:, :0])
        self.assertIn("needs N and K >= 1", str(caught.exception))
        codes, scales, biases = one
        self.assertIs(codes, one.codes)

    def test_mlx_arrays_of_a_checkpoint(self):
        w = mx.random.normal((32, 128)).astype(mx.bfloat16)
        codes, scales, biases = mx.quantize(w, group_size=32, bits=6)
        mx.eval(codes, scales, biases)
        tensor = qmlp.QuantizedTensor(codes, scales, biases, bits=6, group_size=32)
        self.assertEqual(str(tensor.spec), "6 bits, group 32, bf16 scales")
        packed = qmlp.pack(tensor)
        x = normal(2, 4, 128).astype(BF16)
        self.assertSameBits(
            qmlp.quantized_linear(x, packed),
            qmlp.quantized_linear(x, qmlp.pack(qmlp.QuantizedTensor(
                numpy.array(codes), numpy.array(scales.astype(mx.float32)).astype(BF16),
                numpy.array(biases.astype(mx.float32)).astype(BF16), 6, 32))))

    def test_refusals(self):
        w = normal(1, 4, 64)
        tensor = qmlp.quantize(w)
        for call, kind, text in (
                (lambda: qmlp.quantize(w, bits=7), ValueError, "bits: 7"),
                (lambda: qmlp.quantize(w, group_size=48), ValueError, "48"),
                (lambda: qmlp.quantize(normal(1, 4, 60)), ValueError, "60"),
                (lambda: qmlp.quantize(w[0]), ValueError, "needs [..., N, K]"),
                (lambda: qmlp.quantize(w.astype(numpy.float64)), TypeError, "float64"),
                (lambda: qmlp.quantize(w.astype(">f4")), TypeError, ">f4"),
                (lambda: qmlp.quantize([[1.0]]), TypeError, "w is a list"),
                (lambda: qmlp.QuantizedTensor(tensor.codes, tensor.scales, tensor.biases, 8),
                 ValueError, "codes have 8 words a row"),
                (lambda: qmlp.QuantizedTensor(tensor.codes, tensor.scales, tensor.scales[:2]),
                 ValueError, "[4, 1]"),
                (lambda: qmlp.pack(qmlp.QuantizedTensor(
                    tensor.codes.astype(numpy.int64), tensor.scales, tensor.biases)), TypeError,
                 "codes are"),
                (lambda: qmlp.pack(qmlp.QuantizedTensor(
                    tensor.codes, tensor.scales, tensor.biases.astype(numpy.float16))), TypeError,
                 "two types"),
                (lambda: qmlp.pack(tensor, activation="int8"), TypeError, "int8"),
                (lambda: qmlp.pack(tensor, qmlp.quantize(normal(1, 5, 64))), ValueError,
                 "gate is [4, 64], up is [5, 64]"),
                (lambda: qmlp.pack(tensor, accumulation="tensor"), ValueError, "tensor"),
        ):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(text, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class Ops(Arrays):
    def weights(self, name, hidden=128, intermediate=96, outputs=40):
        scales = "f16" if name == "f32" else name
        gate = qmlp.quantize(normal(1, intermediate, hidden), bits=4, scale_dtype=scales)
        up = qmlp.quantize(normal(2, intermediate, hidden), bits=8, group_size=32, scale_dtype=scales)
        down = qmlp.quantize(normal(3, outputs, intermediate), bits=3, group_size=32,
                             scale_dtype=scales)
        return gate, up, down

    def test_linear(self):
        for name, dtype in TYPES.items():
            gate, _, _ = self.weights(name)
            packed = qmlp.pack(gate, activation=name)
            x = normal(4, 7, 128).astype(dtype)
            y = qmlp.quantized_linear(x, packed)
            self.assertEqual((type(y), y.dtype, y.shape), (numpy.ndarray, dtype, (7, 96)))
            self.assertWithin(y, x, exact_weight(gate, name), name, 128)
            for row in range(7):  # one row has the bits of many
                self.assertSameBits(qmlp.quantized_linear(x[row], packed), y[row])
            self.assertSameBits(qmlp.quantized_linear(x.reshape(1, 7, 1, 128), packed),
                                y.reshape(1, 7, 1, 96))
            self.assertEqual(qmlp.quantized_linear(x[:0], packed).shape, (0, 96))
            self.assertSameBits(qmlp.quantized_linear(x, qmlp.pack(gate, activation=name)), y)
            self.assertSameBits(qmlp.quantized_linear(x, gate), y) if name != "f32" else None
            bias, residual = normal(5, 96).astype(dtype), normal(6, 7, 96).astype(dtype)
            wide = lambda v: v.astype(numpy.float64)
            sums = rounded(wide(y) + wide(bias), name)
            want = rounded(wide(residual) + sums, name).astype(dtype)
            got = qmlp.quantized_linear(x, packed, linear_bias=bias, residual=residual)
            self.assertSameBits(got, want)
            same = residual.copy()  # in place
            self.assertIs(qmlp.quantized_linear(x, packed, linear_bias=bias, residual=same, out=same),
                          same)
            self.assertSameBits(same, want)

    def test_fused_is_separate(self):
        for name, dtype in TYPES.items():
            gate, up, down = self.weights(name)
            gate_up = qmlp.pack(gate, up, activation=name)
            packed_down = qmlp.pack(down, activation=name)
            x = normal(7, 2, 5, 128).astype(dtype)
            residual = normal(8, 2, 5, 40).astype(dtype)
            tap = numpy.empty((2, 5, 96), dtype)
            hidden = qmlp.fused_swiglu(x, gate_up, gate_tap=tap)
            g = qmlp.quantized_linear(x, gate_up.part(0))
            u = qmlp.quantized_linear(x, qmlp.pack(up, activation=name))
            self.assertSameBits(tap, g)
            self.assertSameBits(u, qmlp.quantized_linear(x, gate_up.part(1)))
            wide = g.astype(numpy.float64)
            ref = wide / (1 + numpy.exp(-wide)) * u.astype(numpy.float64)
            # match rounds seven times (four of them in the sigmoid); f16's exp overflows below -11.09
            small = (wide < -11.09) if name == "f16" else numpy.zeros_like(wide, bool)
            off = abs(hidden.astype(numpy.float64) - ref) > 8 * UNIT[name] * abs(ref) + 1e-7
            self.assertFalse((off & ~small).any())
            self.assertTrue((hidden[small] == 0).all())
            self.assertSameBits(
                qmlp.fused_mlp(x, gate_up, packed_down, residual=residual),
                qmlp.quantized_linear(hidden, packed_down, residual=residual))
            if name != "f32":
                self.assertSameBits(qmlp.fused_swiglu(x, gate, up), hidden)
            gate_bias, up_bias = normal(9, 96).astype(dtype), normal(10, 96).astype(dtype)
            with_bias = qmlp.fused_swiglu(x, gate_up, gate_bias=gate_bias, up_bias=up_bias,
                                          gate_tap=tap)
            self.assertSameBits(tap, qmlp.quantized_linear(x, gate_up.part(0), linear_bias=gate_bias))
            self.assertFalse((bits_of(with_bias) == bits_of(hidden)).all())
            wide_plan = qmlp.pack(gate, up, activation=name, precision="wide")
            self.assertEqual(qmlp.fused_swiglu(x, wide_plan).dtype, dtype)

    def test_dense_weights(self):
        w = normal(1, 24, 48).astype(BF16)
        x = normal(2, 3, 48).astype(BF16)
        packed = qmlp.pack(w)
        self.assertEqual(str(packed.specs[0]), "bf16")
        self.assertWithin(qmlp.quantized_linear(x, packed), x, w, "bf16", 48)

    def test_strides(self):
        gate, _, _ = self.weights("f16")
        packed = qmlp.pack(gate)
        x = normal(3, 6, 4, 256).astype(numpy.float16)
        for view in (x[..., :128], x[::2, :, 128:], x.transpose(1, 0, 2)[..., :128], x[..., ::2],
                     x[:, ::-1, :128], numpy.broadcast_to(x[0, 0, :128], (3, 128)),
                     x[:, 1:2, :128], numpy.asfortranarray(x[:, 0, :128])):
            self.assertSameBits(qmlp.quantized_linear(view, packed),
                                qmlp.quantized_linear(view.copy(order="C"), packed))
        frozen = x[..., :128].copy()
        frozen.flags.writeable = False
        self.assertSameBits(qmlp.quantized_linear(frozen, packed),
                            qmlp.quantized_linear(x[..., :128], packed))
        # out with a row stride; what lies between its rows stays
        room = numpy.full((5, 200), 7, numpy.float16)
        out = room[:, :96]
        qmlp.quantized_linear(x[:5, 0, :128], packed, out=out)
        self.assertSameBits(out.copy(), qmlp.quantized_linear(x[:5, 0, :128].copy(), packed))
        self.assertTrue((room[:, 96:] == 7).all())
        # strided parts of a weight are copied
        wide = qmlp.QuantizedTensor(*(numpy.repeat(part, 2, axis=0)[::2] for part in gate), 4, 64)
        self.assertSameBits(qmlp.quantized_linear(x[..., :128], qmlp.pack(wide)),
                            qmlp.quantized_linear(x[..., :128], packed))

    def test_other_array_types(self):
        gate, _, _ = self.weights("f16")
        packed = qmlp.pack(gate, activation="f32")
        x = normal(3, 128)
        want = qmlp.quantized_linear(x, packed)
        buffer = array.array("f", x.tolist())
        self.assertSameBits(qmlp.quantized_linear(buffer, packed), want)
        self.assertSameBits(qmlp.quantized_linear(memoryview(buffer), packed), want)

        class Namespace:
            @staticmethod
            def from_dlpack(given):
                return Foreign(numpy.from_dlpack(given))

        class Foreign:
            """An array library of its own."""

            def __init__(self, inner):
                self.inner, self.dtype, self.shape = inner, inner.dtype, inner.shape

            def __dlpack__(self, **options):
                return self.inner.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.inner.__dlpack_device__()

            def __array_namespace__(self):
                return Namespace

        got = qmlp.quantized_linear(Foreign(x), packed)
        self.assertIsInstance(got, Foreign)
        self.assertSameBits(got.inner, want)
        self.assertIsInstance(qmlp.quantize(Foreign(normal(1, 4, 64))).codes, Foreign)

    def test_refusals(self):
        gate, up, down = self.weights("f16")
        linear, swiglu = qmlp.pack(gate), qmlp.pack(gate, up)
        x = normal(1, 3, 128).astype(numpy.float16)
        out = numpy.zeros((3, 96), numpy.float16)
        frozen = out.copy()
        frozen.flags.writeable = False
        call = qmlp.quantized_linear
        for run, kind, text in (
                (lambda: call(x.astype(numpy.float32), linear), TypeError, "x is f32"),
                (lambda: call(x.astype(numpy.int32), linear), TypeError, "int32"),
                (lambda: call(x[:, :64], linear), ValueError, "needs [..., 128]"),
                (lambda: call(numpy.float16(1), linear), ValueError, "needs [..., 128]"),
                (lambda: call(x, swiglu), ValueError, "holds 2 arrays"),
                (lambda: call(x, "weight"), TypeError, "weight is a str"),
                (lambda: qmlp.fused_swiglu(x, linear), ValueError, "holds 1 arrays"),
                (lambda: qmlp.fused_swiglu(x, gate), TypeError, "up is missing"),
                (lambda: qmlp.fused_mlp(x, swiglu, linear), ValueError, "down takes 128"),
                (lambda: qmlp.fused_mlp(x, swiglu, down), TypeError, "down is a qmlp.QuantizedTensor"),
                (lambda: qmlp.fused_mlp(x, swiglu, swiglu), ValueError, "down holds 2 arrays"),
                (lambda: call(x, linear, out=out[:2]), ValueError, "out is [2, 96]"),
                (lambda: call(x, linear, out=out.astype(numpy.float32)), TypeError, "out is f32"),
                (lambda: call(x, linear, out=frozen), ValueError, "read-only"),
                (lambda: call(x, linear, out=numpy.zeros((96, 3), numpy.float16).T), ValueError,
                 "out has strides"),
                (lambda: call(x, linear, linear_bias=out[0, :5]), ValueError, "needs [96]"),
                (lambda: call(x, linear, residual=out[0]), ValueError, "residual is [96]"),
                (lambda: call(x[:, :96], qmlp.pack(qmlp.quantize(normal(1, 96, 96), group_size=32),
                                                   activation="f16"), out=x[:, :96]),
                 ValueError, "out overlaps x"),
                (lambda: linear.part(1), ValueError, "index is 1"),
                (lambda: linear.decode_row(96), ValueError, "row is 96"),
        ):
            with self.assertRaises(kind) as caught:
                run()
            self.assertIn(text, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))


class Plans(unittest.TestCase):
    def test_supports_and_explain(self):
        problem = qmlp.LinearProblem(N=64, K=100)
        support_ = qmlp.supports(problem)
        self.assertFalse(support_)
        self.assertEqual((support_.reason, support_.field, support_.have), ("shape", "K", 100))
        self.assertIn("K is 100", str(support_))
        good = qmlp.SwigluProblem(hidden=128, intermediate=64, gate=qmlp.QuantSpec(3, 32, "f16"))
        for device in ("cpu", "portable", "avx2", "avx512", "h200", "a100"):
            self.assertTrue(qmlp.supports(good, device))
        verdicts = dict(qmlp.explain(good, "avx2"))
        self.assertTrue(verdicts["swiglu_bf16_any_m4n16_avx2"])
        self.assertEqual(verdicts["swiglu_bf16_any_m4n16_avx512"].reason, "no_isa")
        with self.assertRaises(ValueError) as caught:
            qmlp.supports(good, "z80")
        self.assertIn("device is 'z80'", str(caught.exception))

    def test_plan(self):
        problem = qmlp.LinearProblem(N=64, K=128, M_max=512)
        plan = qmlp.Plan(problem, force_isa="portable")
        self.assertTrue(plan.kernel_name(1).endswith("_portable"))
        self.assertTrue(plan.can_run)
        self.assertEqual((plan.accumulation, plan.segments), ("f32", 1))
        self.assertLessEqual(plan.workspace_bytes(1), plan.workspace_bytes(512))
        away = qmlp.Plan(problem, device="h200")
        self.assertFalse(away.can_run)
        self.assertEqual(away.accumulation, "tensor")
        with self.assertRaises(qmlp.UnsupportedError) as caught:
            qmlp.Plan(problem, force_kernel="linear_f32_any_m6n16_portable")
        self.assertEqual(caught.exception.code, "unsupported")
        with self.assertRaises(ValueError):
            qmlp.Plan(qmlp.LinearProblem(N=4, K=64, accumulation="f64"))

    def test_every_isa_and_contract_has_its_bits(self):
        tensor = qmlp.quantize(normal(1, 40, 128), bits=5, group_size=32, scale_dtype="bf16")
        x = normal(2, 6, 128).astype(BF16)
        for accumulation in ("f32", "tensor"):
            usual = qmlp.quantized_linear(x, qmlp.pack(tensor, accumulation=accumulation))
            other = qmlp.quantized_linear(
                x, qmlp.pack(tensor, accumulation=accumulation, force_isa="portable"))
            numpy.testing.assert_array_equal(bits_of(usual), bits_of(other))

    def test_dispatch_counts(self):
        packed = qmlp.pack(qmlp.quantize(normal(1, 4, 64)), force_isa="portable")
        qmlp.reset_dispatch_counts()
        for _ in range(3):
            qmlp.quantized_linear(normal(2, 64), packed)
        self.assertEqual(list(qmlp.dispatch_counts().values()), [3])


class Threads(unittest.TestCase):
    def setUp(self):
        self.packed = qmlp.pack(qmlp.quantize(normal(1, 512, 512)), activation="f32")
        self.addCleanup(qmlp.set_num_threads, 0)

    def test_many_threads(self):
        inputs = [normal(seed, 3, 512) for seed in range(8)]
        want = [qmlp.quantized_linear(x, self.packed) for x in inputs]
        wrong = []

        def work(i):
            for step in range(30):
                if i == 0 and step % 10 == 0:
                    qmlp.set_num_threads(1 + step // 10)  # while others are inside a call
                if not (qmlp.quantized_linear(inputs[i], self.packed) == want[i]).all():
                    wrong.append((i, step))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_the_gil_is_free_during_a_call(self):
        x = normal(1, 1024, 512)
        qmlp.set_num_threads(1)
        started, stop, ticks = threading.Event(), threading.Event(), [0]
        # A thread that needs the GIL for each tick; with the switch interval this long it would get
        # none if the calls kept the GIL.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(100)
        self.addCleanup(sys.setswitchinterval, interval)

        def tick():
            started.set()
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.0005)

        ticker = threading.Thread(target=tick)
        ticker.start()
        started.wait()
        took = during = 0
        for _ in range(20):  # on a busy machine one call may be over before the ticker runs
            before, begin = ticks[0], time.monotonic()
            qmlp.quantized_linear(x, self.packed)
            took, during = took + time.monotonic() - begin, during + ticks[0] - before
        stop.set()
        ticker.join()
        # A ticker that runs only between the calls would get one tick for each at most.
        self.assertGreater(during, 40, f"{during} ticks in {took:.4f} s")

    def test_asyncio(self):
        x = normal(1, 64, 512)
        want = qmlp.quantized_linear(x, self.packed)

        async def run():
            calls = [asyncio.to_thread(qmlp.quantized_linear, x, self.packed) for _ in range(6)]
            return await asyncio.gather(*calls)

        for got in asyncio.run(run()):
            numpy.testing.assert_array_equal(got, want)

    def test_a_forked_child_makes_its_own_threads(self):
        x = normal(1, 64, 512)
        want = qmlp.quantized_linear(x, self.packed)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, b"1" if (qmlp.quantized_linear(x, self.packed) == want).all() else b"0")
            finally:
                os._exit(0)
        os.close(write)
        self.addCleanup(os.close, read)
        deadline = time.monotonic() + 30
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                self.fail("the child hangs")
            time.sleep(0.01)
        self.assertEqual(os.read(read, 1), b"1")

    def test_number_of_threads(self):
        qmlp.set_num_threads(3)
        self.assertEqual(qmlp.num_threads(), 3)
        for bad in (-1, 1025):
            with self.assertRaises(ValueError):
                qmlp.set_num_threads(bad)
        self.assertEqual(qmlp.num_threads(), 3)
        code = "import qmlp; print(qmlp.num_threads())"
        self.assertEqual(support.python(code, QMLP_THREADS="2").strip(), "2")
        with self.assertRaises(AssertionError) as caught:
            support.python(code, QMLP_THREADS="many")
        self.assertIn("QMLP_THREADS is 'many'", str(caught.exception))


class Package(unittest.TestCase):
    def test_files(self):
        self.assertRegex(qmlp.__version__, r"^\d+\.\d+\.\d+$")
        self.assertTrue(os.path.isfile(qmlp.get_library()))
        for name in qmlp.__all__:
            thing = getattr(qmlp, name)
            self.assertTrue(thing.__doc__, name)

    def test_no_module_needs_itself(self):
        """Imports lead one way, those that wait for a first call too."""
        root = support.DATA.parents[1] / "python" / "qmlp"
        needs = {}
        for path in root.rglob("*.py"):
            package = path.relative_to(root).parent.parts
            name = package if path.stem == "__init__" else (*package, path.stem)
            found = needs.setdefault(".".join(name), set())
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or node.level == 0:
                    continue
                base = package[:len(package) - node.level + 1]
                module = (*base, *(node.module.split(".") if node.module else ()))
                for alias in node.names:
                    inside = root.joinpath(*module, alias.name)
                    is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
                    if is_module or module:  # otherwise an extension module
                        found.add(".".join((*module, alias.name) if is_module else module))
        self.assertIn("_torch_ops", needs["_ops"])
        order = graphlib.TopologicalSorter(needs)
        self.assertIn("torch", list(order.static_order()))  # raises CycleError

    def test_stubs(self):
        support.run(sys.executable, support.DATA.parents[1] / "tools" / "gen_stubs.py", "--check",
                    support.build / "python")

    def test_bf16_needs_no_ml_dtypes_until_used(self):
        code = ("import sys; sys.modules['ml_dtypes'] = None\n"
                "import numpy, qmlp\n"
                "t = qmlp.quantize(numpy.ones((4, 64), numpy.float32))\n"
                "print(qmlp.quantized_linear(numpy.ones(64, numpy.float32), qmlp.pack(t))[0])\n"
                "try: qmlp.dequantize(t, dtype='bf16')\n"
                "except TypeError as error: print(error)")
        first, second = support.python(code).splitlines()
        self.assertEqual(first, "64.0")
        self.assertIn("pip install ml_dtypes", second)


if __name__ == "__main__":
    unittest.main()
