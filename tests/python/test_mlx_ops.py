"""qmlp.mlx: the ops on mx.array, against the same ops on NumPy (bit for bit) and MLX's own."""
import copy
import importlib
import itertools
import threading
import unittest

import ml_dtypes
import mlx.core as mx
import numpy

import support

TYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
qmlp = None


def setUpModule():
    global qmlp
    qmlp = support.package()
    import qmlp.mlx


def to_numpy(a):
    if a.dtype == mx.bfloat16:
        return numpy.array(a.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return numpy.array(a)


def patterns(a):
    wide = {mx.float32: mx.uint32, mx.float16: mx.uint16, mx.bfloat16: mx.uint16}
    return numpy.array(a.view(wide[a.dtype]))


class MlxTest(unittest.TestCase):
    def setUp(self):
        mx.random.seed(7)

    def weight(self, N, K, bits=4, group=64, dtype=mx.float32):
        w = mx.random.normal((N, K)).astype(dtype)
        return qmlp.mlx.quantize(w, bits=bits, group_size=group)

    def assertSameBits(self, a, b):
        self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
        numpy.testing.assert_array_equal(patterns(a), patterns(b))

    def assertNear(self, a, b, tolerance=1e-3):
        self.assertEqual(a.shape, b.shape)
        self.assertLess(mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))).item()
                        if a.size else 0.0, tolerance)


class Results(MlxTest):
    def test_the_numpy_ops_bits(self):
        for (name, dtype), (bits, group) in zip(itertools.cycle(TYPES.items()), itertools.product(
                (2, 3, 4, 5, 6, 8), (32, 64, 128))):
            gate, up = self.weight(48, 128, bits, group, dtype), self.weight(48, 128, 8, 32, dtype)
            x = mx.random.normal((2, 3, 128)).astype(dtype)
            bias = mx.random.normal((48,)).astype(dtype)
            residual = mx.random.normal((2, 3, 48)).astype(dtype)
            with self.subTest(type=name, bits=bits, group=group):
                packed = qmlp.mlx.pack(gate)
                want = qmlp.quantized_linear(
                    to_numpy(x), qmlp.pack(gate), linear_bias=to_numpy(bias),
                    residual=to_numpy(residual))
                got = qmlp.mlx.quantized_linear(x, packed, linear_bias=bias, residual=residual)
                numpy.testing.assert_array_equal(patterns(got), want.view(patterns(got).dtype))
                both = qmlp.mlx.pack(gate, up)
                got = qmlp.mlx.fused_swiglu(x, both, gate_bias=bias)
                want = qmlp.fused_swiglu(to_numpy(x), qmlp.pack(gate, up), gate_bias=to_numpy(bias))
                numpy.testing.assert_array_equal(patterns(got), want.view(patterns(got).dtype))
                self.assertSameBits(qmlp.mlx.quantized_linear(x, both.part(1)),
                                    qmlp.mlx.quantized_linear(x, qmlp.mlx.pack(up)))

    def test_mlp_is_its_parts(self):
        for dtype in TYPES.values():
            gate, up = self.weight(64, 128, 4, 32, dtype), self.weight(64, 128, 8, 64, dtype)
            gate_up, down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(self.weight(128, 64, 6, 32, dtype))
            x = mx.random.normal((5, 128)).astype(dtype)
            self.assertSameBits(
                qmlp.mlx.fused_mlp(x, gate_up, down, residual=x),
                qmlp.mlx.quantized_linear(qmlp.mlx.fused_swiglu(x, gate_up), down, residual=x))

    def test_types_are_mlx_promotion(self):
        for x_type, scale_type, bias_type in itertools.product(TYPES.values(), repeat=3):
            tensor = self.weight(32, 64, dtype=scale_type)
            x = mx.random.normal((3, 64)).astype(x_type)
            bias = mx.random.normal((32,)).astype(bias_type)
            packed = qmlp.mlx.pack(tensor, activation=x_type)
            codes, scales, biases = tensor
            want = mx.quantized_matmul(x, codes, scales, biases)
            got = qmlp.mlx.quantized_linear(x, packed)
            self.assertEqual(got.dtype, want.dtype)
            with_bias = qmlp.mlx.quantized_linear(x, packed, linear_bias=bias)
            self.assertEqual(with_bias.dtype, (want + bias).dtype)
            wide = x.astype(mx.float32) @ mx.dequantize(
                codes, scales.astype(mx.float32), biases.astype(mx.float32)).T
            unit = {mx.float32: 1e-5, mx.float16: 2e-2, mx.bfloat16: 2e-1}[got.dtype]
            self.assertNear(got, wide, unit)
            self.assertNear(with_bias, wide + bias.astype(mx.float32), unit)

    def test_a_wider_bias_of_a_swiglu_is_not_rounded(self):
        gate, up = (self.weight(32, 64, dtype=mx.bfloat16) for _ in range(2))
        both, down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(self.weight(64, 32, group=32, dtype=mx.bfloat16))
        x = mx.random.normal((3, 64)).astype(mx.bfloat16)
        bias = mx.full((32,), 1 + 2.0**-12)  # in bf16: 1
        for name in ("gate_bias", "up_bias"):
            with self.subTest(bias=name):
                parts = [qmlp.mlx.quantized_linear(x, both.part(i), linear_bias=bias if name == key else None)
                         for i, key in enumerate(("gate_bias", "up_bias"))]
                want = parts[0] * mx.sigmoid(parts[0]) * parts[1]
                got = qmlp.mlx.fused_swiglu(x, both, **{name: bias})
                self.assertSameBits(got, want)
                self.assertEqual(got.dtype, mx.float32)
                self.assertSameBits(qmlp.mlx.fused_mlp(x, both, down, **{name: bias}),
                                    qmlp.mlx.quantized_linear(want, down))

    # The lists of MLX's own tests of quantized_matmul.
    def test_mlx_shapes(self):
        cases = [((M, K), N) for M, N, K in itertools.product((8, 32, 33, 64), (128, 256),
                                                              (128, 256))]
        cases += [((3, 256), 32), ((2, 1, 7, 256), 32), ((33, 128), 3284)]
        cases += [((B, 1, K), N) for B, K, N in itertools.product((1, 3, 8), (64, 256), (256, 67))]
        cases += [((M, 512), N) for M, N in itertools.product(range(2, 10), (67,))]
        cases += [((1, 32), 3), ((2, 32), 10), ((1, 32), 5), ((4, 32), 7)]
        cases += [((M, 64), N) for M, N in itertools.product((1, 10, 129), (33, 3, 99))]
        for (shape, N), bits in zip(cases, itertools.cycle((2, 3, 4, 5, 6, 8))):
            group = 32 if shape[-1] % 64 else 64
            codes, scales, biases = tensor = self.weight(N, shape[-1], bits, group)
            x = mx.random.normal(shape) / shape[-1] ** 0.5
            with self.subTest(x=shape, N=N, bits=bits):
                self.assertNear(
                    qmlp.mlx.quantized_linear(x, qmlp.mlx.pack(tensor)),
                    mx.quantized_matmul(x, codes, scales, biases, group_size=group, bits=bits))

    def test_odd_inputs(self):
        tensor = self.weight(24, 64)
        packed = qmlp.mlx.pack(tensor)
        x = mx.random.normal((6, 4, 128))
        plain = lambda v: qmlp.mlx.quantized_linear(mx.array(numpy.array(v)), packed)
        for view in (x[..., ::2], x[::2, :, 64:], x.transpose(1, 0, 2)[..., :64], x[0, 0, :64],
                     mx.broadcast_to(x[0, :1, :64], (5, 64)), x[:, :0, :64], x[:0, :, :64]):
            self.assertSameBits(qmlp.mlx.quantized_linear(view, packed), plain(view))
        self.assertEqual(qmlp.mlx.quantized_linear(x[:0, 0, :64], packed).shape, (0, 24))
        sliced = qmlp.mlx.QuantizedTensor(*(mx.repeat(part, 2, axis=0)[::2] for part in tensor))
        self.assertSameBits(qmlp.mlx.quantized_linear(x[..., :64], qmlp.mlx.pack(sliced)),
                            qmlp.mlx.quantized_linear(x[..., :64], packed))

    def test_dense(self):
        w = mx.random.normal((40, 96)).astype(mx.bfloat16)
        packed = qmlp.mlx.pack(w)
        x = mx.random.normal((3, 96)).astype(mx.bfloat16)
        self.assertNear(qmlp.mlx.quantized_linear(x, packed), x @ w.T, 0.2)
        self.assertSameBits(qmlp.mlx.unpack(packed)[0], w)
        # Packed for a narrower type, and met by one that promotes to the weight's own.
        for dtype in (mx.float32, mx.float16):
            stored = w.astype(dtype)
            packed = qmlp.mlx.pack(stored, activation="bf16")
            self.assertSameBits(qmlp.mlx.unpack(packed)[0], stored)
            self.assertSameBits(qmlp.mlx.quantized_linear(x, packed),
                                qmlp.mlx.quantized_linear(x.astype(mx.float32), qmlp.mlx.pack(stored)))
            self.assertSameBits(qmlp.mlx.unpack(packed)[0], stored)

    def test_unpack(self):
        for bits, group, dtype in itertools.product((2, 3, 4, 5, 6, 8), (32, 128),
                                                    TYPES.values()):
            tensor = self.weight(37, 256, bits, group, dtype)
            packed = qmlp.mlx.pack(tensor, activation="f32")
            for mine, theirs in zip(qmlp.mlx.unpack(packed), tensor):
                self.assertTrue(mx.array_equal(mine, theirs).item())
            ids = mx.array([[3, 36], [0, -1]])
            from qmlp.mlx._load import native

            for mine, theirs in zip(native.unpack(packed, ids, None), tensor):
                self.assertTrue(mx.array_equal(mine, theirs[ids]).item())
            # of another type: packed again from what the first form holds
            for x_type in TYPES.values():
                x = mx.random.normal((2, 256)).astype(x_type)
                self.assertSameBits(qmlp.mlx.quantized_linear(x, packed),
                                    qmlp.mlx.quantized_linear(x, qmlp.mlx.pack(tensor)))
            for mine, theirs in zip(qmlp.mlx.unpack(packed), tensor):
                self.assertTrue(mx.array_equal(mine, theirs).item())

    def test_weights_that_round_twice_keep_their_arrays(self):
        # 5-bit f16 codes that the fast decoding would round wrongly (docs/numerics.md section 2).
        codes, scales, biases = self.weight(16, 32, 5, 32, mx.float16)
        scales = mx.full(scales.shape, 565 * 2.0**-24, mx.float16)
        biases = mx.full(biases.shape, 2.0, mx.float16)
        tensor = qmlp.mlx.QuantizedTensor(codes, scales, biases, 5, 32)
        packed = qmlp.mlx.pack(tensor)
        self.assertGreater(packed.nbytes, 16 * 32 * 2)  # decoded floats and the arrays
        for mine, theirs in zip(qmlp.mlx.unpack(packed), tensor):
            self.assertTrue(mx.array_equal(mine, theirs).item())
        x = mx.eye(32).astype(mx.float16)
        want = qmlp.dequantize(tensor)
        self.assertSameBits(qmlp.mlx.quantized_linear(x, packed), mx.contiguous(want.T))
        # A form that has the codes stays when one that has not is made from it.
        packed = qmlp.mlx.pack(tensor, activation="f32")
        self.assertSameBits(qmlp.mlx.quantized_linear(x, packed), mx.contiguous(want.T))
        for mine, theirs in zip(qmlp.mlx.unpack(packed), tensor):
            self.assertTrue(mx.array_equal(mine, theirs).item())

    def test_refusals(self):
        packed = qmlp.mlx.pack(self.weight(16, 64))
        both = qmlp.mlx.pack(self.weight(16, 64), self.weight(16, 64))
        x = mx.zeros((2, 64))
        codes, scales, biases = self.weight(16, 64)
        tensor = qmlp.mlx.QuantizedTensor
        for call, kind, text in (
                (lambda: qmlp.mlx.quantized_linear(x[:, :32], packed), ValueError, "[2, 32]"),
                (lambda: qmlp.mlx.quantized_linear(x.astype(mx.int32), packed), ValueError, "int32"),
                (lambda: qmlp.mlx.quantized_linear(mx.array(1.0), packed), ValueError, "[..., 64]"),
                (lambda: qmlp.mlx.quantized_linear(x, both), ValueError, "holds 2 arrays"),
                (lambda: qmlp.mlx.fused_swiglu(x, packed), ValueError, "holds 1 arrays"),
                (lambda: qmlp.mlx.fused_mlp(x, both, packed), ValueError, "down takes 64"),
                (lambda: qmlp.mlx.quantized_linear(x, packed, linear_bias=x[0]), ValueError,
                 "linear_bias is [64]"),
                (lambda: qmlp.mlx.pack("w"), TypeError, "weight is a str"),
                (lambda: qmlp.mlx.pack(mx.zeros((4, 4, 64))), ValueError, "needs two axes"),
                (lambda: qmlp.mlx.pack(tensor(codes.astype(mx.int32), scales, biases)), ValueError,
                 "needs uint32"),
                (lambda: qmlp.mlx.pack(self.weight(16, 64), self.weight(17, 64)), ValueError,
                 "need one shape"),
        ):
            with self.assertRaises(kind) as caught:
                mx.eval(call())
            self.assertIn(text, str(caught.exception))


class SmallOps(MlxTest):
    """RMSNorm and RoPE with MLX's roundings; sums and sines may differ in the last bits of f32."""

    def setUp(self):
        super().setUp()
        from qmlp.mlx._load import native

        self.native = native

    def test_rms_norm(self):
        for dtype, unit in ((mx.float32, 2.0**-20), (mx.float16, 2.0**-9), (mx.bfloat16, 2.0**-6)):
            for shape in ((1, 1, 576), (3, 5, 67), (64,), (2, 0, 8)):
                x = mx.random.normal(shape).astype(dtype) * 3
                w = mx.random.normal(shape[-1:]).astype(dtype)
                got, want = self.native.rms_norm(x, w, 1e-5, None), mx.fast.rms_norm(x, w, 1e-5)
                self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                if x.size:
                    off = mx.abs((got - want).astype(mx.float32))
                    bound = unit * mx.abs(want.astype(mx.float32)) + 1e-9
                    self.assertTrue(mx.all(off <= bound).item())
        x, w = mx.random.normal((4, 64)), mx.random.normal((64,))
        many = self.native.rms_norm(x, w, 1e-5, None)
        self.assertSameBits(self.native.rms_norm(x[2], w, 1e-5, None), many[2])
        # another type of weight, and derivatives, are MLX's
        self.assertEqual(self.native.rms_norm(x.astype(mx.float16), w, 1e-5, None).dtype, mx.float32)
        f = lambda v, u: self.native.rms_norm(v, u, 1e-5, None).square().sum()
        g = lambda v, u: mx.fast.rms_norm(v, u, 1e-5).square().sum()
        for mine, theirs in zip(mx.grad(f, argnums=(0, 1))(x, w), mx.grad(g, argnums=(0, 1))(x, w)):
            self.assertNear(mine, theirs, 1e-4)
        self.assertNear(mx.vmap(lambda v: self.native.rms_norm(v, w, 1e-5, None))(x), many, 1e-6)

    def test_dequantize_rows(self):
        mx.random.seed(4)
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            for bits in (2, 3, 4, 5, 6, 8):
                for group in (32, 64, 128):
                    w = (mx.random.normal((70, 256)) * mx.exp(mx.random.normal((70, 1)) * 3))
                    parts = mx.quantize(w.astype(dtype), group_size=group, bits=bits)
                    for shape in ((70,), (7, 10), (1, 1, 70)):
                        rows = [part.reshape(*shape, -1) for part in parts]
                        got = self.native.dequantize_rows(*rows, bits, group, None)
                        want = mx.dequantize(*rows, group_size=group, bits=bits)
                        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                        self.assertSameBits(got, want)
        f = lambda s: self.native.dequantize_rows(parts[0], s, parts[2], 8, 128, None).square().sum()
        g = lambda s: mx.dequantize(parts[0], s, parts[2], group_size=128, bits=8).square().sum()
        self.assertTrue(mx.array_equal(mx.grad(f)(parts[1]), mx.grad(g)(parts[1])).item())
        compiled = mx.compile(lambda *a: self.native.dequantize_rows(*a, 8, 128, None), shapeless=True)
        for count in (70, 3):
            rows = [part[:count] for part in parts]
            self.assertSameBits(compiled(*rows), mx.dequantize(*rows, group_size=128, bits=8))

    def test_rope(self):
        from qmlp.mlx._modules import rope_frequencies

        import mlx.nn as nn

        for dims, traditional, base, scale in ((64, False, 10000.0, 1.0), (32, True, 500000.0, 0.25),
                                               (48, False, 100.0, 1.0)):
            module = nn.RoPE(dims, traditional=traditional, base=base, scale=scale)
            frequencies = rope_frequencies(module)
            mine = lambda v, offset: self.native.rope(v, frequencies, dims, traditional, base, scale,
                                                      offset, None)
            for dtype, tolerance in ((mx.float32, 1e-4), (mx.float16, 4e-3), (mx.bfloat16, 3e-2)):
                x = mx.random.normal((2, 7, 3, 64)).astype(dtype)
                for view in (x, x.transpose(0, 2, 1, 3), x[:, :1], x[..., :64:1]):
                    for offset in (0, 5, 1000):
                        got, want = mine(view, offset), module(view, offset=offset)
                        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
                        self.assertNear(got, want, tolerance)
            x = mx.random.normal((1, 2, 3, 64))
            self.assertNear(mx.grad(lambda v: (mine(v, 3) * x).sum())(x),
                            mx.grad(lambda v: (module(v, offset=3) * x).sum())(x), 1e-4)
            # one position has the bits of many
            self.assertSameBits(mine(x[:, :, 2:], 7), mine(x, 5)[:, :, 2:])


class Graphs(MlxTest):
    def test_80_deep_without_eval(self):
        packed = qmlp.mlx.pack(self.weight(128, 128))
        mlp = (qmlp.mlx.pack(self.weight(256, 128), self.weight(256, 128, 8)),
               qmlp.mlx.pack(self.weight(128, 256, 3)))

        def step(h):
            h = h + qmlp.mlx.quantized_linear(h, packed) * 0.05
            return mx.fast.rms_norm(h + qmlp.mlx.fused_mlp(h, *mlp) * 0.01, None, 1e-5)

        x = mx.random.normal((4, 128))
        lazy, eager = x, x
        for _ in range(80):
            lazy = step(lazy)
            eager = step(eager)
            mx.eval(eager)
        self.assertSameBits(lazy, eager)
        self.assertTrue(mx.all(mx.isfinite(lazy)).item())

    def test_compile(self):
        packed = qmlp.mlx.pack(self.weight(64, 64))
        both = qmlp.mlx.pack(self.weight(64, 64), self.weight(64, 64, 2))

        def f(x):
            for _ in range(3):
                x = qmlp.mlx.quantized_linear(x, packed, residual=x) * 0.125
                x = qmlp.mlx.fused_swiglu(x, both) + qmlp.mlx.quantized_linear(x, packed)
            return x

        for shapeless in (False, True):
            compiled = mx.compile(f, shapeless=shapeless)
            for shape in ((3, 64), (7, 64), (1, 64)):
                x = mx.random.normal(shape) * 0.1
                # MLX's compiled elementwise code may contract; one op of ours at a time is exact.
                self.assertNear(compiled(x), f(x), 1e-5)
            only = mx.compile(lambda v: qmlp.mlx.quantized_linear(v, packed), shapeless=shapeless)
            for shape in ((3, 64), (9, 64)):
                x = mx.random.normal(shape)
                self.assertSameBits(only(x), qmlp.mlx.quantized_linear(x, packed))

    def test_a_failed_task_raises_and_the_stream_goes_on(self):
        packed = qmlp.mlx.pack(self.weight(64, 64))
        f = mx.compile(lambda x, r: qmlp.mlx.quantized_linear(x, packed, residual=r),
                       shapeless=True)
        mx.eval(f(mx.ones((3, 64)), mx.ones((3, 64))))
        with self.assertRaisesRegex(RuntimeError, r"residual is \[3, 64\], needs \[5, 64\]"):
            mx.eval(f(mx.ones((5, 64)), mx.ones((3, 64))))
        x, r = mx.random.normal((4, 64)), mx.random.normal((4, 64))
        self.assertSameBits(f(x, r), qmlp.mlx.quantized_linear(x, packed, residual=r))

    def test_equal_calls_are_one(self):
        packed = qmlp.mlx.pack(self.weight(64, 64), activation="f32")
        f = mx.compile(lambda x: qmlp.mlx.quantized_linear(x, packed)
                       + qmlp.mlx.quantized_linear(x, packed))
        x = mx.random.normal((2, 64))
        mx.eval(f(x))
        qmlp.reset_dispatch_counts()
        mx.eval(f(x))
        self.assertEqual(sum(qmlp.dispatch_counts().values()), 1)

    def test_worker_threads(self):
        packed = qmlp.mlx.pack(self.weight(256, 256))
        inputs = [mx.random.normal((3, 256)) for _ in range(6)]
        want = [numpy.array(qmlp.mlx.quantized_linear(x, packed)) for x in inputs]
        given = [numpy.array(x) for x in inputs]
        wrong = []

        def work(i):
            try:
                stream = mx.new_stream(mx.cpu)
                for _ in range(20):
                    with mx.stream(stream):
                        y = qmlp.mlx.quantized_linear(mx.array(given[i]), packed)
                        if not (numpy.array(y) == want[i]).all():
                            wrong.append(i)
            except Exception as error:  # a thread's exception would be lost
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_async_eval(self):
        packed = qmlp.mlx.pack(self.weight(64, 64))
        x = mx.random.normal((2, 64))
        y = x
        for _ in range(20):
            y = qmlp.mlx.quantized_linear(y, packed) * 0.1
            mx.async_eval(y)
        z = x
        for _ in range(20):
            z = qmlp.mlx.quantized_linear(z, packed) * 0.1
        self.assertSameBits(y, z)

    def test_a_deep_copy_shares_the_weight(self):
        packed = qmlp.mlx.pack(self.weight(64, 64))
        copied = copy.deepcopy(packed)
        x = mx.random.normal((2, 64))
        self.assertSameBits(qmlp.mlx.quantized_linear(x, copied),
                            qmlp.mlx.quantized_linear(x, packed))


class Transforms(MlxTest):
    def test_vjp_of_linear_is_mlx(self):
        for dtype in TYPES.values():
            codes, scales, biases = tensor = self.weight(96, 64, 8, 64, dtype)
            packed = qmlp.mlx.pack(tensor)
            x = mx.random.normal((2, 5, 64)).astype(dtype)
            bias = mx.random.normal((96,)).astype(dtype)
            residual = mx.random.normal((2, 5, 96)).astype(dtype)
            c = mx.random.normal((2, 5, 96)).astype(dtype)
            _, mine = mx.vjp(lambda a, b, r: qmlp.mlx.quantized_linear(
                a, packed, linear_bias=b, residual=r), [x, bias, residual], [c])
            _, theirs = mx.vjp(lambda a, b, r: r + (mx.quantized_matmul(
                a, codes, scales, biases, bits=8) + b), [x, bias, residual], [c])
            self.assertSameBits(mine[0], theirs[0])
            self.assertNear(mine[1], theirs[1], 1e-5 if dtype == mx.float32 else 0.2)
            self.assertSameBits(mine[2], theirs[2])

    def test_derivatives_of_swiglu_and_mlp(self):
        gate, up, down = self.weight(64, 64), self.weight(64, 64, 8), self.weight(32, 64, 6)
        gate_up, packed_down = qmlp.mlx.pack(gate, up), qmlp.mlx.pack(down)
        x, b = mx.random.normal((3, 64)) * 0.3, mx.random.normal((64,))
        d, r = mx.random.normal((32,)), mx.random.normal((3, 32))
        qmm = lambda v, t: mx.quantized_matmul(v, *t, group_size=t.group_size, bits=t.bits)

        def plain_swiglu(v, gb, ub):
            g = qmm(v, gate) + gb
            return g * mx.sigmoid(g) * (qmm(v, up) + ub)

        def mine_mlp(v, gb, ub, db, res):
            return qmlp.mlx.fused_mlp(v, gate_up, packed_down, gate_bias=gb, up_bias=ub,
                                      down_bias=db, residual=res)

        cases = ((lambda v, gb, ub: qmlp.mlx.fused_swiglu(v, gate_up, gate_bias=gb, up_bias=ub),
                  plain_swiglu, [x, b, -b]),
                 (mine_mlp, lambda v, gb, ub, db, res: res + (qmm(plain_swiglu(v, gb, ub), down) + db),
                  [x, b, -b, d, r]))
        for mine, plain, inputs in cases:
            c = mx.random.normal(plain(*inputs).shape)
            tangents = [mx.random.normal(v.shape) for v in inputs]
            for (a_out, a), (b_out, b_) in ((mx.vjp(mine, inputs, [c]), mx.vjp(plain, inputs, [c])),
                                            (mx.jvp(mine, inputs, tangents),
                                             mx.jvp(plain, inputs, tangents))):
                self.assertNear(a_out[0], b_out[0], 1e-3)
                self.assertEqual(len(a), len(b_))
                for left, right in zip(a, b_):
                    scale = 1 + mx.max(mx.abs(right)).item()
                    self.assertNear(left / scale, right / scale, 1e-5)
            # one argument alone, and through compile
            g = mx.grad(lambda v: (mine(v, *inputs[1:]) * c).sum())
            h = mx.grad(lambda v: (plain(v, *inputs[1:]) * c).sum())
            self.assertNear(g(x), h(x), 1e-3)
            self.assertNear(mx.compile(g)(x), h(x), 1e-3)

    def test_vmap(self):
        tensor = self.weight(32, 64)
        packed, both = qmlp.mlx.pack(tensor), qmlp.mlx.pack(tensor, self.weight(32, 64, 8))
        down = qmlp.mlx.pack(self.weight(64, 32, 4, 32))
        x = mx.random.normal((3, 5, 64))
        bias, residual = mx.random.normal((32,)), mx.random.normal((3, 5, 32))
        f = lambda v: qmlp.mlx.quantized_linear(v, packed)
        self.assertSameBits(mx.vmap(f)(x), f(x))
        self.assertSameBits(mx.vmap(f, in_axes=1, out_axes=1)(x), f(x))
        self.assertSameBits(mx.vmap(mx.vmap(f))(x), f(x))
        g = lambda v, r: qmlp.mlx.quantized_linear(v, packed, linear_bias=bias, residual=r)
        self.assertSameBits(mx.vmap(g)(x, residual), g(x, residual))
        self.assertSameBits(mx.vmap(g, in_axes=(0, None))(x, residual[0]),
                            mx.stack([g(x[i], residual[0]) for i in range(3)]))
        self.assertSameBits(mx.vmap(g, in_axes=(None, 0))(x[0], residual),
                            mx.stack([g(x[0], residual[i]) for i in range(3)]))
        many = mx.random.normal((3, 32))
        k = lambda v, b: qmlp.mlx.quantized_linear(v, packed, linear_bias=b)
        self.assertSameBits(mx.vmap(k)(x, many), mx.stack([k(x[i], many[i]) for i in range(3)]))
        s = lambda v: qmlp.mlx.fused_mlp(v, both, down, residual=v)
        self.assertSameBits(mx.vmap(s)(x), s(x))
        with self.assertRaises(ValueError):
            mx.eval(mx.vmap(lambda v, b: qmlp.mlx.fused_swiglu(v, both, gate_bias=b))(x, many))


class Devices(MlxTest):
    def test_a_build_of_mlx_without_gpus(self):
        native = importlib.import_module("qmlp.mlx._load").native
        self.assertEqual(native.device(), "cpu")
        self.assertEqual(native.gpu_mismatch(), "")
        self.assertEqual(native.gpu_refusal(), "this mlx has no CUDA backend")


class Import(unittest.TestCase):
    def message(self, setup):
        code = ("import sys, types\n" + setup + "\ntry:\n    import qmlp.mlx\n"
                "except ImportError as error:\n    print(error)\nelse:\n    print('imported')\n"
                "import qmlp; qmlp.num_threads()")
        text = support.python(code)
        self.assertEqual(text.count("\n"), 1, text)
        return text

    def test_one_sentence(self):
        self.assertEqual(self.message("pass"), "imported\n")
        other = "b = types.ModuleType('b'); b.MLX = '0.31.0'; b.NANOBIND = '2.10.2'\n"
        text = self.message(other + "sys.modules['qmlp._mlx_build'] = b")
        self.assertRegex(text, r"built for mlx 0\.31\.0, this is mlx 0\.\d+\.\d+; pip install 'qmlp\[mlx\]'")
        self.assertIn("qmlp.mlx needs mlx", self.message("sys.modules['mlx.core'] = None"))
        text = self.message(
            "import qmlp._mlx_build as b; b.NANOBIND = '2.15.0'\n"
            "m = types.ModuleType('qmlp._mlx'); m.__spec__ = type(sys.__spec__)('qmlp._mlx', None)\n"
            "def probe(a): raise TypeError('incompatible function arguments')\n"
            "m.probe = probe; sys.modules['qmlp._mlx'] = m; import qmlp; qmlp._mlx = m")
        self.assertIn("nanobind 2.15.0", text)
        text = self.message(
            "import mlx.core, qmlp, qmlp._mlx as real\n"
            "m = types.ModuleType('qmlp._mlx'); m.__dict__.update(vars(real))\n"
            "m.gpu_mismatch = lambda: 'this mlx lacks something'\n"
            "sys.modules['qmlp._mlx'] = m; qmlp._mlx = m")
        self.assertRegex(text, r"cannot use this mlx [0-9.]+: this mlx lacks something; pip install")


if __name__ == "__main__":
    unittest.main()
