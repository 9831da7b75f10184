"""qmlp on CUDA tensors, against the CPU's `tensor` verifier to the bit. Needs a CUDA device, torch and
NumPy; CuPy and JAX parts where those are. Run by tools/check_torch.sh; without a device nothing here
runs, and that is said."""
import asyncio
import itertools
import os
import threading
import unittest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy
import torch

import qmlp
import qmlp.torch

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
FORMATS = list(itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)))
COUNTS = (0, 1, 3, 8, 16, 33, 128)
CUDA = "cuda:0"


def setUpModule():
    if not torch.cuda.is_available():
        raise unittest.SkipTest("not run: no CUDA device")
    support = qmlp.supports(qmlp.LinearProblem(N=64, K=64), "cuda")
    if not support:
        raise AssertionError(f"a CUDA device is here, the package cannot use it: {support}")


def same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.cpu().contiguous().view(torch.int16), b.cpu().contiguous().view(torch.int16))


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(seed, N, K, bits=4, group=64, dtype=torch.bfloat16, scale_dtype=None):
    return qmlp.quantize(normal(seed, N, K, dtype=dtype) * K ** -0.5, bits=bits, group_size=group,
                         scale_dtype=scale_dtype)


def to_cuda(tensor):
    return qmlp.QuantizedTensor(*(part.to(CUDA) for part in tensor), tensor.bits, tensor.group_size)


def both(*tensors, **options):
    """The weight packed for the GPU, and for the CPU's verifier of the GPU's contract."""
    gpu = qmlp.pack(*tensors, device=CUDA, **options)
    verifier = {**options, "accumulation": "tensor", "segments": gpu.plan.segments}
    return gpu, qmlp.pack(*tensors, **verifier)


class Cuda(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()

    def assertSame(self, got, want):
        self.assertEqual(got.device.type, "cuda")
        self.assertEqual((got.dtype, got.shape), (want.dtype, want.shape))
        different = (got.cpu().view(torch.int16) != want.cpu().view(torch.int16)).sum().item()
        self.assertEqual(different, 0, f"of {want.numel()}")

    def assertRefuses(self, call, kind, text):
        with self.assertRaises(kind) as caught:
            call()
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class Bits(Cuda):
    """A row's bits depend on no other row, so one call of the verifier answers for every M."""

    def test_linear_formats(self):
        for seed, (name, (bits, group)) in enumerate(itertools.product(TYPES, FORMATS)):
            N, K = 97 + 2 * (seed % 20), group * (3 + seed % 3)
            gpu, cpu = both(weight(seed, N, K, bits, group, TYPES[name]), activation=name)
            x = normal(seed + 100, 128, K, dtype=TYPES[name])
            want, on_gpu = qmlp.quantized_linear(x, cpu), x.to(CUDA)
            for M in COUNTS:
                with self.subTest(type=name, bits=bits, group=group, M=M):
                    self.assertSame(qmlp.quantized_linear(on_gpu[:M], gpu), want[:M])

    def test_swiglu_formats(self):
        for seed, (name, (bits, group)) in enumerate(itertools.product(TYPES, FORMATS)):
            up_bits, up_group = FORMATS[(seed * 7 + 5) % len(FORMATS)]
            N, K = 83 + 2 * (seed % 20), 128 * (2 + seed % 2)
            dtype = TYPES[name]
            precision = ("match", "wide")[seed % 3 == 2]
            gpu, cpu = both(weight(seed, N, K, bits, group, dtype),
                            weight(seed + 50, N, K, up_bits, up_group, dtype), activation=name,
                            precision=precision)
            x = normal(seed + 100, 128, K, dtype=dtype)
            want, on_gpu = qmlp.fused_swiglu(x, cpu), x.to(CUDA)
            for M in COUNTS:
                with self.subTest(type=name, gate=(bits, group), up=(up_bits, up_group), M=M,
                                  precision=precision):
                    self.assertSame(qmlp.fused_swiglu(on_gpu[:M], gpu), want[:M])

    def test_epilogues(self):
        for name, dtype in TYPES.items():
            gate, up = weight(1, 161, 256, 4, 64, dtype), weight(2, 161, 256, 8, 32, dtype)
            # K = 161 is no multiple of a group: the down projection is dense
            down = normal(3, 75, 161, dtype=dtype) * 0.1
            (gu, gu_cpu), (dn, dn_cpu) = both(gate, up, activation=name), both(down)
            one, one_cpu = both(gate, activation=name)
            b = [normal(10 + i, n, dtype=dtype) for i, n in enumerate((161, 161, 75))]
            B = [bias.to(CUDA) for bias in b]
            for M in COUNTS:
                x, r = normal(20, M, 256, dtype=dtype), normal(21, M, 75, dtype=dtype)
                r1 = normal(22, M, 161, dtype=dtype)
                X, R, R1 = x.to(CUDA), r.to(CUDA), r1.to(CUDA)
                with self.subTest(type=name, M=M):
                    want = qmlp.quantized_linear(x, one_cpu, linear_bias=b[0], residual=r1)
                    self.assertSame(
                        qmlp.quantized_linear(X, one, linear_bias=B[0], residual=R1), want)
                    # in place: out is the residual
                    self.assertIs(qmlp.quantized_linear(X, one, linear_bias=B[0], residual=R1,
                                                        out=R1), R1)
                    self.assertSame(R1, want)
                    tap, tap_cpu = torch.empty_like(R1), torch.empty_like(r1)
                    self.assertSame(
                        qmlp.fused_swiglu(X, gu, gate_bias=B[0], up_bias=B[1], gate_tap=tap),
                        qmlp.fused_swiglu(x, gu_cpu, gate_bias=b[0], up_bias=b[1],
                                          gate_tap=tap_cpu))
                    self.assertSame(tap, tap_cpu)
                    self.assertSame(
                        qmlp.fused_mlp(X, gu, dn, gate_bias=B[0], up_bias=B[1], down_bias=B[2],
                                       residual=R),
                        qmlp.fused_mlp(x, gu_cpu, dn_cpu, gate_bias=b[0], up_bias=b[1],
                                       down_bias=b[2], residual=r))
                    hidden = qmlp.fused_swiglu(X, gu)
                    self.assertSame(qmlp.fused_mlp(X, gu, dn),
                                    qmlp.quantized_linear(hidden, dn).cpu())

    def test_layouts(self):
        gpu, cpu = both(weight(1, 97, 128))
        base = normal(2, 6, 4, 256, dtype=torch.bfloat16)
        bases = base.to(CUDA)
        views = (lambda t: t[..., :128], lambda t: t[::2, :, 128:],
                 lambda t: t.transpose(0, 1)[..., :128], lambda t: t[..., ::2],
                 lambda t: t[0, 0, :128].expand(3, 128), lambda t: t[:, 1:2, 1:129],
                 lambda t: t[:, 0, :128].t().contiguous().t(), lambda t: t[0, 0, :128],
                 lambda t: t[:0, :, :128], lambda t: t[..., 3:131], lambda t: t[:1, :1, :128])
        for i, view in enumerate(views):
            with self.subTest(view=i):
                want = qmlp.quantized_linear(view(base).contiguous(), cpu)
                self.assertSame(qmlp.quantized_linear(view(bases), gpu), want)
        # out with a row stride; what lies between its rows stays
        room = torch.full((5, 200), 7, dtype=torch.bfloat16, device=CUDA)
        out = room[:, 1:98]
        self.assertIs(qmlp.quantized_linear(bases[:5, 0, :128], gpu, out=out), out)
        self.assertSame(out.contiguous(), qmlp.quantized_linear(base[:5, 0, :128], cpu))
        self.assertTrue((room[:, :1] == 7).all() and (room[:, 98:] == 7).all())
        # residual with strides
        residual = normal(5, 97, 5, dtype=torch.bfloat16).t()
        self.assertSame(
            qmlp.quantized_linear(bases[:5, 0, :128], gpu, residual=residual.to(CUDA)),
            qmlp.quantized_linear(base[:5, 0, :128], cpu, residual=residual))

    def test_scales_of_another_type_and_segments(self):
        tensor = weight(1, 97, 256, 5, 32, torch.float32, "f16")
        gpu, cpu = both(tensor, activation="bf16")
        x = normal(2, 33, 256, dtype=torch.bfloat16)
        self.assertSame(qmlp.quantized_linear(x.to(CUDA), gpu), qmlp.quantized_linear(x, cpu))
        long = weight(3, 65, 2048)
        x = normal(4, 33, 2048, dtype=torch.bfloat16)
        for segments in (1, 2, 4, 8):
            gpu, cpu = both(long, segments=segments)
            self.assertEqual(gpu.plan.segments, segments)
            for M in (1, 8, 33):
                with self.subTest(segments=segments, M=M):
                    self.assertSame(qmlp.quantized_linear(x[:M].to(CUDA), gpu),
                                    qmlp.quantized_linear(x[:M], cpu))

    def test_llama_shapes(self):
        gate, up = weight(1, 14336, 4096), weight(2, 14336, 4096, 8)
        gpu, cpu = both(gate, up)
        x = normal(3, 4, 4096, dtype=torch.bfloat16)
        self.assertSame(qmlp.fused_swiglu(x.to(CUDA), gpu), qmlp.fused_swiglu(x, cpu))
        many = normal(4, 1024, 4096, dtype=torch.bfloat16)
        many[1000:1004] = x
        self.assertSame(qmlp.fused_swiglu(many.to(CUDA), gpu)[1000:1004],
                        qmlp.fused_swiglu(x, cpu))


class Weights(Cuda):
    def test_pack_from_the_device(self):
        for bits, group in ((4, 64), (3, 32), (8, 128)):
            tensor, up = weight(1, 97, 256, bits, group), weight(2, 97, 256, 6, 64)
            x = normal(3, 5, 256, dtype=torch.bfloat16).to(CUDA)
            before = torch.cuda.current_stream()
            there = qmlp.pack(to_cuda(tensor))
            self.assertEqual((there.device, there._device), ("cuda:0", (1, 0)))
            self.assertEqual(torch.cuda.current_stream(), before)
            self.assertSame(qmlp.quantized_linear(x, there),
                            qmlp.quantized_linear(x, qmlp.pack(tensor, device=CUDA)).cpu())
            self.assertSame(qmlp.fused_swiglu(x, qmlp.pack(to_cuda(tensor), to_cuda(up))),
                            qmlp.fused_swiglu(x, qmlp.pack(tensor, up, device=CUDA)).cpu())
        dense = normal(4, 33, 48, dtype=torch.float16)
        y = normal(5, 2, 48, dtype=torch.float16).to(CUDA)
        self.assertSame(qmlp.quantized_linear(y, qmlp.pack(dense.to(CUDA))),
                        qmlp.quantized_linear(y, qmlp.pack(dense, device="cuda")).cpu())
        # written on a side stream that is still busy when pack is called
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            late = to_cuda(tensor)
            packed = qmlp.pack(late)
        self.assertSame(qmlp.quantized_linear(x, packed),
                        qmlp.quantized_linear(x, qmlp.pack(tensor, device=CUDA)).cpu())

    def test_part_decode_unpack(self):
        gate, up = weight(1, 97, 256, 3, 32), weight(2, 97, 256, 8, 64)
        packed = qmlp.pack(gate, up, device=CUDA)
        x = normal(3, 5, 256, dtype=torch.bfloat16).to(CUDA)
        tap = torch.empty(5, 97, dtype=torch.bfloat16, device=CUDA)
        qmlp.fused_swiglu(x, packed, gate_tap=tap)
        self.assertSame(qmlp.quantized_linear(x, packed.part(0)), tap.cpu())
        for index, tensor in enumerate((gate, up)):
            part = packed.part(index)
            self.assertEqual(part.device, "cuda:0")
            exact = qmlp.dequantize(tensor, dtype="bf16").float().numpy()
            self.assertTrue((packed.part(index).decode_row(5).astype(numpy.float32)
                             == exact[5]).all())
            host = packed.unpack(index)
            self.assertTrue((host.codes == tensor.codes.view(torch.int32).numpy().view("u4")).all())
            there = packed.unpack(index, like=x)
            self.assertEqual(there.codes.device.type, "cuda")
            for got, want in zip(there, tensor):
                self.assertTrue(torch.equal(got.cpu().view(torch.int16), want.view(torch.int16)))

    def test_quantize_and_dequantize(self):
        w = normal(1, 2, 9, 128, dtype=torch.bfloat16)
        here, there = qmlp.quantize(w, bits=5), qmlp.quantize(w.to(CUDA), bits=5)
        for a, b in zip(here, there):
            self.assertEqual((b.device.type, b.dtype), ("cuda", a.dtype))
            self.assertTrue(torch.equal(a.view(torch.int16), b.cpu().view(torch.int16)))
        back = qmlp.dequantize(there)
        self.assertEqual(back.device.type, "cuda")
        self.assertTrue(same(back, qmlp.dequantize(here)))

    def test_plans(self):
        problem = qmlp.LinearProblem(N=4096, K=4096, M_max=64)
        for name in ("cuda", "cuda:0"):
            self.assertTrue(qmlp.supports(problem, name))
            plan = qmlp.Plan(problem, device=name)
            self.assertTrue(plan.can_run)
            self.assertEqual(plan.accumulation, "tensor")
            self.assertIn(plan.kernel_name(1), dict(qmlp.explain(problem, name)))
        beyond = torch.cuda.device_count()
        self.assertRefuses(lambda: qmlp.supports(problem, f"cuda:{beyond}"), ValueError,
                           f"CUDA device {beyond} does not exist")
        self.assertEqual(qmlp.supports(qmlp.LinearProblem(N=4, K=100), "cuda").field, "K")

    def test_pools_give_way(self):
        # All memory is torch's, unused: packing has to get some back.
        free, _ = torch.cuda.mem_get_info()
        block = torch.empty(free - (16 << 20), dtype=torch.uint8, device=CUDA)
        del block
        try:
            packed = qmlp.pack(weight(1, 8192, 4096, 8), device=CUDA)
            self.assertGreater(packed.nbytes, 32 << 20)
        finally:
            torch.cuda.empty_cache()


class Streams(Cuda):
    def setUp(self):
        super().setUp()
        self.gate_up = qmlp.pack(weight(1, 1536, 576), weight(2, 1536, 576, 8), device=CUDA)
        self.down = qmlp.pack(weight(3, 576, 1536, 6, 32), device=CUDA)
        self.addCleanup(torch.cuda.synchronize)

    def mlp(self, x):
        return qmlp.fused_mlp(x, self.gate_up, self.down, residual=x)

    def inputs(self, count, M):
        return [normal(seed, M, 576, dtype=torch.bfloat16).to(CUDA) for seed in range(count)]

    def test_calls_do_not_wait(self):
        for M in (1, 64):
            x = self.inputs(1, M)[0]
            want = self.mlp(x).cpu()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                busy = torch.cuda.Event()
                torch.cuda._sleep(2_000_000_000)
                busy.record()
                got = self.mlp(x)
                hidden = qmlp.fused_swiglu(x, self.gate_up)
                y = qmlp.quantized_linear(hidden, self.down)
                self.assertFalse(busy.query(), "the call waited for the device")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            self.assertSame(got, want)
            self.assertTrue(torch.isfinite(y).all().item())

    def test_side_streams(self):
        inputs = self.inputs(2, 33)
        want = [self.mlp(x).cpu() for x in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in inputs]
        for step in range(30):
            results = []
            for stream, x in zip(streams, inputs):
                with torch.cuda.stream(stream):
                    if step % 3 == 0:
                        torch.cuda._sleep(1_000_000)
                    # x is rewritten on this stream first: a call on another one would read zeros
                    mine = torch.zeros_like(x)
                    mine.copy_(x)
                    results.append(self.mlp(mine))
            for stream in streams:
                stream.synchronize()
            for got, right in zip(results, want):
                self.assertSame(got, right)

    def test_threads(self):
        # Threads whose first CUDA call is ours, and threads with a stream of their own; decode and
        # prefill kernels.
        inputs = [x for M in (1, 5, 12, 64) for x in self.inputs(2, M)]
        want = [self.mlp(x) for x in inputs]
        torch.cuda.synchronize()
        wrong = []

        def work(i):
            try:
                first = self.mlp(inputs[i]) if i % 2 == 0 else want[i]
                stream = torch.cuda.Stream() if i % 2 else torch.cuda.default_stream()
                with torch.cuda.stream(stream):
                    for step in range(100):
                        if not torch.equal(self.mlp(inputs[i]), want[i]):
                            wrong.append((i, step))
                if not torch.equal(first, want[i]):
                    wrong.append((i, "first"))
            except Exception as error:  # which a thread would only print
                wrong.append((i, repr(error)))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_asyncio(self):
        inputs = self.inputs(6, 3)
        want = [self.mlp(x).cpu() for x in inputs]

        async def run():
            return await asyncio.gather(*(asyncio.to_thread(self.mlp, x) for x in inputs))

        for got, right in zip(asyncio.run(run()), want):
            self.assertSame(got, right)

    def test_graph(self):
        for M in (1, 8, 64):
            x, other = self.inputs(2, M)
            want, want_other = self.mlp(self.mlp(x)).cpu(), self.mlp(self.mlp(other)).cpu()
            static = x.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.mlp(self.mlp(static))
            for source, right in ((x, want), (other, want_other), (x, want)):
                static.copy_(source)
                junk = torch.full((1 << 20,), float("nan"), device=CUDA)  # what replays may not read
                del junk
                graph.replay()
                torch.cuda.synchronize()
                self.assertSame(out, right)

    def test_graph_without_a_first_call(self):
        # A kernel that no call of the process has loaded yet.
        fresh, cpu = both(weight(9, 515, 384, 5, 128, torch.float16))
        x = normal(1, 40, 384, dtype=torch.float16).to(CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = qmlp.quantized_linear(x, fresh)
        graph.replay()
        self.assertSame(out, qmlp.quantized_linear(x.cpu(), cpu))

    def test_the_fast_path_is_taken(self):
        from qmlp import _torch_calls

        x = self.inputs(1, 3)[0]
        self.assertIsNotNone(_torch_calls.swiglu(x, self.gate_up, None, None, None, None))
        self.assertIsNotNone(_torch_calls.mlp(x, self.gate_up, self.down, None, None, None, x, None))
        wide = qmlp.fused_swiglu(x, self.gate_up)
        self.assertIsNotNone(_torch_calls.linear(wide, self.down, x[0], x, None))
        out = torch.empty_like(x)
        self.assertIs(_torch_calls.linear(wide, self.down, None, None, out), out)
        for odd in (wide.t().contiguous().t(), wide.half(), wide.cpu(), wide[:, :576], wide[0, 0],
                    wide.clone().requires_grad_()):
            self.assertIsNone(_torch_calls.linear(odd, self.down, None, None, None))
        self.assertIsNone(_torch_calls.linear(wide, self.gate_up, None, None, None))

    def test_what_a_tensor_says_besides_its_memory(self):
        gpu, _ = both(weight(1, 97, 256))
        x, b, r = (normal(i, *shape, dtype=torch.bfloat16).to(CUDA)
                   for i, shape in enumerate(((3, 256), (97,), (3, 97))))
        call = qmlp.quantized_linear
        want = call(x, gpu, linear_bias=b, residual=r).cpu()
        neg = lambda t: torch._neg_view(-t)
        self.assertSame(call(neg(x), gpu, linear_bias=b, residual=r), want)
        self.assertSame(call(x, gpu, linear_bias=neg(b), residual=neg(r)), want)
        self.assertRefuses(lambda: call(x, gpu, out=neg(r)), ValueError, "negative bit")
        out = torch.ones_like(r)
        lost = (torch.ones_like(r).requires_grad_() * out).sum()
        call(x, gpu, out=out)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            lost.backward()
        freed = b.clone()
        freed.untyped_storage().resize_(0)
        self.assertRefuses(lambda: call(x, gpu, linear_bias=freed), ValueError, "memory was freed")
        batch = torch.stack([x, -x])
        self.assertSame(torch.func.vmap(lambda t: call(t, gpu))(batch), call(batch, gpu).cpu())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            self.assertRefuses(lambda: call(dual, gpu), NotImplementedError, "forward-mode AD")


class Compile(Cuda):
    def setUp(self):
        super().setUp()
        self.layers = torch.nn.ModuleList([
            qmlp.torch.FusedMLP(
                qmlp.pack(weight(i, 384, 256), weight(i + 10, 384, 256, 8), device=CUDA),
                qmlp.pack(weight(i + 20, 256, 384, 6, 32), device=CUDA))
            for i in range(3)])
        self.head = qmlp.torch.QuantizedLinear(
            qmlp.pack(weight(30, 97, 256), device=CUDA), normal(31, 97, dtype=torch.bfloat16)).to(CUDA)

    def model(self, x):
        for layer in self.layers:
            x = layer(x, residual=x)
        return self.head(x)

    def test_modes(self):
        for options in ({}, {"dynamic": True}, {"mode": "reduce-overhead"}):
            torch._dynamo.reset()
            compiled = torch.compile(self.model, fullgraph=True, **options)
            with torch.no_grad():
                for M in (1, 7, 7, 1, 33, 7):
                    x = normal(M, M, 256, dtype=torch.bfloat16).to(CUDA)
                    with self.subTest(options=options, M=M):
                        self.assertSame(compiled(x).clone(), self.model(x).cpu())

    def test_plain_functions(self):
        packed = self.head.weight

        def call(x):
            return qmlp.quantized_linear(x * 2, packed) + 1

        x = normal(1, 5, 256, dtype=torch.bfloat16).to(CUDA)
        self.assertSame(torch.compile(call, fullgraph=True)(x), call(x).cpu())

    def test_opcheck(self):
        x = normal(1, 5, 256, dtype=torch.bfloat16).to(CUDA)
        bias = normal(2, 97, dtype=torch.bfloat16).to(CUDA)
        torch.library.opcheck(
            torch.ops.qmlp.quantized_linear.default, (x, self.head.number, bias, None))
        torch.library.opcheck(
            torch.ops.qmlp.fused_mlp.default,
            (x, *self.layers[0].numbers, None, None, None, x))

    def test_gradient(self):
        layer = self.layers[0]
        x = normal(1, 5, 256, dtype=torch.bfloat16).to(CUDA).requires_grad_()
        self.head(layer(x, residual=x)).sum().backward()
        dense = [qmlp.dequantize(weight(*args)).float().to(CUDA) for args in
                 ((0, 384, 256), (10, 384, 256, 8), (20, 256, 384, 6, 32), (30, 97, 256))]
        z = x.detach().float().requires_grad_()
        h = torch.nn.functional.silu(z @ dense[0].T) * (z @ dense[1].T)
        ((h @ dense[2].T + z) @ dense[3].T).sum().backward()
        error = (x.grad.float() - z.grad).norm() / z.grad.norm()
        self.assertLess(error.item(), 0.02)


class Others(Cuda):
    def test_cupy(self):
        try:
            import cupy
        except ImportError:
            self.skipTest("not run: no CuPy")
        gpu, cpu = both(weight(1, 97, 256, 4, 64, torch.float16), activation="f16")
        x = normal(2, 33, 256, dtype=torch.float16)
        want = qmlp.quantized_linear(x, cpu).numpy()
        y = qmlp.quantized_linear(cupy.asarray(x.numpy()), gpu)
        self.assertIsInstance(y, cupy.ndarray)
        self.assertTrue((y.get() == want).all())
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            mine = cupy.zeros((33, 512), "f2")
            mine[:, ::2] = cupy.asarray(x.numpy())
            z = qmlp.quantized_linear(mine[:, ::2], gpu)
            mine[:] = 7
        stream.synchronize()
        self.assertTrue((z.get() == want).all())
        room = cupy.full((33, 200), 7, "f2")
        out = room[:, 2:99]
        self.assertIs(qmlp.quantized_linear(cupy.asarray(x.numpy()), gpu, out=out), out)
        self.assertTrue((out.get() == want).all() and (room[:, :2].get() == 7).all())
        packed = qmlp.pack(qmlp.quantize(cupy.asarray(normal(1, 97, 256, dtype=torch.float16).numpy())
                                         * cupy.float16(1 / 16)))
        self.assertEqual(packed.device, "cuda:0")
        self.assertTrue((qmlp.quantized_linear(cupy.asarray(x.numpy()), packed).get() == want).all())
        self.assertIsInstance(packed.unpack(like=y).codes, cupy.ndarray)
        self.assertRefuses(
            lambda: qmlp.quantized_linear(cupy.asarray(x.numpy()), gpu,
                                          residual=torch.zeros(33, 97).half().to(CUDA)),
            TypeError, "give one library's")
        self.assertRefuses(lambda: qmlp.quantized_linear(cupy.asfortranarray(cupy.asarray(
            x.numpy())), gpu, out=cupy.empty((97, 33), "f2").T), ValueError, "out has strides")

    def test_jax(self):
        try:
            import jax

            if jax.default_backend() != "gpu":
                raise ImportError
        except ImportError:
            self.skipTest("not run: no JAX on a GPU")
        gpu, cpu = both(weight(1, 97, 256))
        x = normal(2, 33, 256, dtype=torch.bfloat16)
        want = qmlp.quantized_linear(x, cpu)
        for step in range(5):
            given = jax.numpy.asarray(x.float().numpy()).astype(jax.numpy.bfloat16) * 1
            y = qmlp.quantized_linear(given, gpu)
            self.assertIsInstance(y, jax.Array)
            back = numpy.asarray((y * 1).astype(jax.numpy.float32))
            self.assertTrue((back == want.float().numpy()).all())
        self.assertRefuses(lambda: qmlp.quantized_linear(given, gpu, out=y), ValueError, "read-only")

    def test_dlpack_protocol(self):
        """A library of its own: which stream it is asked for, and that its order is kept."""
        asked = []

        class Foreign:
            def __init__(self, inner, stream):
                self.inner, self.stream = inner, stream

            def __dlpack_device__(self):
                return self.inner.__dlpack_device__()

            def __dlpack__(self, *, stream=None, **options):
                asked.append(stream)
                with torch.cuda.stream(self.stream):
                    return self.inner.__dlpack__(stream=stream, **options)

        gpu, cpu = both(weight(1, 97, 256))
        x = normal(2, 33, 256, dtype=torch.bfloat16)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            inner = torch.zeros(33, 256, dtype=torch.bfloat16, device=CUDA)
            torch.cuda._sleep(20_000_000)
            inner.copy_(x.to(CUDA))
        y = qmlp.quantized_linear(Foreign(inner, side), gpu)
        self.assertEqual(len(asked), 1)
        self.assertSame(torch.as_tensor(y), qmlp.quantized_linear(x, cpu))

    def test_numpy_weights_for_a_gpu(self):
        w = normal(1, 97, 256).numpy()
        packed = qmlp.pack(qmlp.quantize(w, scale_dtype="f16"), activation="f16", device="cuda")
        x = normal(2, 3, 256, dtype=torch.float16)
        cpu = qmlp.pack(qmlp.quantize(w, scale_dtype="f16"), activation="f16",
                        accumulation="tensor", segments=packed.plan.segments)
        self.assertSame(qmlp.quantized_linear(x.to(CUDA), packed), qmlp.quantized_linear(x, cpu))


class Refusals(Cuda):
    def test_messages(self):
        tensor = weight(1, 96, 128)
        gpu, cpu = both(tensor)
        swiglu = qmlp.pack(tensor, weight(2, 96, 128), device=CUDA)
        down = qmlp.pack(weight(3, 64, 96, 4, 32))
        x = normal(4, 3, 128, dtype=torch.bfloat16).to(CUDA)
        out = torch.zeros(3, 96, dtype=torch.bfloat16, device=CUDA)
        call = qmlp.quantized_linear
        two = f"cuda:{torch.cuda.device_count()}"
        for run, kind, text in (
                (lambda: call(x.cpu(), gpu), ValueError,
                 "x is on cpu, the weight on cuda:0: need one device"),
                (lambda: call(x, cpu), ValueError,
                 "x is on cuda:0, the weight on cpu: need one device"),
                (lambda: call(x.cpu().float().numpy(), gpu), TypeError, "x is f32"),
                (lambda: call(x, gpu, residual=out.cpu()), ValueError,
                 "residual is on cpu, x on cuda:0: need one device"),
                (lambda: call(x, gpu, linear_bias=out[0].cpu()), ValueError, "linear_bias is on cpu"),
                (lambda: call(x, gpu, out=out.cpu()), ValueError, "out is on cpu"),
                (lambda: call(x.half(), gpu), TypeError, "x is f16"),
                (lambda: call(x.double(), gpu), TypeError, "float64"),
                (lambda: call(x[:, :64], gpu), ValueError, "needs [..., 128]"),
                (lambda: call(x[0, 0], gpu), ValueError, "needs [..., 128]"),
                (lambda: call(x.to_sparse(), gpu), TypeError,
                 "is of layout torch.sparse_coo, needs torch.strided"),
                (lambda: call(x, gpu, out=out[:2]), ValueError, "out is [2, 96]"),
                (lambda: call(x, gpu, out=out.t().contiguous().t()), ValueError, "out has strides"),
                (lambda: call(x, gpu, residual=out[0]), ValueError, "residual is [96]"),
                (lambda: call(x, gpu, residual=numpy.zeros((3, 96), "f4")), TypeError,
                 "give one library's"),
                (lambda: call(x, swiglu), ValueError, "holds 2 arrays"),
                (lambda: qmlp.fused_swiglu(x, gpu), ValueError, "holds 1 arrays"),
                (lambda: qmlp.fused_mlp(x, swiglu, down), ValueError,
                 "down is on cpu, gate and up on cuda:0: need one device"),
                (lambda: qmlp.pack(to_cuda(tensor), weight(2, 96, 128)), ValueError,
                 "gate is on cuda:0, up on cpu: need one device"),
                (lambda: qmlp.pack(qmlp.QuantizedTensor(
                    tensor.codes.to(CUDA), tensor.scales, tensor.biases)), ValueError,
                 "codes, scales and biases are on cpu and cuda:0, need one device"),
                (lambda: qmlp.pack(to_cuda(tensor), device="cpu"), ValueError,
                 "weight is on cuda:0"),
                (lambda: qmlp.pack(tensor, device=two), ValueError, "does not exist"),
                (lambda: qmlp.pack(tensor, activation="f32", device=CUDA), ValueError, "f32"),
                (lambda: call(x, qmlp.pack(weight(5, 128, 128), device=CUDA), out=x), ValueError,
                 "out overlaps x"),
                (lambda: call(x.clone().requires_grad_(), gpu, out=out), ValueError,
                 "out and gate_tap cannot be given"),
        ):
            with self.subTest(text=text):
                self.assertRefuses(run, kind, text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
