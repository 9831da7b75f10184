import json
import math
import os
import unittest

import cli
import tiny_model


class Kl(cli.TestCase):
    def test_same_mode_is_exactly_equal(self):
        for mode in (("--reference", "fused=0", "--test", "fused=1"),
                     ("--reference", "isa=portable", "--test", "")):
            result = self.json("kl", cli.model(), *mode, "--positions", 100)
            self.assertEqual(result["positions"], 100)
            self.assertEqual((result["mean_kl"], result["max_kl"]), (0.0, 0.0))
            self.assertEqual(result["argmax_agreement"], 1.0)
            self.assertEqual(result["layer_relative_rms_error"], [0.0] * tiny_model.LAYERS)

    def test_rounding_shows(self):
        result = self.json("kl", cli.model(), "--test", "activations=bf16", "--positions", 200)
        self.assertEqual(result["reference"]["activations"], "f32")
        self.assertEqual(result["test"]["activations"], "bf16")
        self.assertGreater(result["mean_kl"], 0.0)
        self.assertGreaterEqual(result["max_kl"], result["p99_kl"])
        self.assertGreaterEqual(result["p99_kl"], result["median_kl"])
        self.assertEqual(len(result["layer_relative_rms_error"]), tiny_model.LAYERS)
        self.assertTrue(all(0.0 < e < 0.1 for e in result["layer_relative_rms_error"]))

    def test_built_in_text_has_a_thousand_positions(self):
        result = self.json("kl", cli.model(), "--reference", "", "--test", "", "--positions", 2000,
                           "--window", 256)
        self.assertGreaterEqual(result["positions"], 1000)
        self.assertEqual(result["window"], 256)

    def test_failing_check(self):
        options = ("kl", cli.model(), "--test", "activations=bf16", "--positions", 50)
        result = cli.run(*options, "--fail-above", 1e-12)
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"--fail-above", result.stderr)
        self.assertIn(b"mean", result.stdout)  # the result is printed all the same
        self.good(*options, "--fail-above", 10)

    def test_other_model(self):
        path = os.path.join(cli.FOLDER, "kl_other")
        self.good("convert", cli.float_model(), path, "--bits", "*=8/32")
        result = self.json("kl", cli.model(), "--reference-model", path, "--positions", 64)
        self.assertGreater(result["mean_kl"], 0.0)
        same = self.json("kl", cli.model(), "--reference-model", cli.model(), "--positions", 64)
        self.assertEqual(same["max_kl"], 0.0)

    def test_top_logits(self):
        ids = [72, 101, 108, 108, 111]
        result = self.json("kl", cli.model(), "--top-logits", 4, "--prompt-ids",
                           ",".join(map(str, ids)))
        self.assertEqual(result["token_ids"], ids)
        self.assertEqual([p["token_id"] for p in result["positions"]], ids)
        for row in result["positions"]:
            self.assertEqual(len(row["ids"]), 4)
            self.assertEqual(row["logits"], sorted(row["logits"], reverse=True))
            self.assertGreater(row["logsumexp"], row["logits"][0])
        greedy = self.json("generate", cli.model(), "--prompt-ids", ",".join(map(str, ids)), "-n", 1)
        self.assertEqual(result["positions"][-1]["ids"][0], greedy["token_ids"][0])
        # Every logit: logsumexp follows from them, and perplexity from that.
        full = self.json("kl", cli.model(), "--top-logits", tiny_model.VOCAB, "--prompt-ids",
                         ",".join(map(str, ids)))
        nll = []
        for row, following in zip(full["positions"], ids[1:]):
            most = max(row["logits"])
            lse = most + math.log(sum(math.exp(x - most) for x in row["logits"]))
            self.assertAlmostEqual(row["logsumexp"], lse, places=9)
            nll.append(lse - row["logits"][row["ids"].index(following)])
        same = self.json("kl", cli.model(), "--reference", "", "--prompt-ids",
                         ",".join(map(str, ids)))
        self.assertAlmostEqual(same["test"]["perplexity"], math.exp(sum(nll) / len(nll)), places=6)

    def test_recorded_reference(self):
        path = os.path.join(cli.FOLDER, "kl.logits")
        text = "Hello there, reference."
        made = self.json("kl", cli.model(), "--record", path, "-p", text, "--activations", "f32",
                         "--window", 10)
        self.assertEqual((made["positions"], made["window"]), (len(text), 10))
        dtype, shape, blob = tiny_model.read_safetensors(path)["logits"]
        self.assertEqual((dtype, shape), ("F32", [len(text), tiny_model.VOCAB]))
        self.assertEqual(len(blob), 4 * len(text) * tiny_model.VOCAB)
        same = self.json("kl", cli.model(), "--recorded", path, "--activations", "f32")
        self.assertEqual((same["positions"], same["max_kl"]), (len(text), 0.0))
        live = self.json("kl", cli.model(), "-p", text, "--window", 10, "--test",
                         "activations=bf16")
        other = self.json("kl", cli.model(), "--recorded", path, "--test", "activations=bf16")
        for key in ("mean_kl", "max_kl", "argmax_agreement", "window"):
            self.assertEqual(other[key], live[key])
        self.bad(2, "--recorded", "kl", cli.model(), "--recorded", path, "-p", "x")
        self.bad(2, "--recorded", "kl", cli.model(), "--recorded", path, "--reference", "fused=0")
        self.bad(2, "--record", "kl", cli.model(), "--record", path, "--test", "fused=0")
        self.bad(2, "model.safetensors", "kl", cli.model(), "--recorded",
                 os.path.join(cli.model(), "model.safetensors"))
        self.bad(3, "nowhere", "kl", cli.model(), "--record", "/nowhere/x", "-p", "x")
        self.full_disk_leaves_the_old_file("logits", "kl", cli.model(), "-p", "x", "--record")

    def test_token_sources(self):
        text, ids = os.path.join(cli.FOLDER, "kl.txt"), os.path.join(cli.FOLDER, "kl.ids")
        with open(text, "w", encoding="ascii") as file:
            file.write("Hello there")
        with open(ids, "w", encoding="ascii") as file:
            json.dump(list(b"Hello there"), file)
        results = [self.json("kl", cli.model(), *source) for source in
                   (("--text", text), ("--ids", ids), ("-p", "Hello there"))]
        self.assertEqual(results[0]["positions"], 11)
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_usage(self):
        m = cli.model()
        self.bad(2, "--reference", "kl", m, "--reference", "colour=red")
        self.bad(2, "--test activations", "kl", m, "--test", "activations=f64")
        self.bad(2, "--test fused", "kl", m, "--test", "fused")
        self.bad(2, "--json", "kl", m, "--top-logits", 3, "-p", "x")
        self.bad(2, "--top-logits", "kl", m, "--top-logits", 3, "--json", "--test", "fused=1")
        self.bad(2, "one of", "kl", m, "-p", "x", "--prompt-ids", "1")
        self.bad(2, "512", "kl", m, "--window", 513)
        self.bad(2, "byte 1", "kl", m, "--text", "-", stdin=b"a\xff")
        self.bad(2, "no tokens", "kl", m, "-p", "")

    def test_text(self):
        text = self.good("kl", cli.model(), "-p", "Hello there").stdout.decode()
        self.assertIn("perplexity", text)
        self.assertIn("layer", text)


if __name__ == "__main__":
    unittest.main()
