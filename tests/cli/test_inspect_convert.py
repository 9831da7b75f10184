import json
import os
import signal
import subprocess
import time
import unittest

import cli
import tiny_model


class Inspect(cli.TestCase):
    def test_json(self):
        result = self.json("inspect", cli.model())
        modules = {m["path"]: m for m in result["modules"]}
        self.assertEqual(len(modules), 1 + 7 * tiny_model.LAYERS)
        gate = modules["model.layers.1.mlp.gate_proj"]
        self.assertEqual((gate["bits"], gate["group_size"], gate["scale_dtype"]), (4, 32, "f16"))
        self.assertEqual(gate["shape"], [tiny_model.INTERMEDIATE, tiny_model.HIDDEN])
        self.assertEqual(modules["model.layers.1.mlp.up_proj"]["bits"], 8)
        self.assertEqual(modules["model.layers.1.mlp.down_proj"]["bits"], 6)
        self.assertIn("config quantization", gate["source"])
        self.assertTrue(gate["decode_kernel"].startswith("swiglu_f16_"))
        self.assertTrue(modules["model.layers.0.self_attn.q_proj"]["decode_kernel"]
                        .startswith("linear_f16_"))
        n, k = gate["shape"]
        self.assertEqual(gate["bytes"], n * k * 4 // 8 + 2 * n * k // 32 * 2)
        totals = result["totals"]
        self.assertEqual(totals["module_bytes"], sum(m["bytes"] for m in modules.values()))
        self.assertEqual(totals["parameters"],
                         sum(m["shape"][0] * m["shape"][1] for m in modules.values()))
        self.assertEqual(result["config"]["num_hidden_layers"], tiny_model.LAYERS)
        self.assertEqual(result["warnings"], [])

    def test_switches_change_the_kernels(self):
        def gate(*options):
            result = self.json("inspect", cli.model(), *options)
            return next(m for m in result["modules"] if m["path"].endswith("0.mlp.gate_proj"))
        self.assertTrue(gate("--fused", 0)["decode_kernel"].startswith("linear_"))
        late = gate("--fuse-min-m", 16)
        self.assertTrue(late["decode_kernel"].startswith("linear_"))
        self.assertTrue(late["prefill_kernel"].startswith("swiglu_"))
        self.assertTrue(gate("--isa", "portable")["decode_kernel"].endswith("_portable"))
        self.assertIn("_f32_", gate("--activations", "f32")["decode_kernel"])
        self.assertEqual(gate("--accumulation", "tensor/2")["accumulation"], "tensor/2")

    def test_other_machines(self):
        for machine, ending in (("h200", "_sm90a"), ("a100", "_sm80"), ("avx512", "_avx512"),
                                ("avx2", "_avx2"), ("portable", "_portable")):
            result = self.json("inspect", cli.model(), "--machine", machine)
            self.assertEqual(result["machine"], machine)
            for module in result["modules"]:
                self.assertTrue(module["decode_kernel"].endswith(ending), module)
        self.bad(2, "abacus", "inspect", cli.model(), "--machine", "abacus")

    def test_a_refusal_gives_its_reason(self):
        result = self.json("inspect", cli.model(), "--machine", "h200", "--activations", "f32")
        module = result["modules"][0]
        self.assertIsNone(module["decode_kernel"])
        self.assertIn("activation", module["reason"])
        text = self.good("inspect", cli.model(), "--machine", "h200", "--activations",
                         "f32").stdout.decode()
        self.assertIn("no kernel", text)

    def test_explain(self):
        text = self.good("inspect", cli.model(), "--explain").stdout.decode()
        self.assertIn("supported", text)
        self.assertIn("needs", text)

    def test_no_mmap(self):
        self.assertTrue(self.json("inspect", cli.model())["mapped"])
        self.assertFalse(self.json("inspect", cli.model(), "--no-mmap")["mapped"])

    def test_text(self):
        text = self.good("inspect", cli.model()).stdout.decode()
        self.assertIn("model.layers.2.mlp.down_proj", text)
        self.assertIn("6 bits/32 f16", text)
        self.assertNotIn("\x1b", text)


class Convert(cli.TestCase):
    def out(self, name):
        return os.path.join(cli.FOLDER, "convert_" + name)

    def test_report(self):
        report = self.json("convert", cli.float_model(), self.out("report"), "--bits", "*=4")
        self.assertFalse(report["lossless"])
        self.assertGreater(report["bytes_written"], 0)
        names = tiny_model.read_safetensors(os.path.join(self.out("report"), "model.safetensors"))
        self.assertEqual(report["tensors"], len(names))

    def test_patterns(self):
        self.good("convert", cli.float_model(), self.out("patterns"), "--bits", "*=4",
                  "--bits", "layers.0.*=8,down=6/32", "--group-size", 64)
        modules = {m["path"]: m for m in self.json("inspect", self.out("patterns"))["modules"]}
        def spec(path):
            return modules[path]["bits"], modules[path]["group_size"]
        self.assertEqual(spec("model.layers.0.self_attn.q_proj"), (8, 64))
        self.assertEqual(spec("model.layers.1.self_attn.q_proj"), (4, 64))
        self.assertEqual(spec("model.layers.0.mlp.down_proj"), (6, 32))

    def test_never_over_a_folder_without_force(self):
        path = self.out("force")
        self.good("convert", cli.float_model(), path, "--bits", "*=4/32")
        self.bad(2, "force", "convert", cli.float_model(), path, "--bits", "*=8/32")
        self.assertEqual(self.json("inspect", path)["modules"][1]["bits"], 4)
        self.good("convert", cli.float_model(), path, "--bits", "*=8/32", "--force")
        self.assertEqual(self.json("inspect", path)["modules"][1]["bits"], 8)

    def test_bad_arguments(self):
        for bits, named in (("gate", "gate"), ("gate=7", "7"), ("gate=4/48", "48"),
                            ("=4", "="), ("gate=4,,up=4", ",")):
            self.bad(2, named, "convert", cli.float_model(), self.out("bad"), "--bits", bits)
        self.bad(2, "--group-size", "convert", cli.float_model(), self.out("bad"), "--bits", "*=4",
                 "--group-size", 16)
        self.bad(2, "--scale-dtype", "convert", cli.float_model(), self.out("bad"), "--bits", "*=4",
                 "--scale-dtype", "f8")
        self.bad(3, "nothing-here", "convert", "nothing-here", self.out("bad"))
        self.assertFalse(os.path.exists(self.out("bad")))

    def test_progress_is_on_stderr_when_asked(self):
        result = self.good("convert", cli.float_model(), self.out("progress"), "--bits", "*=4",
                           "--progress")
        self.assertIn(b"/", result.stderr)
        result = self.good("convert", cli.float_model(), self.out("quiet"), "--bits", "*=4")
        self.assertEqual(result.stderr, b"")

    def test_interrupt_leaves_nothing(self):
        big = os.path.join(cli.FOLDER, "big")
        os.makedirs(big)
        for name in os.listdir(cli.float_model()):
            if name != "model.safetensors":
                with open(os.path.join(cli.float_model(), name), "rb") as source, \
                        open(os.path.join(big, name), "wb") as copy:
                    copy.write(source.read())
        with open(os.path.join(big, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config["num_hidden_layers"] = 120
        with open(os.path.join(big, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        tensors = tiny_model.weights(1)
        for layer in range(tiny_model.LAYERS, 120):
            for name in [n for n in tensors if n.startswith("model.layers.0.")]:
                tensors[name.replace(".0.", f".{layer}.")] = tensors[name]
        tiny_model.write_safetensors(os.path.join(big, "model.safetensors"), tensors)
        target = self.out("interrupted")
        before = set(os.listdir(cli.FOLDER))
        process = subprocess.Popen([cli.PROGRAM, "convert", big, target, "--bits", "*=4"],
                                   stderr=subprocess.PIPE, env=cli.environment())
        deadline = time.monotonic() + 60
        while set(os.listdir(cli.FOLDER)) == before and process.poll() is None:
            self.assertLess(time.monotonic(), deadline)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1].decode()
        self.assertEqual(process.returncode, 130, error)
        self.assertTrue(error.startswith("qmlp: "))
        self.assertEqual(set(os.listdir(cli.FOLDER)), before)


if __name__ == "__main__":
    unittest.main()
