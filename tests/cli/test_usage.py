import os
import unittest

import cli
import tiny_model

COMMANDS = ("info", "inspect", "verify", "generate", "kl", "convert", "bench")


class Usage(cli.TestCase):
    def test_no_command(self):
        self.bad(2, "--help")

    def test_unknown_command_and_option(self):
        self.bad(2, "frobnicate", "frobnicate")
        self.bad(2, "--frobnicate", "info", "--frobnicate")
        self.bad(2, "MODEL", "inspect")

    def test_help(self):
        text = self.good("--help").stdout.decode()
        for command in COMMANDS:
            self.assertIn(command, text)
            result = self.good(command, "--help")
            self.assertIn("Examples:", result.stdout.decode(), command)
            self.assertEqual(result.stderr, b"")

    def test_version(self):
        self.assertRegex(self.good("--version").stdout.decode(), r"^qmlp \d+\.\d+\.\d+\n$")

    def test_bad_values_name_the_option(self):
        m = cli.model()
        for option, value in (("--threads", "0"), ("--threads", "two"), ("--threads", "1.5"),
                              ("--isa", "sse2"), ("--activations", "int8"),
                              ("--precision", "exact"), ("--accumulation", "tensor/3"),
                              ("--fused", "yes"), ("--fuse-min-m", "0"),
                              ("--fused-max-calls", "-1"), ("--device", "metal"),
                              ("--max-tokens", "-1"), ("--ctx", "0"), ("--top-p", "1.5"),
                              ("--top-k", "x"), ("--temperature", "-1"), ("--seed", "1e3")):
            text = self.bad(2, option, "generate", m, "-p", "hi", option, value)
            self.assertIn(value, text)

    def test_bad_variables_are_named(self):
        m = cli.model()
        for name, value in (("QMLP_THREADS", "many"), ("QMLP_ISA", "best"), ("QMLP_FUSED", "2"),
                            ("QMLP_PRECISION", "f32"), ("QMLP_FUSE_MIN_M", "none"),
                            ("QMLP_FUSED_MAX_CALLS", "x"), ("QMLP_POISON_SCRATCH", "on")):
            text = self.bad(2, name, "generate", m, "-p", "hi", "-n", 1, env={name: value})
            self.assertIn(value, text)

    def test_cuda_is_not_here(self):
        for device in ("cuda", "cuda:1"):
            self.bad(3, "runs models on CPUs", "generate", cli.model(), "-p", "hi", "--device", device)
        self.good("generate", cli.model(), "-p", "hi", "-n", 1, "--device", "cpu")

    def test_missing_and_corrupt_models(self):
        missing = os.path.join(cli.FOLDER, "nowhere")
        for command in (("inspect", missing), ("generate", missing, "-p", "x"), ("kl", missing),
                        ("bench", missing)):
            self.bad(3, "nowhere", *command)
        broken = cli.copy_of_model("broken")
        with open(os.path.join(broken, "model.safetensors"), "r+b") as file:
            file.truncate(1000)
        self.bad(2, "model.safetensors", "inspect", broken)
        foreign = cli.copy_of_model("foreign", config={"model_type": "mamba"})
        self.bad(2, "mamba", "inspect", foreign)

    def test_empty_models(self):
        m = cli.model()
        for command in (("inspect", ""), ("verify", ""), ("generate", "", "-p", "x"), ("kl", ""),
                        ("kl", m, "--reference-model", ""), ("convert", "", "out"), ("bench", "")):
            text = self.bad(2, "'' was given, needs a path; see qmlp " + command[0], *command)
            self.assertRegex(text, "^qmlp: (MODEL|model|SRC|--reference-model): ")

    def test_empty_file_names(self):
        generate = ("generate", cli.model(), "-n", 1)
        for command in ((*generate, "--file"),
                        *((*generate, "-p", "x", option)
                          for option in ("--prompt-cache-load", "--prompt-cache-save", "--tap-gate")),
                        *(("kl", cli.model(), option)
                          for option in ("--record", "--recorded", "--text", "--ids")),
                        ("verify", "--vectors"), ("bench", "--quick", "--json"),
                        ("bench", "--quick", "--plot")):
            self.bad(2, f"{command[-1]}: '' was given, needs a path; see qmlp {command[0]}", *command, "")

    def test_json_files_hold_one_value(self):
        names = tiny_model.read_safetensors(os.path.join(cli.model(), "model.safetensors"))
        index = {"weight_map": {name: "model.safetensors" for name in names}}
        model = cli.copy_of_model("json_tails", **{"model.safetensors.index": index})
        generate = ("generate", model, "-p", "x", "-n", 1, "-q")
        for name in ("config.json", "generation_config.json", "model.safetensors.index.json",
                     "tokenizer.json", "tokenizer_config.json"):
            path = os.path.join(model, name)
            with open(path, "rb") as file:
                whole = file.read().rstrip()
            for blanks in (b"", b"\n "):
                for tail in (b"?", b"{}", b"\0", b"\0garbage", b"\xff"):
                    with open(path, "wb") as file:
                        file.write(whole + blanks + tail)
                    at = len(whole) + len(blanks)
                    self.bad(2, f"{path}: invalid JSON: byte {at}:", *generate)
            with open(path, "wb") as file:
                file.write(whole + b" \r\n\t\n")
            self.good(*generate)

    def test_info(self):
        info = self.json("info", "--kernels")
        self.assertEqual(info["threads"]["source"], "default")
        self.assertGreaterEqual(info["threads"]["used"], 1)
        self.assertIn(info["isa"]["used"], ("portable", "avx2", "avx512"))
        names = [kernel["name"] for kernel in info["kernels"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertTrue(any(name.endswith("_portable") for name in names))
        self.assertTrue(any(not kernel["compiled"] for kernel in info["kernels"]))  # CUDA rows
        self.assertIn("threads", self.good("info").stdout.decode())

    def test_variables_and_options_in_info(self):
        env = {"QMLP_THREADS": "3", "QMLP_ISA": "portable"}
        info = self.json("info", env=env)
        self.assertEqual((info["threads"]["used"], info["threads"]["source"]), (3, "QMLP_THREADS"))
        self.assertEqual((info["isa"]["used"], info["isa"]["source"]), ("portable", "QMLP_ISA"))
        info = self.json("info", "--threads", 2, env=env)  # the option beats the variable
        self.assertEqual((info["threads"]["used"], info["threads"]["source"]), (2, "--threads"))

    def test_affinity_limits_threads(self):
        def one_cpu():
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        info = self.json("info", preexec_fn=one_cpu)
        self.assertEqual(info["threads"]["used"], 1)


if __name__ == "__main__":
    unittest.main()
