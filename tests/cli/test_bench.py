import json
import os
import stat
import subprocess
import unittest
import xml.etree.ElementTree

import cli

FAST = ("--seconds", 0.01, "--min-runs", 2, "--rotate-mib", 1)


class Bench(cli.TestCase):
    def bench(self, *args):
        return json.loads(self.good("bench", *args, *FAST, "--json", "-").stdout)

    def test_rows(self):
        result = self.bench("--shape", "128,192", "--m", "1,5", "--bits", "4", "--bits", "3,8",
                            "--group", 32, "--threads", "1,2")
        rows = result["rows"]
        self.assertEqual(len(rows), 2 * 2 * 2 * 3)  # formats, threads, M, variants
        self.assertEqual({(r["gate_bits"], r["up_bits"]) for r in rows if r["variant"] == "fused"},
                         {(4, 4), (3, 8)})
        self.assertEqual([x["threads"] for x in result["limits"]], [1, 2])
        for limit in result["limits"]:
            self.assertGreater(limit["read_gb_per_s"], 0.1)
            self.assertGreater(limit["fma_gflop_per_s"], 0.01)
        for row in rows:
            self.assertGreaterEqual(row["runs"], 2)
            self.assertLessEqual(row["p10_us"], row["median_us"])
            self.assertLessEqual(row["median_us"], row["p90_us"])
            self.assertIn(row["bound"], ("memory", "compute"))
            limit = next(x for x in result["limits"] if x["threads"] == row["threads"])
            memory = 1e-3 * row["bytes"] / limit["read_gb_per_s"]
            compute = 1e-3 * row["flops"] / limit["fma_gflop_per_s"]
            self.assertAlmostEqual(row["limit_us"] / max(memory, compute), 1.0, places=6)
            self.assertAlmostEqual(row["percent_of_limit"] * row["median_us"] / row["limit_us"],
                                   100.0, places=6)
        fused = next(r for r in rows if r["variant"] == "fused" and r["M"] == 1)
        weights = 2 * 128 * 192 * 4 // 8 + 2 * 2 * (128 * 192 // 32) * 2
        self.assertEqual(fused["bytes"], weights + (128 + 192) * 2)
        self.assertEqual(fused["flops"], 4 * 128 * 192)
        self.assertTrue(fused["kernel"].startswith("swiglu_bf16_"))
        self.assertGreater(fused["copies"], 1)
        for key in ("version", "build", "compiler", "command", "cpu", "isa", "rotate_bytes"):
            self.assertTrue(result[key], key)

    def test_writes_into_what_is_no_file(self):
        pipe = os.path.join(cli.FOLDER, "bench.pipe")
        os.mkfifo(pipe)
        reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
        self.good("bench", "--shape", "64,64", "--m", 1, "--group", 32, *FAST, "--json", pipe)
        self.assertEqual(len(json.loads(reader.communicate(timeout=60)[0])["rows"]), 3)
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_a_file_that_cannot_be_written_is_called_by_its_name(self):
        bench = ("bench", "--shape", "64,64", "--m", 1, "--group", 32, *FAST, "--json")
        result = cli.run(*bench, "/dev/full")
        self.assertEqual((result.returncode, result.stderr),
                         (3, b"qmlp: /dev/full: cannot write: No space left on device\n"))
        for option in ("--json", "--plot"):
            self.full_disk_leaves_the_old_file("file", *bench[:-1], option)

    def test_says_when_the_rotation_is_short(self):
        text = self.good("bench", "--shape", "64,64", "--m", 1, "--group", 32,
                         *FAST).stdout.decode()
        if self.json("info")["machine"]["caches_bytes"]:
            self.assertIn("less than 3 x the last-level cache", text)
        self.assertIn("unfused", text)
        self.assertIn("dense bf16", text)
        self.assertIn("% of limit", text)

    def test_activations_and_isa(self):
        row = self.bench("--shape", "64,64", "--m", 1, "--activations", "f32", "--isa", "portable",
                         "--bits", 8)["rows"][0]
        self.assertTrue(row["kernel"].startswith("swiglu_f32_"))
        self.assertTrue(row["kernel"].endswith("_portable"))

    def test_model(self):
        result = self.bench(cli.model(), "--m", "1", "--threads", 1)
        run, = result["model_runs"]
        self.assertGreater(run["prefill_tokens_per_s"], 0)
        self.assertGreater(run["decode_tokens_per_s"], 0)
        totals = self.json("inspect", cli.model())["totals"]
        self.assertGreater(run["bytes_per_token"], totals["module_bytes"])
        self.assertEqual({(r["gate_bits"], r["up_bits"]) for r in result["rows"]
                          if r["variant"] != "dense f16"}, {(4, 8)})

    def test_json_file(self):
        path = os.path.join(cli.FOLDER, "bench.json")
        result = self.good("bench", "--shape", "64,64", "--m", 1, *FAST, "--json", path)
        self.assertIn(b"median us", result.stdout)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(len(json.load(file)["rows"]), 3)
        for option in ("--json", "--plot"):
            self.bad(3, "/nonexistent/x", "bench", "--shape", "64,64", option, "/nonexistent/x")
            self.bad(3, cli.FOLDER, "bench", "--shape", "64,64", option, cli.FOLDER)

    def test_plot(self):
        path = os.path.join(cli.FOLDER, "bench.svg")
        self.good("bench", "--shape", "64,64", "--m", "1,4", "--threads", "1,2", *FAST, "--plot",
                  path)
        root = xml.etree.ElementTree.parse(path).getroot()
        lines = root.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(lines), 2 * 3)  # thread counts, variants
        self.assertTrue(all(len(line.get("points").split()) == 2 for line in lines))

    def test_usage(self):
        for args in (("--shape", "64"), ("--shape", "64,64,64"), ("--shape", "a,b"),
                     ("--m", "0"), ("--m", "1,"), ("--bits", "7"), ("--bits", "4,4,4"),
                     ("--group", "48"), ("--threads", "0"), ("--shape", "65,64"),
                     (cli.model(), "--bits", "4")):
            result = cli.run("bench", *args)
            self.assertEqual(result.returncode, 2, (args, result.stderr))
            self.assertEqual(result.stderr.count(b"\n"), 1, args)


if __name__ == "__main__":
    unittest.main()
