#!/usr/bin/env python3
"""Proves and measures qmlp on a machine with many cores, in stages.

    tools/cpu_suite.py run --bin FOLDER --out FOLDER [--python PYTHON] [--seconds N] [STAGE...]
    tools/cpu_suite.py report --out FOLDER --to bench/results/DATE-NAME

  facts   the machine, the program's view of it
  tests   the C++ tests of FOLDER (*_test), all cores: they compare instruction sets and thread counts
  own     the program's prefill and decode at 1, 2, 4, ... threads, random 135M and 1B models; bits
  ops     qmlp bench: share of the measured limits at 1 thread and at all
  mlx     mlx-lm patched against MLX alone (PYTHON: one with mlx-lm and this build's package)

FOLDER of --bin holds the program `qmlp` and the tests. Each stage leaves OUT/STAGE.json; one that fails
says so there and the rest goes on. Exit status 1 when a stage failed.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "tools"))
STAGES = ("facts", "tests", "own", "mlx", "ops")


def prompt_ids(count):
    return ",".join(str((i * 37) % 1000 + 5) for i in range(count))


def run(command, timeout, env=None):
    """Standard output, status and the end of standard error; status 124 when it ran too long."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              timeout=timeout, env={**os.environ, **(env or {})}, check=False)
        return done.stdout, done.returncode, done.stderr[-600:]
    except subprocess.TimeoutExpired:
        return "", 124, f"more than {timeout} s"
    except OSError as error:
        return "", 127, f"{command[0]}: {error.strerror}"


def thread_counts(most):
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == most else [*counts, most]


class Suite:
    def __init__(self, args):
        self.args = args
        self.bin = pathlib.Path(args.bin).resolve()
        self.program = self.bin / "qmlp"
        self.cores = len(os.sched_getaffinity(0))
        self.scratch = pathlib.Path(args.out).resolve() / "scratch"

    def model(self, shape):
        import random_model

        folder = self.scratch / shape
        if not folder.exists():
            random_model.make(folder, shape)
        return folder

    def facts(self):
        names, flags = set(), ""
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                names.add(value.strip())
            elif key.strip() == "flags":
                flags = value
        wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
        info, status, error = run([self.program, "info"], 30)
        return {"status": status, "cpu": sorted(names), "cores": self.cores,
                "flags": [name for name in wanted if name in flags.split()],
                "kernel": platform.release(), "date": datetime.date.today().isoformat(),
                "info": info.splitlines(), "error": error}

    def tests(self):
        found = sorted(self.bin.glob("*_test"))

        def one(path):
            start = time.perf_counter()
            out, status, error = run([path], self.args.seconds)
            ran = [line.strip("[=] ") for line in out.splitlines()
                   if line.endswith(" total)") and " ran." in line or "all good" in line]
            skipped = sorted({line for line in out.splitlines() if line.startswith("skipped:")})
            return {"name": path.name, "status": status, "ran": ran, "skipped": skipped,
                    "seconds": round(time.perf_counter() - start, 1),
                    "tail": "" if status == 0 else (out[-400:] + error)}

        with concurrent.futures.ThreadPoolExecutor(max(1, self.cores // 2)) as pool:
            results = list(pool.map(one, found))
        return {"status": int(not found or any(r["status"] for r in results)), "tests": results}

    def generate(self, folder, threads, *words):
        out, status, error = run([self.program, "generate", folder, "--threads", threads,
                                  "--ignore-eos", "--json", *words], self.args.seconds)
        if status != 0:
            raise RuntimeError(f"qmlp generate: status {status}: {error}")
        return json.loads(out)

    def own(self):
        rows = []
        for shape, types, prompt, new in (("135m", ("f32", "bf16"), 512, 128),
                                          ("1b", ("bf16",), 256, 32)):
            folder = self.model(shape)
            for activations in types:
                answers = set()
                for threads in thread_counts(self.cores):
                    best = None
                    for _ in range(2):
                        got = self.generate(folder, threads, "--prompt-ids", prompt_ids(prompt), "-n",
                                            new, "--activations", activations)
                        answers.add(tuple(got["token_ids"]))
                        if best is None or got["decode_tokens_per_s"] > best["decode_tokens_per_s"]:
                            best = got
                    rows.append({"model": shape, "activations": activations, "threads": threads,
                                 "prompt": prompt,
                                 "isa": best["isa"], "prefill": best["prefill_tokens_per_s"],
                                 "decode": best["decode_tokens_per_s"],
                                 "packed_bytes": best["memory"]["packed_bytes"]})
                    print(json.dumps(rows[-1]), flush=True)
                rows.append({"model": shape, "activations": activations,
                             "same_tokens_at_all_thread_counts": len(answers) == 1})
        return {"status": int(any(row.get("same_tokens_at_all_thread_counts") is False
                                  for row in rows)), "rows": rows}

    def ops(self):
        out, status, error = run(
            [self.program, "bench", "--shape", "1536,4608", "--shape", "4096,14336", "--m", "1,64",
             "--threads", f"1,{self.cores}", "--seconds", "0.4", "--activations", "bf16", "--json",
             "-"], self.args.seconds)
        result = {"status": status, "error": error}
        if status == 0:
            result["bench"] = json.loads(out)
        return result

    def mlx(self):
        if self.args.python is None:
            return {"status": 1, "error": "not run: no --python"}
        results, status = [], 0
        for model, dtype, words in (
                ("135m", "float32", ("--prompt", "256", "--new", "96", "--own-prompt", "35",
                                     "--own-new", "12", "--rounds", "2")),
                ("135m", "float16,bfloat16", ("--prompt", "256", "--new", "64", "--own-prompt", "2",
                                              "--own-new", "2", "--rounds", "1")),
                ("1b", "float32", ("--prompt", "128", "--new", "24", "--own-prompt", "8",
                                   "--own-new", "3", "--rounds", "1"))):
            path = self.scratch / "mlx.json"
            path.unlink(missing_ok=True)
            out, code, error = run(
                [self.args.python, HERE / "bench/patched_mlx.py", self.model(model), "--dtype",
                 dtype, "--threads", ",".join(map(str, thread_counts(self.cores))), *words, "--json",
                 path], self.args.seconds)
            print(out, end="", flush=True)
            status = status or code
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            results.append({"model": f"random:{model}", "words": " ".join(words), "rows": lines,
                            "status": code, "error": "" if code == 0 else error})
        return {"status": status, "runs": results}


def read(folder, name):
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def report(args):
    """One JSON file of all stages, and a page."""
    folder = pathlib.Path(args.out)
    stages = {name: found for name in STAGES if (found := read(folder, name)) is not None}
    pathlib.Path(f"{args.to}.json").write_text(json.dumps(stages, indent=1) + "\n")
    facts = stages.get("facts", {})
    lines = [f"# {facts.get('cores')} cores, {', '.join(facts.get('cpu', []))}", "",
             f"{facts.get('date')}, kernel {facts.get('kernel')}, {', '.join(facts.get('flags', []))}. "
             "Command: `tools/cpu_suite.py run`. Raw: the JSON file beside this page.", ""]
    if "tests" in stages:
        tests = stages["tests"]["tests"]
        failed = [t["name"] for t in tests if t["status"]]
        lines += ["## Tests", "", f"{len(tests)} test programs, {len(failed)} failed"
                  f"{': ' + ', '.join(failed) if failed else ''}: " +
                  ", ".join(f"`{t['name']}`" for t in tests) + ".", ""]
    if "rows" in stages.get("own", {}):
        lines += ["## qmlp generate", "", "Random models of 4 bits, prompts of 512 (1b: 256) tokens; "
                  "tokens/s, the better of two runs.", "", "| model | activations | threads | prefill | decode | decode, "
                  "GB/s of weights | against 1 thread |", "| --- | --- | --- | --- | --- | --- | --- |"]
        first = {}
        for row in stages["own"]["rows"]:
            if "threads" not in row:
                continue
            base = first.setdefault((row["model"], row["activations"]), row["decode"])
            lines.append(f"| {row['model']} | {row['activations']} | {row['threads']} | "
                         f"{row['prefill']:.0f} | {row['decode']:.1f} | "
                         f"{row['decode'] * row['packed_bytes'] / 1e9:.1f} | "
                         f"{row['decode'] / base:.2f} x |")
        same = all(row.get("same_tokens_at_all_thread_counts", True) for row in stages["own"]["rows"])
        lines += ["", f"Tokens at all thread counts: {'the same' if same else 'DIFFERENT'}.", ""]
    if "bench" in stages.get("ops", {}):
        bench = stages["ops"]["bench"]
        lines += ["## qmlp bench", "", "`fused_swiglu`, 4 bits, group 64, bf16, cold weights. Limits measured "
                  "in the same run: " + "; ".join(
                      f"{limit['threads']} threads {limit['read_gb_per_s']:.0f} GB/s, "
                      f"{limit['fma_gflop_per_s']:.0f} GFLOP/s" for limit in bench["limits"]) + ".", "",
                  "| shape | threads | M | µs | GB/s | GFLOP/s | of the limit |",
                  "| --- | --- | --- | --- | --- | --- | --- |"]
        for row in bench["rows"]:
            if row["variant"] == "fused":
                lines.append(f"| {row['hidden']} → {row['intermediate']} | {row['threads']} | {row['M']} | "
                             f"{row['median_us']:.0f} | {row['gb_per_s']:.1f} | "
                             f"{row['gflop_per_s']:.0f} | {row['percent_of_limit']:.0f}% "
                             f"({row['bound']}) |")
        lines.append("")
    if "mlx" in stages and "runs" in stages["mlx"]:
        lines += ["## mlx-lm, patched against MLX alone", "",
                  "| model | type | threads | prefill | alone | ratio | decode | alone | ratio |",
                  "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        for found in stages["mlx"]["runs"]:
            for row in found["rows"]:
                lines.append(
                    f"| {found['model']} | {row['dtype']} | {row['threads']} | {row['prefill']:.0f} | "
                    f"{row['prefill_alone']:.2f} | {row['prefill_ratio']:.0f} | {row['decode']:.1f} | "
                    f"{row['decode_alone']:.2f} | {row['decode_ratio']:.1f} |")
        lines += [""] + [f"{found['model']}: {found['error'].strip().splitlines()[-1]}"
                         for found in stages["mlx"]["runs"] if found["error"]] + [""]
    pathlib.Path(f"{args.to}.md").write_text("\n".join(lines))
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--bin", required=True)
    runner.add_argument("--out", required=True)
    runner.add_argument("--python")
    runner.add_argument("--seconds", type=int, default=120, help="most for one program")
    runner.add_argument("stages", nargs="*", default=[])
    reporter = commands.add_parser("report")
    reporter.add_argument("--out", required=True)
    reporter.add_argument("--to", required=True)
    args = parser.parse_args()
    if args.command == "report":
        return report(args)
    unknown = set(args.stages) - set(STAGES)
    if unknown:
        parser.error(f"no stage is called {sorted(unknown)[0]!r}, needs one of {', '.join(STAGES)}")
    suite = Suite(args)
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.stages or STAGES:
        start = time.perf_counter()
        try:
            result = getattr(suite, name)()
        except Exception as error:  # the other stages are worth having
            result = {"status": 1, "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.perf_counter() - start, 1)
        (pathlib.Path(args.out) / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {'failed' if result['status'] else 'done'} in {result['seconds']} s",
              flush=True)
        if result["status"]:
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
