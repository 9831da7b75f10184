"""Runs the built program and checks what it prints and how it exits."""
import atexit
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import unittest

import tiny_model

PROGRAM = os.environ["QMLP_PROGRAM"]
FOLDER = tempfile.mkdtemp(prefix="qmlp_cli_")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def environment(**variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("QMLP_")}
    return {**clean, **variables}


def run(*args, stdin=b"", env=None, **options):
    return subprocess.run([PROGRAM, *map(str, args)], input=stdin, capture_output=True,
                          env=environment(**(env or {})), timeout=120, check=False, **options)


_made = {}


def float_model():
    if "float" not in _made:
        _made["float"] = os.path.join(FOLDER, "float")
        tiny_model.write_float_model(_made["float"])
    return _made["float"]


def model():
    """4-bit gate, 8-bit up, 6-bit down, groups of 32, f16 scales."""
    if "model" not in _made:
        path = os.path.join(FOLDER, "model")
        result = run("convert", float_model(), path, "--bits", "*=4,up=8,down=6,embed=8",
                     "--group-size", 32, "--scale-dtype", "f16")
        if result.returncode != 0:
            raise AssertionError(result.stderr.decode())
        _made["model"] = path
    return _made["model"]


def copy_of_model(name, **files):
    """A copy of the model with JSON files replaced: copy_of_model("x", generation_config={...})."""
    path = os.path.join(FOLDER, name)
    shutil.copytree(model(), path)
    for stem, value in files.items():
        with open(os.path.join(path, stem + ".json"), "w", encoding="utf-8") as file:
            json.dump(value, file)
    return path


class TestCase(unittest.TestCase):
    def good(self, *args, **options):
        result = run(*args, **options)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        return result

    def json(self, *args, **options):
        return json.loads(self.good(*args, "--json", **options).stdout)

    def bad(self, status, message, *args, **options):
        """The program exits with `status` and says exactly one line that holds `message`."""
        result = run(*args, **options)
        text = result.stderr.decode()
        self.assertEqual(result.returncode, status, f"{args}: {text}")
        self.assertTrue(text.startswith("qmlp: "), text)
        self.assertEqual(text.count("\n"), 1, text)
        self.assertIn(message, text)
        self.assertEqual(result.stdout, b"")
        return text

    def full_disk_leaves_the_old_file(self, name, *args):
        """The program, which is to write a file `name`, has room for no more than its first bytes."""
        folder = tempfile.mkdtemp(dir=FOLDER)
        path = os.path.join(folder, name)
        with open(path, "w", encoding="ascii") as file:
            file.write("old")
        result = run(*args, path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))
        self.assertEqual(result.returncode, 3)
        self.assertRegex(result.stderr.decode(),
                         rf"^qmlp: {re.escape(path)}: cannot write(| \d+ bytes): File too large\n$")
        self.assertEqual(os.listdir(folder), [name])
        with open(path, encoding="ascii") as file:
            self.assertEqual(file.read(), "old")
