"""The package in a process: threads at its end, subinterpreters, `python -m qmlp`, threads it cannot have."""
import os
import subprocess
import sys
import unittest

import support

ENVIRONMENT = {}


def setUpModule():
    support.package()
    ENVIRONMENT.update(os.environ, PYTHONPATH=str(support.build / "python"))


def python(*arguments, **variables):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120,
                          env={**ENVIRONMENT, **variables})


# Python frees what `sys` holds late, with the GIL given up: other threads end their calls meanwhile.
SLOW_END = """
import sys, threading, time
import numpy as np, qmlp
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)
sys.slow = Slow()
x, w = np.ones((3, 128), np.float32), np.ones((48, 128), np.float32)
packed = qmlp.pack(qmlp.quantize(w))
"""


class End(unittest.TestCase):
    """Daemon threads that are inside a call, or between two, while the interpreter finalizes."""

    def assertEnds(self, body, times):
        code = SLOW_END + body + """
for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
time.sleep(0.1)
print("end", flush=True)
"""
        for _ in range(times):
            done = python("-c", code)
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "end\n", ""))

    def test_calls(self):
        self.assertEnds("""
def spin():
    while True:
        qmlp.quantized_linear(x, packed)
""", 6)

    def test_refused_calls(self):
        self.assertEnds("""
def spin():
    decode_row = packed._handle.decode_row
    while True:
        try:
            decode_row(-1, x[:1], 0)
        except ValueError:
            pass
""", 4)

    def test_packing_and_quantizing(self):
        self.assertEnds("""
def spin():
    while True:
        qmlp.pack(qmlp.quantize(w))
""", 3)

    def test_mlx_ops(self):
        self.assertEnds("""
import mlx.core as mx
import qmlp.mlx
mx.set_default_device(mx.cpu)
packed, x = qmlp.mlx.pack(mx.array(w)), mx.array(x)
def spin():
    while True:
        qmlp.mlx.quantized_linear(x, packed)
""", 4)


class Interpreters(unittest.TestCase):
    def test_a_subinterpreter_is_refused_at_import(self):
        done = python("-c", """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
code = "try: import qmlp\\nexcept ImportError as error: print(error, flush=True)"
interpreters.run_string(interpreters.create(), code)
import qmlp
""")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 1)
        self.assertRegex(done.stdout, "subinterpreter")


class Command(unittest.TestCase):
    def test_module(self):
        done = python("-m", "qmlp")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("the command `qmlp`", done.stderr)


class Threads(unittest.TestCase):
    def test_more_than_the_system_starts(self):
        done = python("-c", """
import resource, threading, qmlp
threading.stack_size(0)
before = len(__import__("os").listdir("/proc/self/task"))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
try:
    qmlp.set_num_threads(1024)
except qmlp.DeviceError as error:
    print(error)
print(len(__import__("os").listdir("/proc/self/task")) - before)
""")
        self.assertEqual(done.returncode, 0, done.stderr)
        message, left = done.stdout.splitlines()
        self.assertRegex(message, r"^threads is 1024, the system starts no more than \d+: ")
        self.assertEqual(left, "0")  # those that did start were ended

    def test_numbers(self):
        done = python("-c", """
import qmlp
for bad in (2**31, 2**80, -2**40):
    try: qmlp.set_num_threads(bad)
    except ValueError as error: print(error)
for bad in (1.5, "2", None):
    try: qmlp.set_num_threads(bad)
    except TypeError as error: print(error)
""")
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 6, done.stdout + done.stderr)
        for line in lines:
            self.assertRegex(line, "^count is ")
        done = python("-c", "import qmlp", QMLP_THREADS="9999999999999")
        self.assertRegex(done.stderr.splitlines()[-1],
                         "QMLP_THREADS is '9999999999999', needs a number from 1 to 1024$")


if __name__ == "__main__":
    unittest.main()
