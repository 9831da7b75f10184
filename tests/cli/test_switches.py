"""Each switch acts, and none that only chooses how to run changes a bit."""
import os
import unittest

import cli
import tiny_model

TOKENS = 6
PROMPT = "A prompt of some length."


class Switches(cli.TestCase):
    def generate(self, *args, **options):
        return self.json("generate", cli.model(), "-p", PROMPT, "-n", TOKENS, *args, **options)

    def setUp(self):
        self.plain = self.generate()

    def calls(self, result, op):
        return sum(n for name, n in result["kernels"].items() if name.startswith(op + "_"))

    def same_text(self, result):
        self.assertEqual(result["token_ids"], self.plain["token_ids"])

    # One pass for the prompt and one for each token but the last.
    passes = TOKENS

    def test_fused_kernel_ran(self):
        self.assertEqual(self.calls(self.plain, "swiglu"), tiny_model.LAYERS * self.passes)

    def test_fused_off(self):
        for result in (self.generate("--fused", 0), self.generate(env={"QMLP_FUSED": "0"})):
            self.assertEqual(self.calls(result, "swiglu"), 0)
            self.assertEqual(self.calls(result, "linear"), self.calls(self.plain, "linear") +
                             2 * tiny_model.LAYERS * self.passes)
            self.same_text(result)
        self.assertGreater(self.calls(self.generate("--fused", 1, env={"QMLP_FUSED": "0"}),
                                      "swiglu"), 0)

    def test_smallest_m_to_fuse(self):
        for result in (self.generate("--fuse-min-m", 2), self.generate(env={"QMLP_FUSE_MIN_M": "2"})):
            self.assertEqual(self.calls(result, "swiglu"), tiny_model.LAYERS)  # the prompt alone
            self.same_text(result)

    def test_cap_on_fused_calls(self):
        for n in (0, 1, 4):
            for result in (self.generate("--fused-max-calls", n),
                           self.generate(env={"QMLP_FUSED_MAX_CALLS": str(n)})):
                self.assertEqual(self.calls(result, "swiglu"), n)
                self.same_text(result)

    def test_isa(self):
        for result in (self.generate("--isa", "portable"), self.generate(env={"QMLP_ISA": "portable"})):
            self.assertEqual(result["isa"], "portable")
            self.assertTrue(all(name.endswith("_portable") for name in result["kernels"]))
            self.same_text(result)

    def test_isa_that_is_not_here(self):
        found = self.json("info")["isa"]["found"]
        if found == "avx512":
            self.skipTest("this machine has every instruction set of the tables")
        self.bad(3, "avx512", "generate", cli.model(), "-p", "x", "--isa", "avx512")

    def test_threads(self):
        for result in (self.generate("--threads", 3), self.generate(env={"QMLP_THREADS": "3"})):
            self.assertEqual(result["threads"], 3)
            self.same_text(result)

    def test_activations(self):
        for dtype in ("f32", "f16", "bf16"):
            result = self.generate("--activations", dtype)
            self.assertEqual(result["activations"], dtype)
            self.assertTrue(all(f"_{dtype}_" in name for name in result["kernels"]))

    def test_accumulation(self):
        table = {k["name"]: k["accumulation"] for k in self.json("info", "--kernels")["kernels"]}
        for name in self.generate("--accumulation", "tensor/2")["kernels"]:
            self.assertEqual(table[name], "tensor")
        for name in self.generate("--accumulation", "f32")["kernels"]:
            self.assertEqual(table[name], "f32")
        self.bad(2, "tensor", "generate", cli.model(), "-p", "x", "--activations", "f32",
                 "--accumulation", "tensor")

    def test_precision(self):
        self.assertEqual(self.generate("--precision", "wide")["switches"]["precision"], "wide")
        self.assertEqual(self.generate(env={"QMLP_PRECISION": "wide"})["switches"]["precision"],
                         "wide")
        result = self.json("kl", cli.model(), "-p", PROMPT, "--reference", "precision=match",
                           "--test", "precision=wide")
        self.assertGreater(result["max_kl"], 0.0)

    def test_poisoned_scratch_changes_nothing(self):
        for result in (self.generate("--poison-scratch"),
                       self.generate(env={"QMLP_POISON_SCRATCH": "1"})):
            self.assertTrue(result["switches"]["poison_scratch"])
            self.same_text(result)
        result = self.generate("--no-poison-scratch", env={"QMLP_POISON_SCRATCH": "1"})
        self.assertFalse(result["switches"]["poison_scratch"])

    def test_gate_tap(self):
        path = os.path.join(cli.FOLDER, "tap.safetensors")
        for fused in (1, 0):
            self.generate("--tap-gate", path, "--fused", fused)
            tap = tiny_model.read_safetensors(path)
            os.remove(path)
            self.assertEqual(sorted(tap), [f"model.layers.{i}.mlp.gate_proj"
                                           for i in range(tiny_model.LAYERS)])
            rows = len(PROMPT) + TOKENS - 1
            for dtype, shape, blob in tap.values():
                self.assertEqual((dtype, shape), ("F16", [rows, tiny_model.INTERMEDIATE]))
                self.assertTrue(any(blob))
            if fused:
                expected = tap
            self.assertEqual(tap, expected)
        self.generate(env={"QMLP_TAP_GATE": path})
        self.assertEqual(tiny_model.read_safetensors(path), expected)

    def test_counts_in_text(self):
        result = self.good("generate", cli.model(), "-p", PROMPT, "-n", TOKENS, "--counts")
        counts = [line.split() for line in result.stderr.decode().splitlines() if "_f16_" in line]
        self.assertEqual(sum(int(count) for count, name in counts if name.startswith("swiglu_")),
                         tiny_model.LAYERS * self.passes)

    def test_no_mmap(self):
        self.same_text(self.generate("--no-mmap"))


if __name__ == "__main__":
    unittest.main()
