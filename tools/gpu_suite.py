#!/usr/bin/env python3
"""Proves and measures the CUDA kernels on a machine with a GPU, in stages of at most eight minutes.

    tools/gpu_suite.py run --program gpu_check --out FOLDER [--commit ID] STAGE...
    tools/gpu_suite.py report --out FOLDER --to bench/results/DATE-GPU

Each stage leaves FOLDER/STAGE.json; a stage that is there is kept unless it is named again, so a
suite that was cut off goes on where it stopped. `report` writes DATE-GPU.json and DATE-GPU.md.

  facts      the GPU, its driver, the commit
  check      sigmoid tables, launches (graphs, threads, streams, sizes, ordinals), compute-sanitizer
  pack       packing on the GPU, unpacking, parts, decode_row, swiglu_activation; times
  random     random problems against the CPU verifier, every kernel, for --seconds
  vectors    MLX's own products on this GPU against every kernel (--mlx: a Python with MLX)
  decode     times at M <= 16, all widths
  prefill    times at M >= 32 beside dense cuBLAS
  linear     the projections of the four models
  segments   the projections of the two largest with K in one, two, four and eight segments
  cliffs     M 1 to 64 at each width and group: neighbours' times
  peers      tinygemm (torch) and MLX
  torch      the Python package on torch, CuPy and JAX arrays (--python: one that has them and qmlp)
  mlx        qmlp.mlx: ops, whole models, caches and, with --model, a real checkpoint (--mlx)
  models     whole models patched and not, decoding and prefill (--mlx)

The last three and `vectors` say "not run" where what they need is missing.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHAPES = {"SmolLM2": (576, 1536), "MiniCPM5": (1536, 4608), "Llama-8B": (4096, 14336),
          "Llama-70B": (8192, 28672)}
WIDTHS = (2, 3, 4, 5, 6, 8)


def run(command, timeout=460, env=None):
    """Output and exit status of a command; 124 when it ran too long."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=timeout, env={**os.environ, **(env or {})}, check=False)
        return done.stdout, done.returncode
    except subprocess.TimeoutExpired as e:
        return (e.stdout or b"").decode(errors="replace"), 124
    except OSError as e:
        return f"{command[0]}: {e.strerror}", 127


def json_lines(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


class Suite:
    def __init__(self, options):
        self.options = options
        self.program = str(options.program)

    def bench(self, *words):
        library = find_cublas()
        env = {"QMLP_CUBLAS": library} if library else {}
        if library:
            env["LD_LIBRARY_PATH"] = f"{os.path.dirname(library)}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        text, status = run([self.program, "bench", *words], env=env)
        return {"points": json_lines(text), "status": status,
                "tail": "" if status == 0 else text[-400:]}

    def facts(self):
        text, status = run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit",
                       "--format=csv,noheader"])
        return {"gpu": text.strip().splitlines(), "status": status, "commit": self.options.commit,
                "date": datetime.date.today().isoformat()}

    def check(self):
        table, table_status = run([self.program, "table"])
        robust, robust_status = run([self.program, "robust"])
        result = {"table": table.splitlines(), "robust": robust.splitlines(),
                  "status": table_status or robust_status, "sanitizers": {}}
        tool = shutil.which("compute-sanitizer")
        for name in SANITIZERS:
            if tool is None:
                result["sanitizers"][name] = "not run: no compute-sanitizer"
                continue
            more = [] if name in ("memcheck", "initcheck") else ["--num-cuda-barriers", "4096"]
            text, status = run([tool, "--tool", name, *more, "--error-exitcode", "9", self.program,
                                "exact", "40", "5", "30"], timeout=150)
            summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
            if not summary:
                summary = ["not run: " + (text.strip().splitlines() or ["no output"])[-1]]
            result["sanitizers"][name] = summary[-1]
            result["status"] = result["status"] or (status if "not run" not in summary[-1] else 0)
        return result

    def pack(self):
        text, status = run([self.program, "pack"])
        result = {"points": json_lines(text), "status": status,
                  "lines": [line for line in text.splitlines() if not line.startswith("{")][-20:]}
        tool = shutil.which("compute-sanitizer")
        if tool is None:
            result["memcheck"] = "not run: no compute-sanitizer"
            return result
        text, status = run([tool, "--error-exitcode", "9", self.program, "pack", "20"], timeout=150)
        summary = re.findall(r"ERROR SUMMARY: .*", text)
        result["memcheck"] = summary[-1] if summary else "not run: " + text[-200:]
        result["status"] = result["status"] or (status if summary else 0)
        return result

    def random(self):
        seed = int(time.time()) % 100000
        commands = [[self.program, "exact", "1000000000", str(seed + i), str(self.options.seconds)]
                    for i in range(self.options.processes)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            outputs = list(pool.map(lambda c: run(c, self.options.seconds + 60), commands))
        totals = {"runs": 0, "outputs": 0, "wrong": 0, "outside": 0, "seeds": []}
        for text, _ in outputs:
            found = re.search(r"exact: seed (\d+), (\d+) problems, (\d+) outputs, (\d+) wrong, "
                              r"(\d+) written outside", text)
            if found is None:
                return {"status": 1, "tail": text[-400:]}
            values = [int(v) for v in found.groups()]
            totals["seeds"].append(values[0])
            for key, value in zip(("runs", "outputs", "wrong", "outside"), values[1:]):
                totals[key] += value
        return {**totals, "status": int(totals["wrong"] + totals["outside"] > 0)}

    def vectors(self):
        if not self.options.mlx:
            return {"status": 0, "result": "not run: no MLX was given"}
        folder = pathlib.Path(self.options.out) / "vectors"
        folder.mkdir(parents=True, exist_ok=True)
        script = str(HERE / "tests/cuda/mlx_vectors.py")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            outputs = list(pool.map(
                lambda bits: run([self.options.mlx, script, "vectors", str(bits), str(folder)]),
                WIDTHS))
        failed = [text[-300:] for text, status in outputs if status != 0]
        files = sorted(str(p) for p in folder.glob("*.safetensors"))
        text, status = run([self.program, "vectors", *files])
        return {"status": status or len(failed), "failed": failed, "result": text.splitlines()[-20:]}

    def decode(self):
        return self.bench("bits=2,3,4,5,6,8", "m=1,2,4,8,16", "op=swiglu")

    def prefill(self):
        return self.bench("bits=4", "m=1,2,4,8,16,32,64,128,256,512,1024", "op=swiglu", "dense")

    def linear(self):
        return self.bench("bits=4", "m=1,8,16,64,512", "op=linear", "segments=0")

    def segments(self):
        points = []
        for shape in ("Llama-8B", "Llama-70B"):
            for op in ("q", "k", "down"):
                result = self.bench("bits=4", "segments=1,2,4,8", "m=1,8,16,32,64,128,256,512,1024",
                                    f"shape={shape}", f"op={op}")
                if result["status"] != 0:
                    return result
                points += result["points"]
        return {"points": points, "status": 0}

    def cliffs(self):
        rows = ",".join(str(m) for m in range(1, 65))
        points = []
        for shape in list(SHAPES)[:3]:
            result = self.bench("bits=2,4,8", "group=64", f"m={rows}", "op=swiglu", f"shape={shape}")
            points += result["points"]
        return {"points": points, "status": 0}

    def torch(self):
        text, status = run([self.options.python, str(HERE / "tests/torch/test_torch_cuda.py")])
        missing = re.search(r"No module named '(\w+)'|(not run: .*)", text)
        if missing:
            return {"status": 0, "result": missing[2] or f"not run: no module {missing[1]}"}
        summary = re.findall(r"^(?:Ran \d+ tests.*|OK.*|FAILED.*)$", text, re.M)
        return {"status": status or int(not summary), "result": ", ".join(summary),
                "tail": "" if status == 0 else text[-2000:]}

    def mlx(self):
        if not self.options.mlx:
            return {"status": 0, "result": "not run: no MLX was given"}
        jobs = [[script, *names.split()] for script, names in MLX_JOBS]
        checkpoint = "mlx_gpu_checkpoint.py"
        if self.options.model:
            jobs += [[checkpoint, self.options.model, *names.split()] for names in CHECKPOINT_JOBS]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            outputs = list(pool.map(
                lambda job: run([self.options.mlx, str(HERE / "tests/cuda" / job[0]), *job[1:]]), jobs))
        checks, failed = [], []
        for job, (text, status) in zip(jobs, outputs):
            checks += re.findall(r"^(ok|FAILED|not run) (\w+) \([\d.]+ s\): (.*)$", text, re.M)
            if status != 0:
                failed.append(f"{job[0]}: status {status}: {text[-600:]}")
        seen = {name for _, name, _ in checks}
        for script in {job[0] for job in jobs}:
            source = (HERE / "tests/cuda" / script).read_text()
            missing = set(re.findall(r"^@check\ndef (\w+)", source, re.M)) - seen
            if missing:
                failed.append(f"{script}: without a result: {', '.join(sorted(missing))}")
        if not self.options.model:
            checks.append(("not run", checkpoint, "no checkpoint was given"))
        return {"status": int(bool(failed)), "checks": checks, "tail": "\n".join(failed)}

    def models(self):
        if not self.options.mlx:
            return {"status": 0, "result": "not run: no MLX was given"}
        points, failed = [], []
        for model in ("smollm2", "minicpm5", "llama8b"):
            text, status = run([self.options.mlx, str(HERE / "bench/mlx_gpu.py"), "run", model],
                               timeout=160)
            points += json_lines(text)
            if status != 0:
                failed.append(f"{model}: status {status}: {text[-300:]}")
        return {"status": int(bool(failed)), "points": points, "tail": "\n".join(failed)}

    def peers(self):
        points = []
        try:
            points += tinygemm_times()
        except Exception as e:  # a peer that is not there is reported, not fatal
            points.append({"peer": "tinygemm", "not_run": f"{type(e).__name__}: {e}"[:200]})
        if self.options.mlx:
            script = str(HERE / "tests/cuda/mlx_vectors.py")
            for shape in SHAPES:
                text, status = run([self.options.mlx, script, "times", shape], timeout=200)
                points += json_lines(text)
                if status != 0:
                    points.append({"peer": "mlx", "shape": shape, "not_run": text[-200:]})
        return {"points": points, "status": 0}


def find_cublas():
    for root in ("/opt", "/usr/local", "/usr/lib"):
        for path in sorted(pathlib.Path(root).glob("**/libcublas.so.1[23]")):
            return str(path)
    return None


def tinygemm_times():
    """torch's int4 product on [gate; up] and a compiled silu * mul, replayed from a graph."""
    import torch  # only where a GPU is
    points = []
    for shape, (K, N) in SHAPES.items():
        copies = max(2, int(1.9e8 / (N * K)) + 1)
        tiles = 8 if K % 128 == 0 else 4
        weights, scales = [], []
        for _ in range(min(copies, 64)):
            codes = torch.randint(0, 255, (2 * N, K // 2), dtype=torch.uint8, device="cuda")
            weights.append(torch.ops.aten._convert_weight_to_int4pack(codes, tiles))
            scales.append(torch.randn(K // 64, 2 * N, 2, dtype=torch.bfloat16, device="cuda"))
        for rows in (1, 8, 16, 64):
            x = torch.randn(rows, K, dtype=torch.bfloat16, device="cuda")

            def call(i, x=x, weights=weights, scales=scales, N=N):
                both = torch.ops.aten._weight_int4pack_mm(x, weights[i], 64, scales[i])
                return torch.nn.functional.silu(both[:, :N]) * both[:, N:]

            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for i in range(3):
                    call(i % len(weights))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(len(weights)):
                    call(i)
            samples = []
            for _ in range(9):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                samples.append(begin.elapsed_time(end) * 1000 / len(weights))
            points.append({"shape": shape, "op": "swiglu", "peer": "tinygemm", "bits": 4,
                           "group": 64, "M": rows, "us": round(sorted(samples)[4], 2)})
    return points


STAGES = ("facts", "check", "pack", "random", "vectors", "decode", "prefill", "linear", "segments",
          "cliffs", "peers", "torch", "mlx", "models")
# Checks of one script that run in a process of their own, side by side: MLX compiles for minutes.
MLX_JOBS = (
    ("mlx_gpu.py", "device linear_bits linear_segments linear_epilogues swiglu_and_mlp_bits layouts"),
    ("mlx_gpu.py", "whole_layers small_models f32_models batches lora"),
    ("mlx_gpu.py", "chain_of_80 threads_and_streams unpack_and_parts gradients mixed_types"),
    ("mlx_gpu.py", "one_billion equal_to_mlx"),
    ("mlx_gpu_caches.py", ""),
)
CHECKPOINT_JOBS = ("greedy_text logits rotating_cache",
                   "saved_prompt_cache batch_generation speculative_decoding lora_and_saving",
                   "quantized_cache commands server")


def command_run(options):
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    suite = Suite(options)
    worst = 0
    for stage in options.stages or STAGES:
        path = out / f"{stage}.json"
        if path.exists() and not options.stages:
            continue
        begin = time.time()
        result = getattr(suite, stage)()
        result["seconds"] = round(time.time() - begin, 1)
        path.write_text(json.dumps(result))
        status = result.get("status", 0)
        brief = {k: v for k, v in result.items() if k not in ("points", "tail")}
        print(f"{stage}: {'ok' if status == 0 else 'FAILED'} {json.dumps(brief)[:600]} "
              f"{result.get('tail', '')}", flush=True)
        worst = worst or int(status != 0)
    return worst


def table(rows, columns):
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("--:" for _ in columns) + " |"]
    return "\n".join(lines + ["| " + " | ".join(str(v) for v in row) + " |" for row in rows]) + "\n"


def by_shape(points, value):
    """Rows M, columns shapes."""
    shapes = [s for s in SHAPES if any(p.get("shape") == s for p in points)]
    rows = []
    for m in sorted({p["M"] for p in points}):
        cells = [next((value(p) for p in points if p["M"] == m and p["shape"] == s), "")
                 for s in shapes]
        rows.append([m, *cells])
    return table(rows, ["M", *shapes])


def command_report(options):
    out = pathlib.Path(options.out)
    stages = {s: json.loads((out / f"{s}.json").read_text()) for s in STAGES
              if (out / f"{s}.json").exists()}
    facts = stages.get("facts", {})
    text = [f"# {', '.join(facts.get('gpu', ['an unnamed GPU']))}, {facts.get('date', '')}\n",
            f"Commit {facts.get('commit', 'unknown')}. Written by `tools/gpu_suite.py report`; a stage "
            "that is missing here was not run. Times are microseconds of one call in a replayed graph "
            "that walks round more than 190 MB of packed weights, medians of 7; \"read\" is a kernel "
            "that only reads the same bytes, \"dense\" cuBLAS bf16 on [gate; up] and one silu·mul "
            "kernel, in the same run.\n"]
    if "check" in stages:
        check = stages["check"]
        text.append("## Bits and launches\n")
        text.append(table([[line] for line in check["table"] + check["robust"]] +
                          [[f"{k}: {v}"] for k, v in check["sanitizers"].items()], ["result"]))
    if "pack" in stages:
        stage = stages["pack"]
        text.append("\n## Packing\n")
        text.append(table([[line] for line in stage["lines"]] + [[f"memcheck: {stage['memcheck']}"]],
                          ["result"]))
        text.append("\nGate and up of Llama-8B, bf16, groups of 64: milliseconds of a call from host and "
                    "from device memory, the kernels alone, `part`, and `unpack_rows` of one matrix.\n")
        text.append(table([[p["bits"], p["host_ms"], p["device_ms"], p["kernels_us"], p["GB_per_s"],
                            p["part_ms"], p["unpack_ms"]] for p in stage["points"]],
                          ["bits", "host", "device", "kernels µs", "GB/s", "part", "unpack"]))
    if "random" in stages:
        r = stages["random"]
        text.append(f"\n{r['runs']:,} runs of kernels on random problems, {r['outputs']:,} outputs against "
                    f"the CPU's `tensor`: **{r['wrong']} wrong**, {r['outside']} written outside.\n")
    if "vectors" in stages:
        result = stages["vectors"].get("result")
        text.append("\nMLX on the same GPU: " + (result if isinstance(result, str) else result[-1]) + "\n")
    if "prefill" in stages:
        text.append("\n## SwiGLU, 4 bits, group 64, bf16\n")
        text.append(by_shape(stages["prefill"]["points"], lambda p: f"{p['us']:.2f} (read "
                             f"{p['read_us']:.2f}, dense {p.get('dense_us', 0):.2f})"))
    if "decode" in stages:
        for bits in WIDTHS:
            points = [p for p in stages["decode"]["points"] if p["bits"] == bits]
            text.append(f"\n## SwiGLU, {bits} bits, group 64: time and its ratio to the read\n")
            text.append(by_shape(points, lambda p: f"{p['us']:.2f} ({p['us'] / p['read_us']:.2f})"))
    if "linear" in stages:
        text.append("\n## Linears, 4 bits, group 64, in as many segments as the plan chooses\n")
        points = stages["linear"]["points"]
        names = sorted({(p["shape"], p["op"], p["K"], p["N"]) for p in points})
        rows = []
        for shape, op, K, N in names:
            mine = {p["M"]: p for p in points if (p["shape"], p["op"]) == (shape, op)}
            any_of = next(iter(mine.values()))
            rows.append([f"{shape} {op} {K}→{N}", any_of["segments"], f"{any_of['read_us']:.2f}",
                         *(f"{mine[m]['us']:.2f}" for m in sorted(mine))])
        text.append(table(rows, ["linear", "S", "read", *(f"M {m}" for m in sorted({p["M"] for p in points}))]))
    if "segments" in stages:
        text.append("\n## K segments (tensor/S), 4 bits, group 64\n")
        points = stages["segments"]["points"]
        counts = sorted({p["segments"] for p in points})
        times = {(p["shape"], p["op"], p["M"], p["segments"]): f"{p['us']:.2f}" for p in points}
        rows = [[f"{p['shape']} {p['op']} {p['K']}→{p['N']}", p["M"], f"{p['read_us']:.2f}",
                 *(times.get((p["shape"], p["op"], p["M"], s), "") for s in counts)]
                for p in points if p["segments"] == 1]
        text.append(table(rows, ["linear", "M", "read", *(f"S = {s}" for s in counts)]))
    if "cliffs" in stages:
        text.append("\n## Cliffs\n")
        text.append(cliff_text(stages["cliffs"]["points"]))
    if "peers" in stages:
        text.append("\n## Peers in the same session\n")
        rows = [[p.get("peer"), p.get("shape", ""), p.get("M", ""), p.get("us", p.get("not_run"))]
                for p in stages["peers"]["points"]]
        text.append(table(rows, ["peer", "shape", "M", "µs"]))
    if "torch" in stages:
        text.append(f"\n## Python\n\n`tests/torch/test_torch_cuda.py`: {stages['torch']['result']}\n")
    if "mlx" in stages:
        text.append("\n## qmlp.mlx, checks\n")
        text.append(stages["mlx"].get("result") or table(
            [[name, word, detail] for word, name, detail in stages["mlx"]["checks"]],
            ["check", "", "what it found"]))
    if "models" in stages:
        text.append("\n## Whole models in MLX\n")
        text.append(stages["models"].get("result") or table(
            [[p["model"], p["part"], p["side"], p["ms"]] for p in stages["models"]["points"]],
            ["model", "", "", "ms"]))
    target = pathlib.Path(options.to)
    target.with_suffix(".json").write_text(json.dumps(stages, indent=1) + "\n")
    target.with_suffix(".md").write_text("\n".join(text))
    return 0


def cliff_text(points):
    """The largest time(M + 1) / time(M), and the cells over 1.5 × the mean of their neighbours."""
    rows = []
    for key in sorted({(p["shape"], p["bits"], p["group"]) for p in points}):
        line = sorted((p["M"], p["us"]) for p in points
                      if (p["shape"], p["bits"], p["group"]) == key)
        steps = [(b[1] / a[1], b[0]) for a, b in zip(line, line[1:])]
        peaks = [m[0] for a, m, b in zip(line, line[1:], line[2:]) if m[1] > 0.75 * (a[1] + b[1])]
        most = max(steps)
        rows.append([f"{key[0]} {key[1]} bits g{key[2]}", f"{most[0]:.2f} at M {most[1]}",
                     ", ".join(map(str, peaks)) or "none"])
    return table(rows, ["shape", "largest step", "M over 1.5 × the mean of its neighbours"])


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    r = commands.add_parser("run")
    r.add_argument("--program", default="gpu_check")
    r.add_argument("--out", required=True)
    r.add_argument("--commit", default="unknown")
    r.add_argument("--seconds", type=int, default=100, help="of the stage random")
    r.add_argument("--processes", type=int, default=8, help="of the stage random, side by side")
    r.add_argument("--mlx", help="a Python whose MLX has a CUDA backend, with qmlp for the last stages")
    r.add_argument("--python", default=sys.executable, help="a Python with torch and qmlp")
    r.add_argument("--model", help="an MLX checkpoint's folder, for the stage mlx")
    r.add_argument("stages", nargs="*", choices=[*STAGES, []], metavar="STAGE")
    r.set_defaults(command=command_run)
    p = commands.add_parser("report")
    p.add_argument("--out", required=True)
    p.add_argument("--to", required=True)
    p.set_defaults(command=command_report)
    options = parser.parse_args()
    return options.command(options)


if __name__ == "__main__":
    sys.exit(main())
