"""Standard streams that close, fill up or are interrupted; signals.

Nothing here depends on who is faster. A run that is to be stopped would go on for minutes by itself,
and what it writes, or a FIFO that it opens, tells how far it is.
"""
import json
import os
import signal
import subprocess
import time
import unittest

import cli

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTX = 1 << 18


def endless_model():
    """The model with a context that takes minutes to fill."""
    path = os.path.join(cli.FOLDER, "endless")
    if not os.path.exists(path):
        with open(os.path.join(cli.model(), "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        cli.copy_of_model("endless", config={**config, "max_position_embeddings": CTX})
    return path


ENDLESS = ("-p", "Hello", "-n", CTX, "--ctx", CTX, "--ignore-eos", "--threads", 1)


class Streams(cli.TestCase):
    def start(self, *args, **options):
        # Unbuffered: communicate() does not see what a buffered read took beyond its bytes.
        process = subprocess.Popen([cli.PROGRAM, *map(str, args)], stderr=subprocess.PIPE, bufsize=0,
                                   env=cli.environment(), **options)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def finish(self, process):
        out, error = process.communicate(timeout=60)
        return process.returncode, out, error.decode()

    def endless(self, *args):
        return self.start("generate", endless_model(), *ENDLESS, *args, stdout=subprocess.PIPE)

    def fifo(self, name):
        path = os.path.join(cli.FOLDER, name)
        os.mkfifo(path)
        return path

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            for args in (("info",), ("inspect", cli.model()), ("--help",),
                         ("generate", cli.model(), "-p", "x", "-n", 3, "-q")):
                status, _, error = self.finish(self.start(*args, stdout=full))
                self.assertEqual(status, 3, error)
                self.assertEqual(error, "qmlp: standard output: No space left on device\n")

    def test_closed_output(self):
        model = cli.model()
        process = self.start("inspect", model, preexec_fn=lambda: os.close(1))
        status, _, error = self.finish(process)
        self.assertEqual(status, 3)
        self.assertIn("standard output", error)

    def test_all_streams_closed(self):
        def close_all():
            for fd in (0, 1, 2):
                os.close(fd)
        process = subprocess.Popen([cli.PROGRAM, "generate", cli.model(), "-"],
                                   env=cli.environment(), preexec_fn=close_all, close_fds=False)
        self.assertEqual(process.wait(timeout=60), 3)

    def read_one_byte(self, process):
        """What `head -c1` does."""
        head = process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        return head

    def test_reader_goes_away(self):
        process = self.endless()
        self.read_one_byte(process)
        status, _, error = self.finish(process)
        self.assertEqual((status, error), (0, ""))

    def test_files_are_written_when_the_reader_has_gone(self):
        cache, taps = (os.path.join(cli.FOLDER, name) for name in ("gone.cache", "gone.taps"))
        process = self.endless("--prompt-cache-save", cache, "--tap-gate", taps)
        self.read_one_byte(process)
        status, _, error = self.finish(process)
        self.assertEqual((status, error), (0, ""))
        self.assertGreater(os.path.getsize(taps), 1000)
        plain = self.json("generate", endless_model(), "-p", "Hello", "-n", 12)
        cached = self.json("generate", endless_model(), "-p", "Hello", "-n", 12,
                           "--prompt-cache-load", cache, "--ctx", CTX)
        self.assertEqual(cached["token_ids"], plain["token_ids"])
        self.assertEqual(cached["reused_tokens"], 4)  # the last of the prompt's runs again

    def test_interrupt_stops_after_a_token(self):
        whole = self.json("generate", cli.model(), "-p", "Hello", "-n", 500, "--ignore-eos")["text"]
        process = self.endless()
        head = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        status, rest, error = self.finish(process)
        self.assertEqual(status, 130)
        self.assertIn("stopped: interrupted", error)
        self.assertIn("tokens/s", error)
        text = (head + rest).decode().rstrip("\n")
        self.assertGreater(len(text), 0)
        self.assertEqual(text[:len(whole)], whole[:len(text)])

    def test_interrupt_with_json_is_a_whole_object(self):
        # Nothing tells from outside when the tokens start, so the signal comes later and later.
        delay = 0.02
        while True:
            process = self.endless("--json")
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            status, out, error = self.finish(process)
            if status == 130 and out:
                break
            # Before the handler was there, or before the tokens.
            self.assertIn((status, error), ((-signal.SIGINT, ""), (130, "qmlp: interrupted\n")))
            self.assertEqual(out, b"")
            delay *= 2
        result = json.loads(out)
        self.assertEqual(result["stop_reason"], "interrupted")
        self.assertEqual(result["prompt_ids"], list(b"Hello"))

    def test_interrupt_while_waiting_for_a_prompt(self):
        for number in STOPS:
            path = self.fifo(f"prompt.{number}")
            process = self.start("generate", cli.model(), "-f", path, stdout=subprocess.PIPE)
            with open(path, "wb", buffering=0) as writer:  # returns when the program has opened it
                writer.write(b"Hel")
                process.send_signal(number)
                status, out, error = self.finish(process)
            self.assertEqual((status, out, error), (130, b"", "qmlp: interrupted\n"))

    def test_interrupt_while_nobody_writes_the_prompt(self):
        path = self.fifo("prompt.silent")
        delay = 0.02
        status = -signal.SIGTERM
        while status == -signal.SIGTERM:  # before the handler was there
            process = self.start("generate", cli.model(), "-f", path, stdout=subprocess.PIPE)
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            status, out, error = self.finish(process)
            delay *= 2
        self.assertEqual((status, out, error), (130, b"", "qmlp: interrupted\n"))

    def test_prompt_from_a_fifo(self):
        path = self.fifo("prompt")
        process = self.start("generate", cli.model(), "-f", path, "-n", 3, "--json",
                             stdout=subprocess.PIPE)
        with open(path, "wb", buffering=0) as writer:
            writer.write(b"Hel")
            writer.write(b"lo")
        status, out, error = self.finish(process)
        self.assertEqual((status, error), (0, ""))
        self.assertEqual(json.loads(out)["prompt_ids"], list(b"Hello"))

    def test_model_file_shrinks_while_the_prompt_is_awaited(self):
        model = cli.copy_of_model("shrinking")
        weights = os.path.join(model, "model.safetensors")
        path = self.fifo("prompt.shrinking")
        for options, good in ((("--no-mmap",), True), ((), False)):
            process = self.start("generate", model, "-f", path, "-n", 1, *options,
                                 stdout=subprocess.PIPE)
            with open(path, "wb", buffering=0) as writer:
                with open(weights, "rb") as file:
                    bytes_before = file.read()
                os.truncate(weights, 0)
                writer.write(b"Hello")
            status, out, error = self.finish(process)
            if good:
                self.assertEqual(status, 0, error)
            else:
                self.assertEqual((status, out), (3, b""))
                self.assertEqual(error, f"qmlp: {weights}: shrank while it was used: holds 0 bytes,"
                                        f" held {len(bytes_before)} when it was opened\n")
            with open(weights, "wb") as file:
                file.write(bytes_before)

    def test_results_alone_on_stdout(self):
        result = self.good("generate", cli.model(), "-p", "Hello", "-n", 4, "--json", "--progress",
                           "--counts")
        json.loads(result.stdout)
        self.assertNotIn(b"\x1b", result.stdout)

    def test_streaming(self):
        """Each token's text is written by itself: a packet pipe keeps writes apart."""
        reader, writer = os.pipe2(os.O_DIRECT)
        process = self.start("generate", cli.model(), "-p", "Hello", "-n", 20, "-q", stdout=writer)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as packets:
            pieces = list(iter(lambda: packets.read(4096), b""))
        self.assertEqual(self.finish(process)[0], 0)
        self.assertEqual(len(pieces), 21)  # and the line's end
        self.assertTrue(all(len(piece) == 1 for piece in pieces), pieces)


class NobodyReads(cli.TestCase):
    """Standard output is a pipe that nobody reads: files and exit status are as ever."""

    def run_unread(self, *args):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as unread:
            result = subprocess.run([cli.PROGRAM, *map(str, args)], stdout=unread,
                                    stderr=subprocess.PIPE, env=cli.environment(), timeout=120,
                                    check=False)
        return result.returncode, result.stderr.decode()

    def test_bench(self):
        fast = ("bench", "--shape", "64,64", "--shape", "64,96", "--m", "1,2", "--group", 32,
                "--seconds", 0.01, "--min-runs", 2, "--rotate-mib", 1)
        self.assertEqual(self.run_unread(*fast), (0, ""))
        rows, plot = (os.path.join(cli.FOLDER, name) for name in ("unread.json", "unread.svg"))
        self.assertEqual(self.run_unread(*fast, "--json", rows, "--plot", plot), (0, ""))
        with open(rows, encoding="utf-8") as file:
            self.assertEqual(len(json.load(file)["rows"]), 2 * 2 * 3)  # shapes, M, variants
        self.assertGreater(os.path.getsize(plot), 1000)

    def test_kl(self):
        path = os.path.join(cli.FOLDER, "unread.logits")
        self.assertEqual(self.run_unread("kl", cli.model(), "--positions", 20, "--record", path),
                         (0, ""))
        self.good("kl", cli.model(), "--recorded", path)
        status, error = self.run_unread("kl", cli.model(), "--test", "activations=bf16",
                                        "--positions", 20, "--fail-above", 1e-12)
        self.assertEqual(status, 1)
        self.assertIn("--fail-above", error)

    def test_verify(self):
        for form in ((), ("--json",)):
            options = ("verify", cli.model(), "--layers", 0, "--rows", "1", *form)
            self.assertEqual(self.run_unread(*options), (0, ""))
            self.assertEqual(self.run_unread(*options, "--plant", "kernel"), (1, ""))

    def test_convert(self):
        path = os.path.join(cli.FOLDER, "unread_model")
        self.assertEqual(self.run_unread("convert", cli.model(), path), (0, ""))
        self.good("inspect", path)

    def test_generate(self):
        path = os.path.join(cli.FOLDER, "unread.cache")
        for form in ((), ("--json",)):
            self.assertEqual(self.run_unread("generate", cli.model(), "-p", "abc", "-n", 9, "-q",
                                             "--prompt-cache-save", path, *form), (0, ""))
            self.assertGreater(os.path.getsize(path), 1000)
            os.remove(path)


if __name__ == "__main__":
    unittest.main()
