"""Standard streams that close, fill up or are interrupted; signals."""
import json
import os
import signal
import subprocess
import time
import unittest

import cli


class Streams(cli.TestCase):
    def start(self, *args, **options):
        return subprocess.Popen([cli.PROGRAM, *map(str, args)], stderr=subprocess.PIPE,
                                env=cli.environment(), **options)

    def finish(self, process):
        out, error = process.communicate(timeout=60)
        return process.returncode, out, error.decode()

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

    def test_reader_goes_away(self):
        process = self.start("generate", cli.model(), "-p", "Hello", "-n", 400, "--ignore-eos",
                             stdout=subprocess.PIPE)
        process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        status, _, error = self.finish(process)
        self.assertEqual((status, error), (0, ""))

    def test_all_streams_closed(self):
        def close_all():
            for fd in (0, 1, 2):
                os.close(fd)
        process = subprocess.Popen([cli.PROGRAM, "generate", cli.model(), "-"],
                                   env=cli.environment(), preexec_fn=close_all, close_fds=False)
        self.assertEqual(process.wait(timeout=60), 3)

    def interrupted(self, *args):
        """Interrupts generate once its first text is out."""
        process = self.start("generate", cli.model(), "-p", "Hello", "-n", 100000, "--ignore-eos",
                             "--ctx", 512, *args, stdout=subprocess.PIPE)
        return process

    def test_interrupt_stops_after_a_token(self):
        whole = self.json("generate", cli.model(), "-p", "Hello", "-n", 500, "--ignore-eos")["text"]
        # A pipe that nobody empties would block the program: read, interrupt, then read the rest.
        for _ in range(10):  # the run may win the race
            process = self.interrupted()
            head = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            status, rest, error = self.finish(process)
            if status == 130:
                break
        self.assertEqual(status, 130)
        self.assertIn("stopped: interrupted", error)
        self.assertIn("tokens/s", error)
        self.assertTrue(whole.startswith((head + rest).decode().rstrip("\n")))

    def test_interrupt_with_json_is_a_whole_object(self):
        # The signal comes while the prompt is read, so that it is pending when tokens start.
        process = self.start("generate", cli.model(), "-p", "Hello", "-n", 500, "--ignore-eos",
                             "--json", stdout=subprocess.PIPE)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        status, out, error = self.finish(process)
        if status == 130 and out:
            self.assertEqual(json.loads(out)["stop_reason"], "interrupted")
        elif status == 130:
            self.assertEqual(error, "qmlp: interrupted\n")
        elif status == -signal.SIGINT:
            pass  # before the handler was there
        else:
            self.assertEqual(status, 0)

    def test_interrupt_while_waiting_for_a_prompt(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = self.start("generate", cli.model(), "-", stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE)
            # The prompt is read after the model is opened: wait until the program sleeps in read.
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with open(f"/proc/{process.pid}/wchan", encoding="ascii") as file:
                    if "pipe" in file.read():
                        break
                with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
                    if file.read().split()[2] == "S":
                        time.sleep(0.1)
                        break
            process.send_signal(number)
            status, _, error = self.finish(process)
            self.assertEqual((status, error), (130, "qmlp: interrupted\n"))

    def test_results_alone_on_stdout(self):
        result = self.good("generate", cli.model(), "-p", "Hello", "-n", 4, "--json", "--progress",
                           "--counts")
        json.loads(result.stdout)
        self.assertNotIn(b"\x1b", result.stdout)

    def test_streaming(self):
        """Text arrives token by token, not at the end."""
        process = self.interrupted()
        first = os.read(process.stdout.fileno(), 4096)
        self.assertLess(len(first), 500)
        process.kill()
        process.communicate()


if __name__ == "__main__":
    unittest.main()
