#!/usr/bin/env python3
"""bench_torch.py --to FOLDER/NAME [--commit ID]: qmlp's ops from Python on a GPU beside torch's bf16 ones.

Writes NAME.json and NAME.md. Needs the qmlp package with CUDA, torch and a GPU. Llama-8B shapes, 4 bits,
group 64, bf16. Weights rotate through copies larger than three L2 caches. "eager": a call at a time from
Python, device time a call over a run of calls, the launches included where they are slower than the
kernels; "graph": the same calls replayed. "host": what one call costs the Python thread, at a shape whose
kernels are faster than their launches.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import qmlp
import qmlp.torch

HIDDEN, INTERMEDIATE = 4096, 14336
COUNTS = (1, 8, 64, 1024)
ROTATE_BYTES = 200 << 20
REPEATS = 7


def quantized(N, K):
    """Random codes on the device; quantizing this much on the CPU would take minutes."""
    codes = torch.randint(-2**31, 2**31, (N, K // 8), dtype=torch.int32, device="cuda")
    scales = (torch.rand(N, K // 64, device="cuda") * 0.01 + 0.001).bfloat16()
    return qmlp.QuantizedTensor(codes, scales, -8 * scales, 4, 64)


def copies(nbytes):
    return max(2, -(-ROTATE_BYTES // nbytes))


def time_eager(call, count):
    """Device microseconds a call, the median of REPEATS runs."""
    for i in range(count):
        call(i)
    times = []
    calls = 40 * count
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for i in range(calls):
            call(i % count)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
        if times[-1] * calls > 2e5:  # a fifth of a second is enough for the long ones
            calls = max(count, int(2e5 / times[-1]))
    return statistics.median(times)


def time_graph(call, count):
    for i in range(count):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(2 * count):
            call(i % count)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (10 * count))
    return statistics.median(times)


def time_host(call, calls=400):
    """Microseconds of the calling thread; fewer calls than a launch queue holds."""
    for _ in range(50):
        call()
    times = []
    for _ in range(2 * REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def ops():
    """name, ours(i, x), torch's(i, x), K, copies"""
    first = qmlp.pack(quantized(INTERMEDIATE, HIDDEN), quantized(INTERMEDIATE, HIDDEN))
    n = copies(first.nbytes)
    gate_up = [first, *(qmlp.pack(quantized(INTERMEDIATE, HIDDEN), quantized(INTERMEDIATE, HIDDEN))
                        for _ in range(n - 1))]
    dense = [(torch.randn(INTERMEDIATE, HIDDEN, device="cuda").bfloat16() * 0.02,
              torch.randn(INTERMEDIATE, HIDDEN, device="cuda").bfloat16() * 0.02) for _ in range(n)]
    yield ("fused_swiglu 4096 -> 14336", lambda i, x: qmlp.fused_swiglu(x, gate_up[i]),
           lambda i, x: F.silu(F.linear(x, dense[i][0])) * F.linear(x, dense[i][1]), HIDDEN, n)
    first = qmlp.pack(quantized(HIDDEN, INTERMEDIATE))
    m = copies(first.nbytes)
    down = [first, *(qmlp.pack(quantized(HIDDEN, INTERMEDIATE)) for _ in range(m - 1))]
    dense_down = [torch.randn(HIDDEN, INTERMEDIATE, device="cuda").bfloat16() * 0.02
                  for _ in range(m)]
    yield ("quantized_linear 14336 -> 4096", lambda i, x: qmlp.quantized_linear(x, down[i]),
           lambda i, x: F.linear(x, dense_down[i]), INTERMEDIATE, m)
    yield ("fused_mlp 4096 -> 14336 -> 4096",
           lambda i, x: qmlp.fused_mlp(x, gate_up[i], down[i], residual=x),
           lambda i, x: x + F.linear(
               F.silu(F.linear(x, dense[i][0])) * F.linear(x, dense[i][1]), dense_down[i]),
           HIDDEN, min(n, m))


def host_rows():
    rows = []
    gate_up, down = qmlp.pack(quantized(512, 256), quantized(512, 256)), qmlp.pack(quantized(256, 512))
    wide = torch.randn(1, 512, device="cuda").bfloat16()
    w = torch.randn(512, 256, device="cuda").bfloat16()
    x = torch.randn(1, 256, device="cuda").bfloat16()
    w_down = torch.randn(256, 512, device="cuda").bfloat16()
    bias, out = torch.randn(256, device="cuda").bfloat16(), torch.empty_like(x)
    number = down._number
    layer = qmlp.torch.FusedMLP(gate_up, down)
    with torch.no_grad():
        compiled = torch.compile(lambda t: layer(t, residual=t), fullgraph=True)
        reduced = torch.compile(lambda t: layer(t, residual=t), fullgraph=True, mode="reduce-overhead")
        for name, call in (
                ("qmlp.quantized_linear(x, w)", lambda: qmlp.quantized_linear(wide, down)),
                ("… with linear_bias and residual", lambda: qmlp.quantized_linear(
                    wide, down, linear_bias=bias, residual=x)),
                ("… with out=", lambda: qmlp.quantized_linear(wide, down, out=out)),
                ("qmlp.fused_swiglu(x, w)", lambda: qmlp.fused_swiglu(x, gate_up)),
                ("qmlp.fused_mlp(x, gate_up, down, residual=x)",
                 lambda: qmlp.fused_mlp(x, gate_up, down, residual=x)),
                ("qmlp.torch.FusedMLP", lambda: layer(x, residual=x)),
                ("torch.ops.qmlp.quantized_linear",
                 lambda: torch.ops.qmlp.quantized_linear(wide, number, None, None)),
                ("FusedMLP, torch.compile", lambda: compiled(x)),
                ("FusedMLP, torch.compile reduce-overhead", lambda: reduced(x)),
                ("torch F.linear", lambda: F.linear(wide, w_down)),
                ("torch F.linear with bias", lambda: F.linear(wide, w_down, bias)),
                ("torch F.silu(F.linear) * F.linear", lambda: F.silu(F.linear(x, w)) * F.linear(x, w)),
        ):
            rows.append({"call": name, "us": time_host(call)})
            print(rows[-1], flush=True)
    return rows


def write(base, result):
    pathlib.Path(f"{base}.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = [
        f"# qmlp from torch on an {result['device']}, {result['date']}", "",
        f"Commit {result['commit']}; torch {result['torch']}, Python {result['python']}. Written by "
        "`tools/bench_torch.py`. 4 bits, group 64, bf16, M tokens; microseconds a call, medians of "
        f"{REPEATS}; weights rotate through more than 200 MB. torch: bf16 `F.linear`, "
        "`F.silu(gate) * up`. Eager: from Python, one call after another; graph: the same in a "
        "replayed CUDA graph.", "",
        "| op | M | qmlp eager | torch eager | ratio | qmlp graph | torch graph | ratio |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |"]
    for row in result["ops"]:
        lines.append(
            f"| {row['op']} | {row['M']} | {row['qmlp_eager']:.1f} | {row['torch_eager']:.1f} | "
            f"{row['torch_eager'] / row['qmlp_eager']:.2f} | {row['qmlp_graph']:.1f} | "
            f"{row['torch_graph']:.1f} | {row['torch_graph'] / row['qmlp_graph']:.2f} |")
    lines += ["", "What one call costs the Python thread (M = 1, small shapes, no waiting):", "",
              "| call | µs |", "| --- | --: |",
              *(f"| `{row['call']}` | {row['us']:.1f} |" for row in result["host"]), ""]
    pathlib.Path(f"{base}.md").write_text("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", required=True)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_torch.py: no CUDA device")
    torch.manual_seed(1)
    result = {
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(),
        "commit": options.commit, "torch": torch.__version__,
        "python": sys.version.split()[0], "host": host_rows(), "ops": []}
    write(options.to, result)
    with torch.no_grad():
        for name, ours, theirs, K, n in ops():
            for M in COUNTS:
                x = torch.randn(M, K, device="cuda").bfloat16() * 0.1
                result["ops"].append({
                    "op": name, "M": M,
                    "qmlp_eager": time_eager(lambda i: ours(i, x), n),
                    "torch_eager": time_eager(lambda i: theirs(i, x), n),
                    "qmlp_graph": time_graph(lambda i: ours(i, x), n),
                    "torch_graph": time_graph(lambda i: theirs(i, x), n)})
                print(result["ops"][-1], flush=True)
                write(options.to, result)


if __name__ == "__main__":
    main()
