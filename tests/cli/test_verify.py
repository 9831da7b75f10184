"""verify: golden vectors, a model's checks, and a fault planted in each place."""
import glob
import json
import os
import shutil
import struct
import unittest

import cli

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data")
OP_CHECKS = ["weights", "one-hot", "fused", "rows", "kernels", "threads", "oracle", "contract"]


def vectors(folder):
    return sorted(glob.glob(os.path.join(DATA, folder, "*.safetensors")))


def tensor_offset(path, name):
    """Where a tensor's bytes start in a safetensors file."""
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    return 8 + size + header[name]["data_offsets"][0]


def damaged_copy(path, name, offset, blob):
    """A copy of a file with bytes of one tensor replaced."""
    target = os.path.join(cli.FOLDER, f"damaged_{name.replace('/', '_')}_{os.path.basename(path)}")
    shutil.copyfile(path, target)
    with open(target, "r+b") as file:
        file.seek(tensor_offset(path, name) + offset)
        file.write(blob)
    return target


class Vectors(cli.TestCase):
    def test_mlx_cuda_is_matched_to_the_bit(self):
        out = self.json("verify", "--vectors", *vectors("mlx-cuda"))
        self.assertTrue(out["ok"])
        self.assertEqual(len(out["files"]), 11)
        for file in out["files"]:
            self.assertEqual(file["differing"], 0, file["file"])
            if file["layout"] == "quantized_matmul":
                self.assertEqual(file["contract"], "tensor/1")
                self.assertEqual(file["problems"], 12)
                self.assertGreater(file["exact"]["compared"], 10000)
                self.assertGreater(file["bounded"]["compared"], 100)
                self.assertLessEqual(file["worst_error"], 1.0)
            else:
                self.assertEqual(file["outputs"], 4 * 65536)

    def test_mlx_cpu_is_within_the_bound(self):
        out = self.json("verify", "--vectors", *vectors("mlx-cpu"))
        self.assertTrue(out["ok"])
        self.assertGreaterEqual(len(out["files"]), 40)
        for file in out["files"]:
            self.assertEqual((file["contract"], file["differing"]), ("f32", 0), file["file"])
            self.assertGreater(file["bounded"]["compared"], 0)

    def test_every_instruction_set_and_thread_count(self):
        files = vectors("mlx-cuda")
        for options in (["--isa", "portable"], ["--threads", "1"], ["--threads", "3"]):
            self.good("verify", "--vectors", *files, *options)

    def test_other_contracts_stay_within_the_bound(self):
        for accumulation in ("f32", "tensor/4"):
            out = self.json("verify", "--vectors", vectors("mlx-cuda")[1],
                            "--accumulation", accumulation)
            self.assertEqual(out["files"][0]["contract"], accumulation)
            self.assertGreater(out["files"][0]["bounded"]["compared"], 500)
        self.good("verify", "--vectors", vectors("mlx-cpu")[0], "--accumulation", "tensor/1")

    def test_a_changed_output_is_found(self):
        for path, name, flag in (
                (os.path.join(DATA, "mlx-cuda", "qmm_bf16_b4.safetensors"), "bf16_b4_g64_m13.y", 2),
                (os.path.join(DATA, "mlx-cuda", "qmm_f16_b5.safetensors"), "f16_b5_g32_m1.y", 0),
                (os.path.join(DATA, "mlx-cuda", "qmm_bf16_b3.safetensors"),
                 "bf16_b3_g32_m1.dequantized", 8),
                (os.path.join(DATA, "mlx-cpu", "000_main.safetensors"), "hidden", 4),
                (os.path.join(DATA, "mlx-cuda", "activation_tables.safetensors"), "silu_f16", 600)):
            blob = b"\x39\x7b" if name.endswith("m1.y") else b"\x01\x40"
            bad = damaged_copy(path, name, flag, blob)
            result = cli.run("verify", "--vectors", bad, vectors("mlx-cpu")[1])
            self.assertEqual(result.returncode, 1, result.stderr)
            text = result.stdout.decode()
            self.assertIn("FAIL " + bad, text)
            self.assertIn("2 files, 1 failed", text)

    def test_a_broken_file_is_named_and_the_rest_still_runs(self):
        broken = os.path.join(cli.FOLDER, "broken.safetensors")
        with open(broken, "wb") as file:
            file.write(struct.pack("<Q", 1 << 40))
        good = vectors("mlx-cpu")[0]
        result = cli.run("verify", "--vectors", broken, good)
        self.assertEqual(result.returncode, 2)
        self.assertIn("ERROR " + broken, result.stdout.decode())
        self.assertIn("2 files, 1 failed", result.stdout.decode())
        model = os.path.join(cli.model(), "model.safetensors")
        result = cli.run("verify", "--vectors", model)
        self.assertEqual(result.returncode, 2)
        self.assertIn("not", result.stdout.decode())


class Model(cli.TestCase):
    def test_a_good_model_passes_every_check(self):
        out = self.json("verify", cli.model(), "--tokens", 9)
        self.assertTrue(out["ok"])
        self.assertEqual(out["failed"], 0)
        paths = [op["path"] for op in out["ops"]]
        self.assertEqual(len(paths), 3 * 6 + 1)
        for op in out["ops"]:
            self.assertEqual([check["name"] for check in op["checks"]], OP_CHECKS)
            done = {check["name"] for check in op["checks"] if check["compared"] > 0}
            expected = set(OP_CHECKS) - (set() if op["path"].endswith("mlp") else {"fused"})
            self.assertLessEqual(expected - {"kernels"}, done, op["path"])
        names = [check["name"] for check in out["model_checks"]]
        self.assertIn("token by token", names)
        self.assertIn("chunks", names)
        self.assertGreater(sum(out["ulps"].values()), 0)

    def test_types_contracts_and_precisions(self):
        for options in (["--activations", "bf16"], ["--activations", "f32"],
                        ["--activations", "bf16", "--precision", "wide"],
                        ["--accumulation", "tensor/2"], ["--isa", "portable", "--threads", "1"]):
            self.good("verify", cli.model(), "--tokens", 5, "--rows", "1,9", *options)

    def test_dense_weights(self):
        out = self.json("verify", cli.float_model(), "--tokens", 4)
        self.assertIn("dense", out["ops"][0]["shape"])

    def test_text_lists_every_module(self):
        text = self.good("verify", cli.model(), "--layers", "1", "--tokens", 3).stdout.decode()
        self.assertIn("model.layers.1.mlp ", text)
        self.assertNotIn("model.layers.0.", text)
        self.assertIn(", 0 failed", text)

    def plant(self, site, layer, checks):
        result = cli.run("verify", cli.model(), "--tokens", 3, "--plant", f"{site}:{layer}")
        text = result.stdout.decode()
        self.assertEqual(result.returncode, 1, text)
        failures = [line for line in text.splitlines() if line.startswith("FAIL")]
        self.assertTrue(failures)
        for line in failures:
            self.assertTrue(line.startswith(f"FAIL model.layers.{layer}.mlp, "), line)
        for check in checks:
            self.assertTrue(any(f"mlp, {check}:" in line for line in failures), text)

    def test_planted_kernel_fault(self):
        self.plant("kernel", 1, ["fused", "rows"])

    def test_planted_weight_fault(self):
        self.plant("weight", 2, ["weights"])

    def test_planted_scale_fault(self):
        self.plant("scale", 0, ["weights"])

    def test_fail_fast_stops_at_the_first_module(self):
        result = cli.run("verify", cli.model(), "--plant", "weight:0", "--fail-fast", "--json")
        self.assertEqual(result.returncode, 1)
        out = json.loads(result.stdout)
        self.assertEqual(out["ops"][-1]["path"], "model.layers.0.mlp")
        self.assertEqual(out["model_checks"], [])

    def test_a_nan_scale_is_named(self):
        folder = os.path.join(cli.FOLDER, "nan_scale")
        shutil.copytree(cli.model(), folder)
        name = "model.layers.1.mlp.up_proj.scales"
        path = os.path.join(folder, "model.safetensors")
        with open(path, "r+b") as file:
            file.seek(tensor_offset(path, name) + 2 * 7)
            file.write(b"\x00\x7e")
        result = cli.run("verify", folder, "--tokens", 3)
        text = result.stdout.decode()
        self.assertEqual(result.returncode, 1, text + result.stderr.decode())
        self.assertIn(f"{name}: element (3, 1) is NaN", text)
        self.assertIn("FAIL model, finite logits", text)


class Usage(cli.TestCase):
    def test_bad_usage(self):
        model = cli.model()
        file = vectors("mlx-cpu")[0]
        self.bad(2, "--vectors", "verify")
        self.bad(2, "--vectors", "verify", model, "--vectors", file)
        self.bad(2, "--layers", "verify", model, "--layers", "7")
        self.bad(2, "--layers", "verify", model, "--layers", "2-1")
        self.bad(2, "--layers", "verify", model, "--layers", "0-1-2")
        self.bad(2, "--rows", "verify", model, "--rows", "0")
        self.bad(2, "--plant", "verify", model, "--plant", "moon")
        self.bad(2, "--plant", "verify", model, "--plant", "kernel:9")
        self.bad(2, "tensor", "verify", model, "--accumulation", "tensor", "--activations", "f32")


if __name__ == "__main__":
    unittest.main()
