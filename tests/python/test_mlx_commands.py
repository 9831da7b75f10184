"""`python -m qmlp.mlx`: mlx-lm's commands on patched models, and how they end."""
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest

import support

# Several runs in one process, which is what most of a run's time goes to.
RUNS = """
import contextlib, io, json, sys
from qmlp.mlx.__main__ import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
# What a message is written in: one write, so that no other thread's text comes between.
WRITES = """
import json, sys
from qmlp.mlx.__main__ import main
class Recorder:
    written = []
    def write(self, text): self.written.append(text)
    def flush(self): pass
sys.stderr = Recorder()
status = main(["dance"])
print(json.dumps(sys.stderr.written))
sys.exit(status)
"""
MISSING = "MODEL is missing, needs a folder or the name of a repository on the Hugging Face Hub"
NO_MODEL = "needs a folder that exists or the name of a repository on the Hugging Face Hub"


def environment():
    return {**os.environ, "PYTHONPATH": str(support.build / "python"), "HF_HUB_OFFLINE": "1"}


class Commands(unittest.TestCase):
    def command(self, *arguments, interrupt=signal.SIG_DFL):
        process = subprocess.Popen(
            [sys.executable, "-m", "qmlp.mlx", *map(str, arguments)], text=True,
            env=environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # A shell's background jobs, and what they start, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt))
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def finished(self, *arguments, **options):
        process = self.command(*arguments, **options)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def runs(self, *cases):
        """(status, standard output, standard error) of each case's arguments."""
        words = json.dumps([[str(word) for word in case] for case in cases])
        done = subprocess.run(
            [sys.executable, "-c", RUNS, words], capture_output=True, text=True, timeout=120,
            env=environment())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(len(answers), len(cases))
        return answers

    def free_port(self):
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    def test_generate_and_bench(self):
        status, out, err = self.finished(
            "generate", support.model(), "--prompt", "What is the capital of France?",
            "--max-tokens", 10, "--temp", 0)
        self.assertEqual(status, 0, err)
        self.assertIn("Paris", out)
        self.assertIn("replaced: 30 x fused MLP", err)
        status, out, err = self.finished("bench", support.model(), "--quiet", "-p", 16, "-g", 4,
                                         "-n", 1)
        self.assertEqual(status, 0, err)
        self.assertRegex(out, r"(?s)Averages.*generation_tps")
        self.assertNotIn("replaced", err)

    def test_usage(self):
        names = ("generate", "bench", "server", "chat")
        model = support.model()
        (status, out, _), (other, _, err), *answers = self.runs(
            ["--help"], ["dance", "model"],
            *([name] for name in names),
            *([name, "models/no/such"] for name in names),
            *([name, ""] for name in names),
            ["generate", "--model", "./no"],
            ["generate", model, "--model", model],
            ["generate", model, "--prompt", "--quiet"],
            ["generate", model, "--max-tokens", "x"],
            ["generate", model, "--draft-model", "./no"],
            ["generate", support.gguf],
            ["generate", support.DATA],
            ["generate", model, "--adapter-path", "none"],
            ["generate", "no-model-of-this-name"])
        self.assertEqual(status, 0)
        self.assertIn("python -m qmlp.mlx chat MODEL", out)
        self.assertEqual((other, err), (2, "qmlp.mlx: no command is called 'dance', needs one of "
                                           "generate, bench, server, chat\n"))
        see = "; see python -m qmlp.mlx generate --help"
        wanted = (
            *(f"{name}: {MISSING}; see python -m qmlp.mlx {name} --help" for name in names),
            *(f"MODEL is 'models/no/such', {NO_MODEL}" for name in names),
            *(f"MODEL is '', {NO_MODEL}" for name in names),
            f"MODEL is './no', {NO_MODEL}",
            f"generate: MODEL is given twice{see}",
            f"generate: argument --prompt/-p: expected one argument{see}",
            f"generate: argument --max-tokens/-m: invalid int value: 'x'{see}",
            f"--draft-model is './no', {NO_MODEL}",
            re.compile("MODEL is .*, a file, needs a folder"),
            re.compile("cannot load .*config.json"),
            re.compile("cannot load .*adapter path does not exist: none"),
            re.compile("cannot load 'no-model-of-this-name', which is no folder here: "),
        )
        self.assertEqual(len(wanted), len(answers))
        for want, (status, out, err) in zip(wanted, answers):
            self.assertEqual((status, out), (2, ""), err)
            self.assertEqual(err.count("\n"), 1, err)
            if isinstance(want, re.Pattern):
                self.assertRegex(err, want)
            else:
                self.assertEqual(err, f"qmlp.mlx: {want}\n")

    def test_values_that_look_like_options(self):
        (status, out, err), = self.runs(
            ["generate", "--quiet", support.model(), "--ignore-chat-template", "--max-tokens", 1,
             "--prompt=--quiet --unpatched"])
        self.assertEqual((status, err), (0, ""))
        ids = support.qmlp_json("generate", support.model(), "-p", "--quiet --unpatched", "-n", 1)
        self.assertIn(f"Prompt: {len(ids['prompt_ids'])} tokens", out)

    def test_prompt_caches_of_the_other_kind(self):
        ours, theirs = (support.scratch() / name for name in ("ours.safetensors", "theirs.safetensors"))
        model = support.model()
        support.qmlp("generate", model, "-p", "Hello", "-n", 2, "--prompt-cache-save", ours)
        from mlx_lm.models.cache import KVCache, save_prompt_cache
        import mlx.core as mx

        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 3, 4, 64)), mx.zeros((1, 3, 4, 64)))
        save_prompt_cache(str(theirs), [cache] * 30, {"model": str(model), "tokenizer_config": "{}"})
        for (status, out, err), want in zip(self.runs(
                *(["generate", model, "--prompt-cache-file", file]
                  for file in (ours, model / "model.safetensors", "none.safetensors"))),
                (f"'{ours}', saved by `qmlp generate`, needs a cache of mlx_lm.cache_prompt\n",
                 "needs a cache of mlx_lm.cache_prompt: ", "No such file or directory\n")):
            self.assertEqual((status, out), (2, ""))
            self.assertEqual(err.count("\n"), 1, err)
            self.assertIn(want, err)
        done = subprocess.run(
            [support.program(), "generate", model, "-p", "Hello", "--prompt-cache-load", theirs],
            capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(done.stderr, f"qmlp: {theirs}: is not a qmlp prompt cache\n")

    def test_a_reader_that_leaves(self):
        process = self.command("generate", support.model(), "--quiet", "--max-tokens", 5000)
        process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        self.assertEqual(process.communicate(timeout=60)[1], "")
        self.assertEqual(process.returncode, 0)

    def test_interrupted(self):
        process = self.command("generate", support.model(), "--quiet", "--max-tokens", 5000)
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.communicate(timeout=60)[1], "")
        self.assertEqual(process.returncode, 130)

    def test_a_server_that_cannot_load(self):
        for interrupt in (signal.SIG_DFL, signal.SIG_IGN):  # SIG_IGN: a background job of a script
            status, out, err = self.finished("server", support.DATA, "--port", self.free_port(),
                                             "--log-level", "ERROR", interrupt=interrupt)
            self.assertEqual((status, out), (2, ""))
            # The main thread may warn at the same time.
            self.assertRegex(err, "(?m)^qmlp.mlx: cannot load .*config.json")
            self.assertNotIn("Traceback", err)

    def test_messages_are_written_as_one(self):
        done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True,
                              env=environment(),
                              timeout=120)
        self.assertEqual((done.returncode, done.stderr), (2, ""))
        message, = json.loads(done.stdout)
        self.assertRegex(message, "^qmlp.mlx: .*\n$")

    def test_without_standard_error(self):
        done = subprocess.run([sys.executable, "-m", "qmlp.mlx", "dance"], stdout=subprocess.PIPE,
                              preexec_fn=lambda: os.close(2), timeout=120,
                              env=environment())
        self.assertEqual((done.returncode, done.stdout), (2, b""))

    def test_a_reader_of_the_errors_that_leaves(self):
        generate = ("generate", support.model(), "--max-tokens", 1, "--verbose", "false")
        for arguments, status, text in ((("dance",), 2, ""), (generate, 0, "Hello\n")):
            reader, writer = os.pipe()
            os.close(reader)
            done = subprocess.run(
                [sys.executable, "-m", "qmlp.mlx", *map(str, arguments)], stderr=writer, text=True,
                stdout=subprocess.PIPE, timeout=120,
                env=environment())
            os.close(writer)
            self.assertEqual((done.returncode, done.stdout), (status, text))

    def test_an_output_that_cannot_be_written(self):
        for shell, want in (("> /dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
            done = subprocess.run(
                ["sh", "-c", f'exec "$0" -m qmlp.mlx --help {shell}', sys.executable],
                capture_output=True, text=True, timeout=120,
                env=environment())
            self.assertEqual((done.returncode, done.stderr), (3, f"qmlp.mlx: standard output: {want}\n"))

    def test_server(self):
        """mlx_lm.server answers an HTTP client from the patched model."""
        port = self.free_port()
        process = self.command("server", support.model(), "--port", port, "--temp", "0")
        errors = io.StringIO()
        reader = threading.Thread(target=lambda: errors.writelines(process.stderr))
        reader.start()
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    connection.request("POST", "/v1/chat/completions", json.dumps({
                        "messages": [{"role": "user", "content": "What is the capital of France?"}],
                        "max_tokens": 12, "temperature": 0}), {"Content-Type": "application/json"})
                    answer = connection.getresponse()
                    break
                except ConnectionRefusedError:
                    self.assertIsNone(process.poll(), errors.getvalue())
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.2)
            body = json.loads(answer.read())
            self.assertEqual(answer.status, 200, body)
            self.assertIn("Paris", body["choices"][0]["message"]["content"])
            connection.close()
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(30)
            reader.join(30)
            process.stdout.close()
            process.stderr.close()
        self.assertTrue(re.search(r"replaced: 30 x fused MLP", errors.getvalue()))
        self.assertEqual(status, 130, errors.getvalue())
        self.assertNotIn("Traceback", errors.getvalue())


if __name__ == "__main__":
    unittest.main()
